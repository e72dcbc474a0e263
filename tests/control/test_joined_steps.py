"""Samples of several ranks, joined to steps and to the times of layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from support.control_runs import LAYERS, WORLD, FakeTraining, start

from cgx_ray.control.joined_steps import ROTATION_STEPS, StepJoiner, counted_offsets
from cgx_ray.control.link_estimate import PassiveLink
from cgx_ray.control.measured import layer_times
from cgx_ray.monitors.sample import Burst, StepSample
from cgx_ray.plan import CodecSpec, GroupPlan, Layer, Plan, Scheme, make_plan


def test_bursts_count_for_the_node_whose_link_its_ranks_share(tmp_path: Path) -> None:
    run = start(tmp_path)
    for num_local, factor in ((1, 1), (2, 2), (WORLD, 1)):
        run.num_local = num_local
        samples = [replace(run.sample(rank), bursts=(Burst(1000, 0.1),)) for rank in range(WORLD)]
        (joined,) = StepJoiner(WORLD).add(samples, 0.0)
        assert joined.traffic.bursts[1] == (Burst(1000 * factor, 0.1),)
        assert joined.num_local == num_local
    odd = [replace(run.sample(rank), num_local=1 + (rank > 0) * 2) for rank in range(WORLD)]
    assert StepJoiner(WORLD).add(odd, 0.0)[0].num_local == 1


def test_steps_join_when_the_last_rank_reports_and_the_shortest_transfer_counts(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.late_rank_s = 5.0
    samples = [run.sample(rank) for rank in range(WORLD)]
    book = StepJoiner(WORLD)
    assert book.add(samples[1:], 0.0) == []
    (joined,) = book.add(samples[:1], 0.0)
    link = PassiveLink()
    link.add(joined.traffic, probed_latency_s=1e-4)
    assert link.bandwidth is not None
    assert 8 * link.bandwidth.value == pytest.approx(1e9)


def _reports(run: FakeTraining, ranks: Iterable[int], step: int) -> list[StepSample]:
    run.step = step
    return [run.sample(rank) for rank in ranks]


def test_steps_wait_three_seconds_for_a_silent_rank_and_then_no_more_until_it_is_back(tmp_path: Path) -> None:
    run, book = start(tmp_path), StepJoiner(WORLD)
    assert len(book.add(_reports(run, range(WORLD), 1), 0.0)) == 1
    assert book.add(_reports(run, [0, 1, 3], 2), 1.0) == []
    assert book.add(_reports(run, [0, 1, 3], 3), 3.9) == []
    assert [step.step for step in book.add([], 4.0)] == [2, 3]
    assert book.silent == {2}
    (joined,) = book.add(_reports(run, [0, 1, 3], 4), 4.5)
    assert list(joined.slowness) == [0, 1, 3]
    # What it has kept meanwhile comes too late.
    assert book.add([*_reports(run, [2], 2), *_reports(run, [2], 3)], 20.0) == []
    assert book.silent == {2}
    assert len(book.add(_reports(run, [0, 1, 3], 5), 21.0)) == 1
    assert book.add(_reports(run, [2], 5), 22.0) == []
    assert book.silent == frozenset()
    assert book.add(_reports(run, [0, 1, 3], 6), 23.0) == []
    (joined,) = book.add(_reports(run, [2], 6), 23.5)
    assert list(joined.slowness) == [0, 1, 2, 3]


def test_a_lost_report_costs_its_steps_one_rank_and_makes_no_rank_silent(tmp_path: Path) -> None:
    run, book = start(tmp_path), StepJoiner(WORLD)
    assert book.add(_reports(run, [0, 1, 3], 1), 0.0) == []
    joined = book.add(_reports(run, range(WORLD), 2), 1.0)
    assert [(step.step, len(step.slowness)) for step in joined] == [(1, 3), (2, 4)]
    assert book.silent == frozenset()


def test_half_of_the_agents_late_by_five_seconds_are_left_out(tmp_path: Path) -> None:
    run, book = start(tmp_path), StepJoiner(WORLD)
    joined = []
    for second in range(20):
        joined += book.add(_reports(run, [0, 1], second), float(second))
        joined += book.add(_reports(run, [2, 3], second - 5) if second >= 5 else [], float(second))
    assert [step.step for step in joined] == list(range(20))
    assert book.silent == {2, 3}


def test_steps_that_are_trained_again_are_joined_again(tmp_path: Path) -> None:
    run, book = start(tmp_path), StepJoiner(WORLD)
    for step in (1, 2, 3):
        assert len(book.add(_reports(run, range(WORLD), step), float(step))) == 1
    for step in (2, 3, 4):
        assert book.add(_reports(run, [0, 1], step), 3.0 + step) == []
        assert len(book.add(_reports(run, [2, 3], step), 3.5 + step)) == 1


def test_the_link_is_right_without_the_ranks_that_are_silent(tmp_path: Path) -> None:
    """Times of exchanges are read for all ranks, and traffic stays with the ranks that observed it."""
    run, book = start(tmp_path), StepJoiner(WORLD)
    link = PassiveLink()
    samples = [
        replace(sample, bursts=(Burst(1000 * (1 + sample.rank), 0.1),), lag_s=(1e-3, 2e-3, 3e-3, 4e-3))
        for sample in _reports(run, [1, 3], 1)
    ]
    assert book.add(samples, 0.0) == []
    (joined,) = book.add([], 3.0)
    assert joined.traffic.bursts == {1: (Burst(2000, 0.1),), 3: (Burst(4000, 0.1),)}
    assert joined.traffic.round_trip_s == {(1, 3): pytest.approx(4e-3 + 2e-3)}
    link.add(replace(joined.traffic, bursts={}), probed_latency_s=1e-4)
    assert link.bandwidth is not None
    assert 8 * link.bandwidth.value == pytest.approx(1e9, rel=0.2)


def test_bandwidth_is_told_from_the_indices_and_values_of_artopk(tmp_path: Path) -> None:
    run = start(tmp_path)
    topk = CodecSpec(name="topk", density=0.1)
    run.loop.plans.append(make_plan(LAYERS, version=1, world_size=WORLD, codec=topk, scheme=Scheme.ARTOPK_RING))
    (joined,) = StepJoiner(WORLD).add([run.sample(rank) for rank in range(WORLD)], 0.0)
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


def test_the_pairs_that_count_grow_with_the_ranks_and_not_with_their_square() -> None:
    for world_size, num_pairs in ((2, 1), (4, 6), (17, 136), (64, 64 * 8), (1024, 1024 * 8)):
        offsets = counted_offsets(0, world_size)
        pairs = {frozenset((rank, (rank + offset) % world_size)) for rank in range(world_size) for offset in offsets}
        assert len(pairs) == num_pairs, world_size
    turns = [counted_offsets(turn * ROTATION_STEPS, 64) for turn in range(4)]
    assert sorted(itertools.chain(*turns)) == list(range(1, 33)), "all pairs take turns"
    assert counted_offsets(ROTATION_STEPS - 1, 64) == turns[0]


def test_a_link_of_many_ranks_is_told_from_the_pairs_that_count(tmp_path: Path) -> None:
    run, world_size = start(tmp_path), 40
    one = run.sample(0)
    lags, rates = (1e-3,) * world_size, (5e6,) * world_size
    bursts = (Burst(1 << 20, (1 << 20) / 2e8),) * 4
    samples = [
        replace(one, rank=rank, lag_s=lags, rate_from=rates, bursts=bursts if rank != 7 else (Burst(1 << 20, 0.1),) * 4)
        for rank in range(world_size)
    ]
    (joined,) = StepJoiner(world_size).add(samples, 0.0)
    assert len(joined.traffic.round_trip_s) == len(joined.traffic.pair_rate) / 2 == 8 * world_size
    link = PassiveLink()
    link.add(joined.traffic, probed_latency_s=1e-4)
    assert link.latency_s is not None
    assert link.latency_s.value == pytest.approx(1e-3)
    assert link.slow == {7: pytest.approx((1 << 20) / 0.1)}
