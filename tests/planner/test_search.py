"""Joint search: exact against brute force, a proven gap, and never worse than other strategies."""

from __future__ import annotations

import bisect
import math
import random
from dataclasses import replace

import pytest

from bench.planner.cases import QSGD_INDEX, earliest_finish_s, model_pipeline, random_pipeline, with_random_tolls
from bench.planner.strategies import named_strategies
from cgx_ray.errors import ConfigError
from cgx_ray.planner.papers.bytecomp import bytecomp
from cgx_ray.planner.papers.cupcake import cupcake
from cgx_ray.planner.pipeline import GroupCost, GroupEnd, Pipeline
from cgx_ray.planner.search import search

pytestmark = pytest.mark.long

ROUNDING = 1e-12
MANY_CASES = pytest.mark.parametrize("num_cases", [100, pytest.param(300, marks=pytest.mark.slow)])


@pytest.mark.long
@MANY_CASES
def test_joint_search_equals_brute_force_for_up_to_8_layers_and_6_options(num_cases: int) -> None:
    rng = random.Random(0)
    for case in range(num_cases):
        pipeline = random_pipeline(rng, rng.randint(1, 8), 6)
        plan = search(pipeline)
        assert plan.finish_s == pytest.approx(earliest_finish_s(pipeline), rel=ROUNDING), (case, pipeline)
        assert plan.gap == 0, (case, plan)


@pytest.mark.long
@MANY_CASES
def test_joint_search_with_tolls_by_layer_equals_brute_force_for_up_to_8_layers_and_6_options(num_cases: int) -> None:
    rng = random.Random(8)
    for case in range(num_cases):
        pipeline = random_pipeline(rng, rng.randint(1, 8), 6)
        pipeline = with_random_tolls(rng, pipeline)
        plan = search(pipeline)
        assert plan.finish_s == pytest.approx(earliest_finish_s(pipeline), rel=ROUNDING), (case, pipeline)
        assert plan.gap == 0, (case, plan)


def earliest_finish_by_fronts_s(pipeline: Pipeline) -> float:
    """Return the earliest finish of all plans, dropping partial plans that another equals or beats."""
    # Finish of compute and of the network, and when all groups so far are done. A toll delays all of them.
    fronts: list[list[tuple[float, float, float]]] = [[(0.0, 0.0, 0.0)]]
    for end in range(1, pipeline.num_layers + 1):
        found = []
        for start in range(end):
            numel, backward_s = sum(pipeline.numel[start:end]), sum(pipeline.backward_s[start:end])
            for option, cost in enumerate(pipeline.costs):
                toll_s = sum(pipeline.tolls_s[option][start:end]) if pipeline.tolls_s else 0.0
                compute_s, network_s = backward_s + cost.compute_s(numel), cost.network_s(numel)
                lead_s, tail_s, alone_s = cost.lead_s(numel), cost.tail_s(numel), cost.alone_s(numel)
                for c, d, done in fronts[start]:
                    ready = c + compute_s
                    sent = max(d, ready + lead_s) + network_s
                    # The step does not end before the network is done with this group and what follows.
                    ends = max(done, d + network_s + tail_s, ready + alone_s, sent + pipeline.after_s)
                    found.append((ready + toll_s, sent + toll_s, ends + toll_s))
        fronts.append(undominated_labels(found))
    return min(done for _, _, done in fronts[-1])


def undominated_labels(labels: list[tuple[float, float, float]]) -> list[tuple[float, float, float]]:
    """Return the labels of which no other one is as small in all three numbers."""
    kept: list[tuple[float, float, float]] = []
    # Of the labels so far, whose first number is smaller: ascending in the second number, descending in the third.
    stairs: list[tuple[float, float]] = []
    for label in sorted(labels):
        step = label[1:]
        at = bisect.bisect(stairs, (label[1], math.inf))
        if at and stairs[at - 1][1] <= label[2]:
            continue
        kept.append(label)
        last = at
        while last < len(stairs) and stairs[last][1] >= label[2]:
            last += 1
        stairs[at:last] = [step]
    return kept


@pytest.mark.parametrize(("has_tolls", "num_cases"), [(False, 20), (True, 5)])
def test_joint_search_equals_label_setting_without_bounds_on_25_layers(has_tolls: bool, num_cases: int) -> None:
    rng = random.Random(7)
    for case in range(num_cases):
        pipeline = random_pipeline(rng, 25, 3)
        pipeline = with_random_tolls(rng, pipeline) if has_tolls else pipeline
        plan = search(pipeline)
        assert plan.finish_s == pytest.approx(earliest_finish_by_fronts_s(pipeline), rel=ROUNDING), (case, pipeline)
        assert plan.gap == 0, (case, plan)


def test_bound_holds_and_the_gap_is_kept_when_the_search_may_end_early() -> None:
    """With very few labels the answer may be wrong, but not the bound."""
    rng = random.Random(1)
    for case in range(200):
        pipeline = random_pipeline(rng, rng.randint(4, 7), 6)
        pipeline = with_random_tolls(rng, pipeline) if case % 2 else pipeline
        best_s = earliest_finish_s(pipeline)
        for max_gap, max_labels in ((0.0, 1), (0.05, 30_000), (0.05, 10)):
            plan = search(pipeline, max_gap=max_gap, max_labels=max_labels)
            assert plan.bound_s <= best_s * (1 + ROUNDING), (case, plan, best_s)
            assert plan.finish_s >= best_s * (1 - ROUNDING), (case, plan, best_s)
            assert plan.finish_s == pipeline.finish_s(plan.groups)
            if max_labels == 30_000:
                assert plan.gap <= max_gap, (case, plan)


def test_every_dropped_option_is_a_loss_or_nothing() -> None:
    rng = random.Random(2)
    for case in range(20):
        pipeline = random_pipeline(rng, 60, 6)
        all_s = search(pipeline)
        for left_out in range(6):
            costs = tuple(cost for index, cost in enumerate(pipeline.costs) if index != left_out)
            fewer = search(replace(pipeline, costs=costs))
            assert fewer.finish_s >= all_s.bound_s * (1 - ROUNDING), (case, left_out, fewer.finish_s, all_s)


def test_314_layers_with_6_options_are_planned_exactly_or_within_1_percent() -> None:
    rng = random.Random(3)
    gaps = [search(random_pipeline(rng, 314, 6)).gap for _ in range(10)]
    assert max(gaps) <= 0.01, gaps
    gaps = [search(with_random_tolls(rng, random_pipeline(rng, 314, 6))).gap for _ in range(10)]
    assert max(gaps) <= 0.01, gaps


def test_joint_plan_is_never_behind_a_named_strategy_on_random_models() -> None:
    rng = random.Random(4)
    for case in range(20):
        pipeline = random_pipeline(rng, rng.randint(1, 30), 4)
        free = GroupCost(compute_a_s=0, compute_b_s_per_element=0, network_a_s=0.01, network_b_s_per_element=1e-5)
        pipeline = replace(pipeline, costs=(free, *pipeline.costs))
        plan = search(pipeline)
        for name, groups in named_strategies(pipeline, dense=0, compressing=(1, 2), offloaded={1: 3}).items():
            assert plan.finish_s <= pipeline.finish_s(groups) * (1 + ROUNDING), (case, name, plan.gap)


def test_bytecomp_keeps_the_layer_dense_that_hides_behind_backward_and_compresses_the_last() -> None:
    """Two equal layers; the first is sent while the second is computed, so only compressing the second pays."""
    dense = GroupCost(compute_a_s=0, compute_b_s_per_element=0, network_a_s=0, network_b_s_per_element=1)
    gpu = GroupCost(compute_a_s=1, compute_b_s_per_element=0, network_a_s=0, network_b_s_per_element=0.1)
    cpu = GroupCost(compute_a_s=0, compute_b_s_per_element=0, network_a_s=0.5, network_b_s_per_element=0.1)
    pipeline = Pipeline(backward_s=(1, 20), numel=(10, 10), costs=(dense, gpu, cpu))
    groups = bytecomp(pipeline, dense=0, compressing=(1,), offloaded={})
    assert groups == (GroupEnd(1, 0), GroupEnd(2, 1))
    assert pipeline.finish_s(groups) == 23
    groups = bytecomp(pipeline, dense=0, compressing=(1,), offloaded={1: 2})
    assert groups == (GroupEnd(1, 0), GroupEnd(2, 2))
    with pytest.raises(ConfigError, match="option 1 takes compute time"):
        bytecomp(pipeline, dense=1, compressing=(), offloaded={})


def test_bytecomps_search_leaves_the_smallest_layers_dense_when_it_is_cut_and_does_not_look_on() -> None:
    """Compressing pays for each of 20 layers, the last of which is the largest; for the first, the host is sooner."""
    dense = GroupCost(compute_a_s=0, compute_b_s_per_element=0, network_a_s=0, network_b_s_per_element=1)
    gpu = GroupCost(compute_a_s=0.1, compute_b_s_per_element=0, network_a_s=0, network_b_s_per_element=0.1)
    cpu = GroupCost(compute_a_s=0, compute_b_s_per_element=0, network_a_s=0, network_b_s_per_element=0.1)
    pipeline = Pipeline(backward_s=(0.0,) * 20, numel=tuple(range(1, 21)), costs=(dense, gpu, cpu))

    def options(max_trials: int) -> list[int]:
        groups = bytecomp(pipeline, dense=0, compressing=(1,), offloaded={1: 2}, max_trials=max_trials)
        return [group.option for group in groups]

    # Two trials per layer, and two for each layer that may move to the host.
    assert options(21) == [0] * 10 + [1] * 10
    assert options(41) == [1] * 20
    assert options(42) == options(100) == [2] + [1] * 19


def test_cupcakes_search_gives_its_best_so_far_when_it_gives_up() -> None:
    pipeline = random_pipeline(random.Random(5), 30, 1)
    few, many = (pipeline.finish_s(cupcake(pipeline, 0, max_nodes=nodes)[0]) for nodes in (1, 20_000))
    assert search(pipeline).finish_s * (1 - ROUNDING) <= many <= few


def test_cupcakes_search_ends_by_itself_on_a_slow_network_and_says_so_where_it_does_not() -> None:
    ended = {gbps: cupcake(model_pipeline("resnet101", gbps), QSGD_INDEX, max_nodes=1000)[1] for gbps in (1.0, 10.0)}
    assert ended == {1.0: True, 10.0: False}


def test_a_step_without_time_has_no_gap() -> None:
    nothing = GroupCost(compute_a_s=0, compute_b_s_per_element=0, network_a_s=0, network_b_s_per_element=0)
    plan = search(Pipeline(backward_s=(0, 0), numel=(1, 1), costs=(nothing,)))
    assert (plan.finish_s, plan.gap) == (0, 0)


@pytest.mark.parametrize(
    ("tolls_s", "message"),
    [
        (((1.0, 1.0),) * 2, "2 rows of tolls"),
        (((1.0,),), "1 rows of tolls"),
        (((1.0, -0.5),), "the least toll of option 0"),
        (((1.0, math.nan),), "the sum of the tolls of option 0"),
    ],
)
def test_impossible_tolls_are_refused(tolls_s: tuple[tuple[float, ...], ...], message: str) -> None:
    cost = GroupCost(compute_a_s=0, compute_b_s_per_element=0, network_a_s=1, network_b_s_per_element=0)
    with pytest.raises(ConfigError, match=message):
        Pipeline(backward_s=(0, 0), numel=(1, 1), costs=(cost,), tolls_s=tolls_s)


@pytest.mark.parametrize("changes", [{"max_gap": -0.1}, {"max_gap": 1.0}, {"max_labels": 0}])
def test_impossible_limits_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        search(random_pipeline(random.Random(6), 2, 1), **changes)
