"""Plans of rounds, in which ranks train alone for several steps between two exchanges."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from support.groupings import all_plans

from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.policies.policy import PlannerInput, Situation
from cgx_ray.errors import ConfigError
from cgx_ray.plan import (
    DEFAULT_GROUP_BYTES,
    DENSE,
    NONE,
    CodecSpec,
    Intra,
    Layer,
    Option,
    Plan,
    Scheme,
    make_plan,
)
from cgx_ray.planner.candidates import CodecCost
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.fidelity import PERIOD_LOSSES, PERIODS, Fidelity, loss_of, period_loss, periods_of
from cgx_ray.planner.joint import MAX_ERROR, best_round
from cgx_ray.planner.planned_group import groups_of
from cgx_ray.planner.prediction import Measured, Prediction, predict

QSGD = Option(codec=CodecSpec.parse("qsgd:bits=4"), scheme=Scheme.SRA)
TOPK = Option(codec=CodecSpec.parse("topk:density=0.01"), scheme=Scheme.ALLGATHER)
COST = CodecCost(encode_a_s=3e-5, encode_b_s_per_element=5e-10, decode_a_s=1e-5, decode_b_s_per_element=2e-10)
LAYERS = tuple(Layer(name=f"layer{i}", numel=1 << (18 + i % 3), ndim=2) for i in range(6))


def _measured(gbps: float, **changes: object) -> Measured:
    network = Network(num_nodes=4, ranks_per_node=1, between=Link.from_rates(bandwidth_gbps=gbps, latency_ms=0.5))
    given = {
        "layers": LAYERS,
        "backward_s": (0.02,) * len(LAYERS),
        "after_s": 0.01,
        "network": network,
        "codec_costs": {"qsgd": COST, "topk": COST},
        "gain": {str(QSGD.codec): 0.99, str(TOPK.codec): 0.9},
    }
    return Measured(**{**given, **changes})


def _plan(period: int, version: int = 0) -> Plan:
    return make_plan(LAYERS, version=version, world_size=4, codec=QSGD.codec, scheme=QSGD.scheme, period=period)


@pytest.mark.parametrize("period", [2, 8, 32])
def test_a_step_of_a_round_takes_its_compute_and_its_share_of_the_exchange(period: int) -> None:
    measured = _measured(0.1)
    round_ = predict(measured, groups_of(_plan(period), LAYERS))
    # As if all gradients of a step were there at its end.
    at_once = replace(measured, backward_s=(measured.compute_s, *[0.0] * (len(LAYERS) - 1)), after_s=0.0)
    step = predict(at_once, groups_of(_plan(1), LAYERS))
    assert round_.step_s == pytest.approx(measured.compute_s + (step.step_s - measured.compute_s) / period)
    assert round_.compute_s == pytest.approx(measured.compute_s)
    assert math.fsum(round_.timeline.parts_s.values()) == pytest.approx(round_.step_s)
    assert max(span.end_s for span in round_.timeline.spans) == pytest.approx(round_.step_s)
    assert round_.codec_s == pytest.approx(step.codec_s / period)
    assert step.efficiency is not None
    # The larger loss counts.
    assert round_.efficiency == pytest.approx(min(step.efficiency, 1 / PERIOD_LOSSES[4][period]))
    assert round_.loss == max(step.loss or math.inf, PERIOD_LOSSES[4][period])
    assert round_.plan(version=3, world_size=4).period == period
    assert round_.describe().endswith(f", every {period} steps")


@pytest.mark.parametrize("backward_s", [0.02, 0.0001], ids=["hidden", "not hidden"])
def test_rounds_between_nodes_take_a_sum_inside_in_each_step(backward_s: float) -> None:
    inside = Link.from_rates(bandwidth_gbps=10, latency_ms=0.1)
    between = Link.from_rates(bandwidth_gbps=0.1, latency_ms=0.5)
    network = Network(num_nodes=4, ranks_per_node=2, between=between, inside=inside)
    measured = _measured(0.1, network=network, backward_s=(backward_s,) * len(LAYERS))
    options = {intra: replace(QSGD, intra=intra) for intra in (Intra.FLAT, Intra.DENSE)}
    steps = {}
    for intra, option in options.items():
        plan = make_plan(
            LAYERS, version=0, world_size=8, codec=option.codec, scheme=option.scheme, intra=intra.value, period=1024
        )
        steps[intra] = predict(measured, groups_of(plan, LAYERS))
    # 11 MB: one bucket. Half of the bytes go each way between two ranks.
    num_bytes = sum(layer.dense_bytes for layer in LAYERS)
    whole_s = 2 * 0.1e-3 + num_bytes * 8 / 10e9
    assert steps[Intra.DENSE].compute_s - steps[Intra.FLAT].compute_s == pytest.approx(whole_s)
    # Nodes are the replicas that train alone, or all ranks.
    for intra, replicas in ((Intra.DENSE, 4), (Intra.FLAT, 8)):
        assert (steps[intra].replicas, steps[intra].loss) == (replicas, period_loss(1024, replicas))
    small = replace(measured, network=replace(network, ranks_per_node=1, inside=None))
    assert small.inside_sum_s == 0
    # With many buckets, backward hides all but the last.
    wide = replace(measured, layers=tuple(replace(layer, numel=64 * layer.numel) for layer in LAYERS))
    num_buckets = math.ceil(64 * num_bytes / DEFAULT_GROUP_BYTES)
    alone_s = 2 * num_buckets * 0.1e-3 + 64 * num_bytes * 8 / 10e9
    assert wide.inside_sum_s == pytest.approx(max(alone_s / num_buckets, alone_s - 5 * backward_s))


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_the_best_round_equals_brute_force_over_all_groupings_and_options(ranks_per_node: int) -> None:
    rng = random.Random(0)
    options = [Option(codec=NONE, scheme=Scheme.SRA), QSGD, TOPK]
    inside = Link.from_rates(bandwidth_gbps=1, latency_ms=0.1)
    if ranks_per_node > 1:
        options = [*options[:2], *(replace(option, intra=Intra.DENSE) for option in options[:2])]
    # Either all groups sum inside nodes, or none.
    pools = [[option for option in options if option.intra is intra] for intra in (Intra.FLAT, Intra.DENSE)]
    for _ in range(8):
        layers = tuple(
            Layer(name=f"layer{i}", numel=int(10 ** rng.uniform(4, 6.5)), ndim=2) for i in range(rng.randint(1, 4))
        )
        measured = _measured(
            10 ** rng.uniform(-2, 1),
            layers=layers,
            backward_s=tuple(rng.uniform(0.001, 0.1) for _ in layers),
            gain={str(QSGD.codec): rng.uniform(0.9, 1), str(TOPK.codec): rng.uniform(0.3, 1)},
        )
        network = replace(measured.network, ranks_per_node=ranks_per_node, inside=inside)
        measured = replace(measured, network=network)
        period = rng.choice([2, 4, 8])
        found = best_round(measured, options, period)
        scores = [
            predict(measured, [group._replace(period=period) for group in groups]).score
            for pool in pools
            for groups in all_plans(layers, pool)
        ]
        assert found.score <= min(scores) * (1 + MAX_ERROR)
        assert DENSE not in found.options


def _chosen(policy: Adaptive, measured: Measured, plan: Plan | None = None) -> Prediction:
    situation = Situation(
        cause="a test", plan=plan or _plan(1), planner_input=PlannerInput(now=measured, states=[measured])
    )
    return policy.decide(situation).predicted


def test_rounds_are_chosen_where_the_link_is_slow_and_the_fidelity_allows_them() -> None:
    periods = {fidelity: _chosen(Adaptive(fidelity=fidelity), _measured(0.01)).period for fidelity in Fidelity}
    assert periods[Fidelity.STRICT] == 1
    assert 1 < periods[Fidelity.BALANCED] <= periods[Fidelity.FAST]
    # Compute bounds steps on a fast link, and rounds only cost progress there.
    assert _chosen(Adaptive(fidelity="fast"), _measured(100.0)).period == 1
    assert _chosen(Adaptive(fidelity="strict", periods=(1, 4)), _measured(0.01)).period == 4


def test_a_codec_and_a_period_lose_no_more_together_than_balanced_allows() -> None:
    measured = _measured(0.001, gain={f"qsgd:bits={bits},bucket_size=128": 0.99 for bits in (2, 3, 4)})
    chosen = _chosen(Adaptive(fidelity="balanced"), measured)
    assert chosen.period > 1
    assert all(loss_of(option.codec, chosen.period, 4) <= 1.044 for option in chosen.options)
    assert 0.9 < (chosen.efficiency or 0.0) <= 1


def test_sums_inside_nodes_of_one_rank_are_no_reason_to_fail() -> None:
    only_inside = [replace(QSGD, intra=Intra.DENSE)]
    assert best_round(_measured(0.01), only_inside, 4).period == 4


def test_more_replicas_get_a_shorter_period_since_they_lose_more() -> None:
    chosen, most = {}, Fidelity.BALANCED.max_loss or math.inf
    for replicas in (2, 4, 8, 16, 256):
        network = replace(_measured(0.001).network, num_nodes=replicas)
        chosen[replicas] = _chosen(Adaptive(fidelity="balanced"), _measured(0.001, network=network))
        assert (chosen[replicas].loss or math.inf) <= most
        assert chosen[replicas].period == max(one for one in (1, *PERIODS) if period_loss(one, replicas) <= most)
    assert chosen[2].period > chosen[8].period > chosen[256].period > 1


@pytest.mark.parametrize("period", [8, 16])
def test_rounds_end_when_gradients_change_fast_or_they_may_not_be_chosen(period: int) -> None:
    plan, slow = _plan(period), _measured(0.01)
    assert _chosen(Adaptive(periods=(period,)), slow, plan).period == period
    assert _chosen(Adaptive(periods=(1, period)), replace(slow, max_period=1), plan).period == 1
    assert _chosen(Adaptive(periods=(4, period)), replace(slow, max_period=period // 2), plan).period == 4
    assert _chosen(Adaptive(), slow, plan).period == 1


def test_losses_of_periods_grow_with_the_period_and_with_the_number_of_replicas() -> None:
    assert periods_of("strict") == (1,)
    for period in range(1, 100):
        assert period_loss(period, 1) == 1.0
        by_replicas = [period_loss(period, replicas) for replicas in range(1, 100)]
        assert by_replicas == sorted(by_replicas)
        assert period_loss(period, 4) >= period_loss(period - 1 or 1, 4)
    assert period_loss(1, 100) == 1.0
    for replicas, losses in PERIOD_LOSSES.items():
        assert {period: period_loss(period, replicas) for period in PERIODS} == losses


@pytest.mark.parametrize("periods", [3, (3,), (0,), "auto"])
def test_periods_that_were_not_measured_are_refused(periods: object) -> None:
    with pytest.raises(ConfigError, match="such as \\(1, 4, 8\\)"):
        Adaptive(periods=periods)  # type: ignore[arg-type]
