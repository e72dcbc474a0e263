"""Samples of several ranks, joined to steps and to the times of layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.control_runs import LAYERS, WORLD, start

from cgx_ray.control.joined_steps import StepJoiner
from cgx_ray.control.link_estimate import PassiveLink
from cgx_ray.control.measured import layer_times
from cgx_ray.monitors.sample import Burst
from cgx_ray.plan import CodecSpec, GroupPlan, Layer, Plan, Scheme, make_plan


def test_bursts_count_for_the_node_whose_link_its_ranks_share(tmp_path: Path) -> None:
    run = start(tmp_path)
    for num_local, factor in ((1, 1), (2, 2), (WORLD, 1)):
        run.num_local = num_local
        samples = [replace(run.sample(rank), bursts=(Burst(1000, 0.1),)) for rank in range(WORLD)]
        (joined,) = StepJoiner(WORLD).add(samples)
        assert joined.traffic.bursts[1] == (Burst(1000 * factor, 0.1),)
        assert joined.num_local == num_local
    odd = [replace(run.sample(rank), num_local=1 + (rank > 0) * 2) for rank in range(WORLD)]
    assert StepJoiner(WORLD).add(odd)[0].num_local == 1


def test_steps_join_when_the_last_rank_reports_and_the_shortest_transfer_counts(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.late_rank_s = 5.0
    samples = [run.sample(rank) for rank in range(WORLD)]
    book = StepJoiner(WORLD)
    assert book.add(samples[1:]) == []
    (joined,) = book.add(samples[:1])
    link = PassiveLink()
    link.add(joined.traffic, probed_latency_s=1e-4)
    assert link.bandwidth is not None
    assert 8 * link.bandwidth.value == pytest.approx(1e9)


def test_bandwidth_is_told_from_the_indices_and_values_of_artopk(tmp_path: Path) -> None:
    run = start(tmp_path)
    topk = CodecSpec(name="topk", density=0.1)
    run.loop.plans.append(make_plan(LAYERS, version=1, world_size=WORLD, codec=topk, scheme=Scheme.ARTOPK_RING))
    (joined,) = StepJoiner(WORLD).add([run.sample(rank) for rank in range(WORLD)])
    link = PassiveLink()
    link.add(joined.traffic, probed_latency_s=1e-4)
    assert link.bandwidth is not None
    assert 8 * link.bandwidth.value == pytest.approx(1e9)


def test_layer_times_follow_ready_groups_and_between_them_elements() -> None:
    """Backward computes c, b, a; the small b is sent last. Forward takes a third of 0.9 s."""
    layers = tuple(Layer(name=name, numel=numel, ndim=2) for name, numel in (("a", 3000), ("b", 100), ("c", 2000)))
    groups = tuple(GroupPlan(layers=(name,)) for name in ("c", "a", "b"))
    plan = Plan(version=0, world_size=2, groups=groups)
    assert layer_times(layers, plan, (0.5, 0.9, 0.6)) == pytest.approx((0.5, 0.1, 0.3))
    whole = Plan(version=0, world_size=2, groups=(GroupPlan(layers=("a", "b", "c")),))
    assert layer_times(layers, whole, (0.9,)) == pytest.approx((0.3 + 0.6 * 20 / 51, 0.6 / 51, 0.6 * 30 / 51))
