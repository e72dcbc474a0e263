"""Density by three objectives: the front against brute force, the knee, and NSGA-II against the grid."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from cgx_ray.errors import ConfigError
from cgx_ray.plan import CodecSpec, Layer, Option, Scheme
from cgx_ray.planner.candidates import CodecCost, codec_cost_of
from cgx_ray.planner.cost import Link, Network, terms
from cgx_ray.planner.papers.flexible import (
    CANDIDATE_DENSITIES,
    PRICES,
    SCHEMES,
    Trial,
    choose,
    collective,
    density_grid,
    front,
    interpolate_gain,
    knee,
    known_gain,
    nsga2,
    paper_exchange_s,
    predict,
)
from cgx_ray.planner.prediction import Measured

COST = CodecCost(encode_a_s=1e-5, encode_b_s_per_element=2e-9, decode_a_s=1e-5, decode_b_s_per_element=1e-10)


def trial(codec_s: float, exchange_s: float, gain: float) -> Trial:
    return Trial(
        codec=CodecSpec(name="topk"), scheme=Scheme.ALLGATHER, codec_s=codec_s, exchange_s=exchange_s, gain=gain
    )


def trial_by_density(bandwidth_gbps: float, latency_ms: float) -> Callable[[float], Trial]:
    """Predict three groups of 2^20 elements among 8 workers."""
    network = Network.flat(8, Link.from_rates(bandwidth_gbps=bandwidth_gbps, latency_ms=latency_ms))
    return predict(network, lambda option: COST, (1 << 20,) * 3, gain_of_option)


def gain_of_option(option: Option) -> float:
    assert option.codec.density is not None
    return gain_of(option.codec.density)


def gain_of(density: float) -> float:
    """Return the gain of magnitudes with an exponential distribution."""
    return density * (1 - math.log(density) + math.log(density) ** 2 / 2)


GAIN = {str(CodecSpec(name="topk", density=density)): gain_of(density) for density in CANDIDATE_DENSITIES}


def measured(network: Network, costs: Mapping[str, CodecCost], gain: Mapping[str, float] = GAIN) -> Measured:
    """Return measurements of one layer that is worth compressing."""
    return Measured(
        layers=(Layer(name="w", numel=1 << 20, ndim=2),),
        backward_s=(0.1,),
        network=network,
        codec_costs=costs,
        gain=gain,
    )


def test_front_equals_brute_force_in_200_cases_with_ties() -> None:
    rng = random.Random(0)
    for case in range(200):
        trials = [trial(rng.randint(0, 4), rng.randint(0, 4), 1 / rng.randint(1, 5)) for _ in range(rng.randint(1, 30))]
        expected = []
        for one in trials:
            beaten = any(
                all(a <= b for a, b in zip(other.objectives, one.objectives, strict=True))
                and other.objectives != one.objectives
                for other in trials
            )
            if not beaten:
                expected.append(one)
        assert front(trials) == tuple(expected), case
        assert knee(trials) in expected


def test_knee_is_where_the_curve_bends() -> None:
    """On x y = 1 the knee is the point nearest to both axes, in any units."""
    trials = [trial(1000 * x, 0.25, 1 / y) for x, y in ((0.1, 10), (0.5, 2), (1, 1), (2, 0.5), (10, 0.1))]
    assert knee(trials) == trials[2]
    # An objective that is the same for all but for rounding decides nothing.
    rounded = [trial(1.0 + index * 1e-15, 1.0, gain) for index, gain in enumerate((0.5, 0.9))]
    assert knee(rounded) == rounded[1]
    with pytest.raises(ConfigError, match="no trial to choose from"):
        knee([])


def test_nsga2_finds_the_knee_of_the_grid_within_a_step_of_it() -> None:
    """On this link the fastest collective changes with the density."""
    trial_at = trial_by_density(1, 1)
    grid = density_grid()
    exact, found = knee([trial_at(density) for density in grid]), knee(nsga2(trial_at))
    assert exact.codec.density is not None
    assert found.codec.density is not None
    steps = math.log(found.codec.density / exact.codec.density) / math.log(grid[1] / grid[0])
    assert abs(steps) <= 1, (found, exact)


def test_prediction_takes_the_collective_with_the_least_cost() -> None:
    """Few values on a link of high latency: allgather, in one hop. Many on little bandwidth: a sum of values."""
    assert trial_by_density(10, 50)(0.001).scheme is Scheme.ALLGATHER
    assert trial_by_density(0.1, 0.1)(0.1).scheme is not Scheme.ALLGATHER
    slow = [trial_by_density(0.1, 0.1)(density).exchange_s for density in CANDIDATE_DENSITIES]
    assert slow == sorted(slow, reverse=True)


def test_each_density_has_the_codec_time_that_was_measured_with_it() -> None:
    """Also if a layer rule has the default density, whose text is that of the codec without parameters."""
    network = Network.flat(8, Link.from_rates(bandwidth_gbps=1, latency_ms=1))
    factors = {density: 1 + 100 * density for density in CANDIDATE_DENSITIES}
    costs = {str(CodecSpec(name="topk", density=density)): COST.slowed(factor) for density, factor in factors.items()}
    known = measured(network, costs | {str(CodecSpec(name="topk")): COST.slowed(1e3)})
    for density, factor in factors.items():
        found = choose(known, gain_of_option, densities=(density,))
        alone = predict(network, lambda option: COST, (1 << 20,), gain_of_option)(density)
        assert found.codec_s == pytest.approx(factor * alone.codec_s)
    between = codec_cost_of(costs, CodecSpec(name="topk", density=math.sqrt(0.1 * 0.033)))
    assert between.encode_a_s == pytest.approx(COST.encode_a_s * (factors[0.1] + factors[0.033]) / 2)
    assert codec_cost_of(costs, CodecSpec(name="topk", density=1.0)) == costs["topk:density=0.1"]
    # One density's profile may know the times of further rows, and another's not.
    rarest = str(CodecSpec(name="topk", density=min(factors)))
    mixed = {**costs, rarest: replace(costs[rarest], encode_row_s=1e-6)}
    assert codec_cost_of(mixed, CodecSpec(name="topk", density=math.sqrt(0.1 * 0.033))) == between


def test_artopk_is_scored_by_its_gain_at_the_indices_of_another_rank() -> None:
    foreign = {f"{codec} over {scheme}": 0.2 * gain for codec, gain in GAIN.items() for scheme in SCHEMES[1:]}
    network = Network.flat(8, Link.from_rates(bandwidth_gbps=0.1, latency_ms=0.1))
    gain = known_gain(measured(network, {}, {**GAIN, **foreign}), CANDIDATE_DENSITIES)
    assert gain is not None
    found = choose(measured(network, {"topk": COST}), gain)
    assert found.scheme is not Scheme.ALLGATHER
    assert found.codec.density is not None
    assert found.gain == pytest.approx(0.2 * gain_of(found.codec.density))
    between = Option(codec=CodecSpec(name="topk", density=0.05), scheme=Scheme.ALLGATHER)
    assert gain(between) == pytest.approx(gain_of(0.05), rel=0.05)
    assert gain(replace(between, scheme=Scheme.ARTOPK_TREE)) == pytest.approx(0.2 * gain(between))
    del foreign["topk:density=0.1 over artopk_ring"]
    unknown = {name: one for name, one in GAIN.items() if name != "topk:density=0.1"}
    assert known_gain(measured(network, {}, {**unknown, **foreign}), CANDIDATE_DENSITIES) is None


def test_exchanges_have_the_price_of_what_runs_or_that_of_the_paper() -> None:
    """With 8 workers allgather takes one hop here, and three in the paper."""
    link, numel = Link.from_rates(bandwidth_gbps=1, latency_ms=1), 1 << 20
    network, num_differing = Network.flat(8, link), 0
    for density in density_grid():
        option = Option(codec=CodecSpec(name="topk", density=density), scheme=Scheme.ALLGATHER)
        wire_bytes, index_bytes = option.codec.payload_bytes(numel), option.codec.index_bytes(numel)
        runs = {one: link.seconds(*terms(one, 8, 0, wire_bytes, index_bytes)) for one in SCHEMES}
        ours, paper = (
            choose(measured(network, {"topk": COST}), gain_of_option, densities=(density,), prices=prices)
            for prices in PRICES
        )
        assert ours.exchange_s == pytest.approx(min(runs.values()))
        assert ours.exchange_s == pytest.approx(runs[ours.scheme])
        prices = {one: paper_exchange_s(one, 8, 4 * density * numel, link) for one in SCHEMES}
        assert paper.exchange_s == pytest.approx(min(prices.values()))
        assert paper.scheme is collective(8, 4 * density * numel, link)
        num_differing += ours.scheme is not paper.scheme
    assert 0 < num_differing < len(density_grid())


def test_gain_between_four_densities_a_decade_is_as_exact_as_straight_lines_are() -> None:
    """The error is h^2 / 8 of the second derivative of log gain in log density, below 0.3 here; h is ln(10) / 4."""
    densities = [10 ** (-quarter / 4) for quarter in range(16, -1, -1)]
    gain = interpolate_gain(densities, [gain_of(density) for density in densities])
    grid = density_grid(1e-4, 1.0)
    errors = {density: gain(density) / gain_of(density) - 1 for density in grid}
    assert max(map(abs, errors.values())) <= (math.log(10) / 4) ** 2 / 8 * 0.3, errors
    assert gain(1e-5) == pytest.approx(gain(1e-4) / 10)


def test_a_grid_holds_both_ends() -> None:
    assert density_grid()[0] == 0.001
    assert density_grid()[-1] == pytest.approx(0.1)
    assert len(density_grid()) == 25
    assert max(density_grid(0.01, 1.0)) <= 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: trial(math.nan, 1, 1), "finite seconds"),
        (lambda: trial(1, 1, 0), "more than 0"),
        (lambda: interpolate_gain([0.1, 0.01], [0.5, 0.2]), "rising densities"),
        (lambda: interpolate_gain([], []), "give one each"),
        (lambda: interpolate_gain([0.1], [math.nan]), "finite gains"),
        (lambda: density_grid(0.1, 0.01), "low < high"),
        (lambda: trial_by_density(1, 1)(0), "density 0"),
    ],
)
def test_bad_input_is_one_clear_error(make: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()  # type: ignore[operator]
