"""Predicted steps: by hand, and at the limits of bandwidth, gains and numbers of workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cgx_ray.errors import ConfigError
from cgx_ray.plan import DENSE, CodecSpec, Intra, Layer, Option, Scheme
from cgx_ray.planner.candidates import CodecCost, candidate_options, efficiency
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.engine_cost import HOST_ENGINE
from cgx_ray.planner.pipeline import GroupEnd, Pipeline, group_cost
from cgx_ray.planner.planned_group import PlannedGroup
from cgx_ray.planner.prediction import Measured, Prediction, predict

THREAD_S = HOST_ENGINE.thread_s
DENSITIES = (0.1, 0.01, 0.001)
SCHEMES = (Scheme.SRA, Scheme.ALLGATHER, Scheme.ARTOPK_RING)
OPTIONS = (DENSE, *(o for o in candidate_options(DENSITIES)[12:] if o.intra is Intra.FLAT and o.scheme in SCHEMES))
SRA = Option(codec=CodecSpec(name="bf16"), scheme=Scheme.SRA)
# A busy machine would miss hypothesis's deadline of 200 ms per example.
UNTIMED = settings(deadline=None)
LAN = Link.from_rates(bandwidth_gbps=1, latency_ms=0.5)
GAIN = {
    "bf16": 1.0,
    "qsgd:bits=4,bucket_size=128": 1.02,
    "topk:density=0.1": 0.7,
    "topk:density=0.01": 0.4,
    "topk:density=0.001": 0.1,
}
CPU = CodecCost(encode_a_s=2e-5, encode_b_s_per_element=1e-9, decode_a_s=2e-5, decode_b_s_per_element=5e-10)
COSTS = {"bf16": CPU, "qsgd": CPU, "topk": CPU}


def run_with(*numels: int, backward_s: tuple[float, ...] = (), **changes: object) -> Measured:
    """Return layers "0", "1", ... in the order of backward, without compute time unless `backward_s` is given."""
    given = {
        "layers": tuple(Layer(name=str(index), numel=numel, ndim=2) for index, numel in enumerate(numels))[::-1],
        "backward_s": backward_s or (0.0,) * len(numels),
        "network": Network.flat(4, LAN),
        "codec_costs": COSTS,
        "gain": GAIN,
    }
    return Measured(**{**given, **changes})


def predict_with(run: Measured, *options: Option) -> Prediction:
    """Predict one group per layer, in the order of backward, with one option each or one for all."""
    chosen = options if len(options) > 1 else options * len(run.layers)
    groups = [PlannedGroup.of([layer], option) for layer, option in zip(reversed(run.layers), chosen, strict=True)]
    return predict(run, groups)


def test_candidates_are_all_codecs_over_all_schemes_that_carry_them_dense_first() -> None:
    options = candidate_options([0.01])
    assert options[0] == DENSE
    assert len(set(options)) == len(options) == 12 + 18 + 15 + 14
    flat = [str(option) for option in options if option.intra is Intra.FLAT and option.codec.name == "bf16"]
    assert flat == [f"bf16 over {scheme}" for scheme in ("allreduce", "allgather", "sra", "ring", "tree", "broadcast")]


@UNTIMED
@given(
    groups=st.lists(st.tuples(st.integers(1, 5_000_000), st.sampled_from(OPTIONS)), min_size=1, max_size=6),
    world_size=st.integers(1, 64),
    slow_gbps=st.floats(1e-3, 100),
    faster=st.floats(1, 1000),
    latency_ms=st.floats(0, 100),
)
def test_more_bandwidth_is_never_slower(
    groups: list[tuple[int, Option]], world_size: int, slow_gbps: float, faster: float, latency_ms: float
) -> None:
    """Predict groups alone, dense groups side by side, and by the search's model all that overlap codec and network.

    Other groups may be slower side by side, by a little, as in the engine: a message that comes early lets the thread
    decode an old group first, and the next one is encoded later.
    """
    numels, options = zip(*groups, strict=True)
    slow, fast = (
        run_with(
            *numels,
            backward_s=(0.01,) * len(numels),
            network=Network.flat(world_size, Link.from_rates(bandwidth_gbps=gbps, latency_ms=latency_ms)),
        )
        for gbps in (slow_gbps, slow_gbps * faster)
    )
    overlapping = [option if option.scheme in (Scheme.DENSE, Scheme.SRA) else SRA for option in options]
    slow_s, fast_s = (model_finish_s(run, overlapping) for run in (slow, fast))
    assert fast_s <= slow_s * (1 + 1e-12)
    kinds = [(numels, (DENSE,))] + [((numel,), (option,)) for numel, option in groups]
    for some, chosen in kinds:
        before, after = (
            predict_with(run_with(*some, backward_s=(0.01,) * len(some), network=run.network), *chosen)
            for run in (slow, fast)
        )
        # At most 24 stages follow each other. Each end is rounded, and a stage has a few roundings of its own.
        rounding = 64 * math.ulp(before.step_s)
        assert after.step_s <= before.step_s + rounding
        assert after.efficiency is not None
        assert after.score <= before.score + rounding / after.efficiency


def model_finish_s(run: Measured, options: Sequence[Option]) -> float:
    """Return the finish of one group per layer by `Pipeline`."""
    costs = tuple(group_cost(one, network=run.network, codec_cost=run.cost_of(one)) for one in options)
    numels = tuple(layer.numel for layer in reversed(run.layers))
    pipeline = Pipeline(backward_s=run.backward_s, numel=numels, costs=costs)
    return pipeline.finish_s([GroupEnd(index + 1, index) for index in range(len(options))])


def test_prediction_of_dense_by_hand() -> None:
    """1 Gbit/s, 4 workers: 1.5 M bytes of 8 ns, then 6 hops of 0.5 ms. The first group hides behind backward.

    The link carries the third group right after the second; the hops of both pass meanwhile.
    """
    result = predict_with(run_with(1_000_000, 2_000_000, 10_000, backward_s=(0.0, 0.2, 0.0), after_s=0.1), DENSE)
    first_s, second_s, third_s = (1.5 * M * 8e-9 for M in (4_000_000, 8_000_000, 40_000))
    assert first_s < 0.2
    assert result.step_s == pytest.approx(0.3 + THREAD_S + second_s + third_s + 3e-3)
    assert result.compute_s == pytest.approx(0.3)
    assert (result.codec_s, result.efficiency, result.score) == (0, 1, result.step_s)
    assert sum(group.wire_bytes for group in result.groups) == 12_040_000
    parts = {"compute": 0.2, "codec": THREAD_S, "bandwidth": second_s + third_s, "latency": 3e-3}
    assert result.timeline.parts_s == pytest.approx(parts)


@pytest.mark.parametrize(
    ("option", "encodes", "decodes"),
    [
        (Option(codec=CodecSpec(name="bf16"), scheme=Scheme.ALLGATHER), (1, 1), (4, 4)),
        (Option(codec=CodecSpec(name="bf16"), scheme=Scheme.SRA), (4, 1), (7, 1.75)),
        (Option(codec=CodecSpec(name="bf16"), scheme=Scheme.RING), (4, 1), (7, 1.75)),
        (Option(codec=CodecSpec(name="bf16"), scheme=Scheme.TREE), (4, 1), (7, 1.75)),
        (Option(codec=CodecSpec(name="bf16"), scheme=Scheme.BROADCAST), (2, 2), (4, 4)),
        (Option(codec=CodecSpec(name="topk", density=0.1), scheme=Scheme.ALLGATHER), (1, 1), (4, 4)),
        (Option(codec=CodecSpec(name="topk", density=0.1), scheme=Scheme.ARTOPK_TREE), (1, 1), (1, 1)),
        (Option(codec=CodecSpec(name="topk", density=0.1), scheme=Scheme.ARTOPK_RING), (1, 1), (1, 1)),
        (Option(codec=CodecSpec(name="randomk"), scheme=Scheme.ALLREDUCE), (1, 1), (1, 1)),
    ],
    ids=str,
)
def test_codec_time_counts_the_calls_and_elements_of_each_scheme(
    option: Option, encodes: tuple[int, float], decodes: tuple[int, float]
) -> None:
    numel = 1_000_000
    cost = CodecCost(encode_a_s=1e-3, encode_b_s_per_element=1e-9, decode_a_s=1e-4, decode_b_s_per_element=1e-10)
    result = predict_with(run_with(numel, codec_costs={option.codec.name: CPU, str(option.codec): cost}), option)
    expected_s = encodes[0] * 1e-3 + encodes[1] * 1e-3 + decodes[0] * 1e-4 + decodes[1] * 1e-4
    assert result.codec_s == pytest.approx(expected_s)


def test_a_guest_and_its_host_encode_and_decode_a_group_more_over_a_tree() -> None:
    """3 workers, 2 chunks: guest and host encode both. The host decodes and adds two and one, then two averages."""
    cost = CodecCost(encode_a_s=1e-3, encode_b_s_per_element=1e-9, decode_a_s=1e-4, decode_b_s_per_element=1e-10)
    option = Option(codec=CodecSpec(name="bf16"), scheme=Scheme.TREE)
    result = predict_with(run_with(1_000_000, network=Network.flat(3, LAN), codec_costs={"bf16": cost}), option)
    assert result.codec_s == pytest.approx(4 * 1e-3 + 2 * 1e-3 + 5 * 1e-4 + 2.5 * 1e-4)


def test_one_worker_exchanges_and_encodes_nothing() -> None:
    alone = run_with(1_000_000, 2_000_000, backward_s=(0.1, 0.1), network=Network.flat(1, LAN))
    results = [predict_with(alone, option) for option in OPTIONS]
    assert {(result.step_s, result.codec_s) for result in results} == {(0.2, 0)}


def test_half_precision_groups_send_two_bytes_an_element_when_dense() -> None:
    layer = Layer(name="0", numel=1000, ndim=2, dtype="bfloat16")
    assert PlannedGroup.of([layer], DENSE).wire_bytes == 2000


def test_an_option_without_a_measured_gain_cannot_be_scored() -> None:
    unknown = predict_with(run_with(1000, gain={}), OPTIONS[3])
    assert (unknown.efficiency, unknown.score) == (None, math.inf)


def test_a_gain_is_that_of_the_option_else_of_the_flat_option_else_of_the_codec() -> None:
    topk = CodecSpec(name="topk", density=0.1)
    ring, tree = (Option(codec=topk, scheme=scheme) for scheme in (Scheme.ARTOPK_RING, Scheme.ARTOPK_TREE))
    inside = replace(ring, intra=Intra.DENSE)
    measured = run_with(1000, gain={str(topk): 0.9, str(ring): 0.6})
    assert [measured.gain_of(option) for option in (tree, ring, inside)] == [0.9, 0.6, 0.6]
    assert replace(measured, gain={**measured.gain, str(inside): 0.5}).gain_of(inside) == 0.5
    assert replace(measured, gain={}).gain_of(tree) is None


def test_noise_above_the_gradient_is_no_gain() -> None:
    codec = CodecSpec(name="topk", density=0.1)
    assert efficiency(0.8, codec) == 0.8
    assert efficiency(1.25, codec) == 0.8


def test_impossible_options_and_costs_are_refused() -> None:
    with pytest.raises(ConfigError, match="decode_a_s"):
        CodecCost(encode_a_s=0, encode_b_s_per_element=0, decode_a_s=-1, decode_b_s_per_element=0)
    with pytest.raises(ConfigError, match=r"no measured time for codec bf16; known: topk"):
        predict_with(run_with(1000, codec_costs={"topk": CPU}), OPTIONS[1])
    with pytest.raises(ConfigError, match="cannot carry"):
        Option(codec=CodecSpec(name="topk"), scheme=Scheme.SRA)
