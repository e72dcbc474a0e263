"""Samples of several ranks, joined to steps and to the times of layers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from support.control_runs import LAYERS, WORLD, FakeTraining, start

from cgx_ray.collectives.transport.greeting import greeted
from cgx_ray.control.joined_steps import JoinedStep, StepJoiner, join
from cgx_ray.control.learned.measured import layer_times, network_of
from cgx_ray.control.network.link_estimate import PassiveLink
from cgx_ray.engine.counted import FEWER, MAX_BURSTS, MAX_REPORTING, counted_bursts, counted_lags, counted_peers
from cgx_ray.monitors.sample import ROTATION_STEPS, Burst, NodeStep, StepSample, counted_offsets, node_steps
from cgx_ray.plan import CodecSpec, GroupPlan, Layer, Plan, Scheme, make_plan
from cgx_ray.planner.cost import Link, Network


def test_bursts_count_for_the_node_whose_link_its_ranks_share(tmp_path: Path) -> None:
    run = start(tmp_path)
    for num_local, factor in ((1, 1), (2, 2), (WORLD, 1)):
        run.num_local = num_local
        samples = [replace(run.sample(rank), bursts=(Burst(1000, 0.1),)) for rank in range(WORLD)]
        (joined,) = StepJoiner(WORLD).add_node_steps(node_steps(samples), 0.0)
        assert joined.traffic.bursts[1] == (Burst(1000 * factor, 0.1),)
        assert joined.num_local == num_local
        assert joined.node_sizes == (num_local,) * (WORLD // num_local)


def test_nodes_with_different_numbers_of_ranks_are_known_by_their_sizes(tmp_path: Path) -> None:
    run = start(tmp_path)

    def odd(rank: int) -> tuple[NodeStep, ...]:
        sample = replace(run.sample(rank), num_local=1 + 2 * (rank > 0), bursts=(Burst(1000, 0.1),))
        return node_steps([sample])

    joined = join([*odd(0), *odd(1), *odd(2), *odd(3)], WORLD)
    assert joined.node_sizes == (1, 3)
    assert [joined.traffic.bursts[rank][0].num_bytes for rank in range(WORLD)] == [1000, 3000, 3000, 3000]
    assert join([*odd(0), *odd(3)], WORLD).node_sizes == (1, 3)
    # Without the only rank of a node nobody knows that it is one.
    assert join([*odd(1), *odd(2), *odd(3)], WORLD).node_sizes == (1, 1, 1, 1)
    between, inside = (Link.from_rates(bandwidth_gbps=gbps, latency_ms=0.1) for gbps in (1, 100))
    assert network_of(joined.node_sizes, between, inside) == Network.of_nodes((3, 1), between, inside)
    assert network_of((4,), between, inside) == network_of((1, 1, 1, 1), between, None) == Network.flat(4, between)
    assert network_of((2, 2), between, inside) == Network(num_nodes=2, ranks_per_node=2, between=between, inside=inside)


def test_steps_join_when_the_last_rank_reports_and_the_shortest_transfer_counts(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.late_rank_s = 5.0
    samples = [run.sample(rank) for rank in range(WORLD)]
    book = StepJoiner(WORLD)
    assert book.add_node_steps(node_steps(samples[1:]), 0.0) == []
    (joined,) = book.add_node_steps(node_steps(samples[:1]), 0.0)
    link = PassiveLink()
    link.add_traffic(joined.traffic, probed_latency_s=1e-4)
    assert link.bandwidth is not None
    assert 8 * link.bandwidth.value == pytest.approx(1e9)


def _reports(run: FakeTraining, ranks: Iterable[int], step: int) -> tuple[NodeStep, ...]:
    run.step = step
    return node_steps(map(run.sample, ranks))


@pytest.mark.fault("a rank sends no samples", "steps count without it after 3 s")
def test_steps_wait_three_seconds_for_a_silent_rank_and_then_no_more_until_it_is_back(tmp_path: Path) -> None:
    run, book = start(tmp_path), StepJoiner(WORLD)
    assert len(book.add_node_steps(_reports(run, range(WORLD), 1), 0.0)) == 1
    assert book.add_node_steps(_reports(run, [0, 1, 3], 2), 1.0) == []
    assert book.add_node_steps(_reports(run, [0, 1, 3], 3), 3.9) == []
    assert [step.step for step in book.add_node_steps([], 4.0)] == [2, 3]
    assert book.silent == {2}
    (joined,) = book.add_node_steps(_reports(run, [0, 1, 3], 4), 4.5)
    assert list(joined.slowness) == [0, 1, 3]
    # What it has kept meanwhile comes too late.
    assert book.add_node_steps([*_reports(run, [2], 2), *_reports(run, [2], 3)], 20.0) == []
    assert book.silent == {2}
    assert len(book.add_node_steps(_reports(run, [0, 1, 3], 5), 21.0)) == 1
    assert book.add_node_steps(_reports(run, [2], 5), 22.0) == []
    assert book.silent == frozenset()
    assert book.add_node_steps(_reports(run, [0, 1, 3], 6), 23.0) == []
    (joined,) = book.add_node_steps(_reports(run, [2], 6), 23.5)
    assert list(joined.slowness) == [0, 1, 2, 3]


def test_a_lost_report_costs_its_steps_one_rank_and_makes_no_rank_silent(tmp_path: Path) -> None:
    run, book = start(tmp_path), StepJoiner(WORLD)
    assert book.add_node_steps(_reports(run, [0, 1, 3], 1), 0.0) == []
    joined = book.add_node_steps(_reports(run, range(WORLD), 2), 1.0)
    assert [(step.step, len(step.slowness)) for step in joined] == [(1, 3), (2, 4)]
    assert book.silent == frozenset()


def test_half_of_the_agents_late_by_five_seconds_are_left_out(tmp_path: Path) -> None:
    run, book = start(tmp_path), StepJoiner(WORLD)
    joined = []
    for second in range(20):
        joined += book.add_node_steps(_reports(run, [0, 1], second), float(second))
        joined += book.add_node_steps(_reports(run, [2, 3], second - 5) if second >= 5 else [], float(second))
    assert [step.step for step in joined] == list(range(20))
    assert book.silent == {2, 3}


def test_steps_that_are_trained_again_are_joined_again(tmp_path: Path) -> None:
    run, book = start(tmp_path), StepJoiner(WORLD)
    for step in (1, 2, 3):
        assert len(book.add_node_steps(_reports(run, range(WORLD), step), float(step))) == 1
    for step in (2, 3, 4):
        assert book.add_node_steps(_reports(run, [0, 1], step), 3.0 + step) == []
        assert len(book.add_node_steps(_reports(run, [2, 3], step), 3.5 + step)) == 1


def test_the_link_is_right_without_the_ranks_that_are_silent(tmp_path: Path) -> None:
    """Times of exchanges are read for all ranks, and traffic stays with the ranks that observed it."""
    run, book = start(tmp_path), StepJoiner(WORLD)
    link = PassiveLink()
    run.step = 1
    lag_s = {0: 1e-3, 1: 2e-3, 2: 3e-3, 3: 4e-3}
    samples = [
        replace(sample, bursts=(Burst(1000 * (1 + sample.rank), 0.1),), lag_s=lag_s)
        for sample in map(run.sample, (1, 3))
    ]
    assert book.add_node_steps(node_steps(samples), 0.0) == []
    (joined,) = book.add_node_steps([], 3.0)
    assert joined.traffic.bursts == {1: (Burst(2000, 0.1),), 3: (Burst(4000, 0.1),)}
    assert joined.traffic.round_trip_s == {(1, 3): pytest.approx(4e-3 + 2e-3)}
    link.add_traffic(replace(joined.traffic, bursts={}), probed_latency_s=1e-4)
    assert link.bandwidth is not None
    assert 8 * link.bandwidth.value == pytest.approx(1e9, rel=0.2)


def test_bandwidth_is_estimated_from_the_indices_and_values_of_artopk(tmp_path: Path) -> None:
    run = start(tmp_path)
    topk = CodecSpec(name="topk", density=0.1)
    run.loop.plans.append(make_plan(LAYERS, version=1, world_size=WORLD, codec=topk, scheme=Scheme.ARTOPK_RING))
    (joined,) = StepJoiner(WORLD).add_node_steps(node_steps(map(run.sample, range(WORLD))), 0.0)
    link = PassiveLink()
    link.add_traffic(joined.traffic, probed_latency_s=1e-4)
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


def _step_of_many(run: FakeTraining, nodes: list[int], slow: int) -> JoinedStep:
    """Return a step of ranks on `nodes`, as each tells it; the link of rank `slow` receives at 1/20 of 200 MB/s."""
    one, world_size = run.sample(0), len(nodes)
    fast = (Burst(1 << 20, (1 << 20) / 2e8),) * 4
    samples: dict[int, list[StepSample]] = {node: [] for node in nodes}
    for rank, node in enumerate(nodes):
        lag_s = dict.fromkeys(greeted(rank, world_size), 1e-3)
        bursts = (Burst(1 << 20, (1 << 20) / 1e7),) * 4 if rank == slow else fast
        samples[node].append(
            replace(
                one,
                rank=rank,
                lag_s=counted_lags(rank, nodes, lag_s),
                rate_from=dict.fromkeys(counted_peers(rank, nodes, 0), 5e6),
                bursts=counted_bursts(bursts, rank, nodes),
            )
        )
    parts = [part for node in samples for part in node_steps(samples[node])]
    (joined,) = StepJoiner(world_size).add_node_steps(parts, 0.0)
    return joined


@pytest.mark.parametrize(
    "nodes", [list(range(40)), [rank // 8 for rank in range(2 * MAX_REPORTING)]], ids=["40", "1024"]
)
def test_a_link_of_many_ranks_is_estimated_from_the_pairs_that_count(nodes: list[int], tmp_path: Path) -> None:
    num_telling = len(set(nodes))
    slow = nodes.index(5)
    joined = _step_of_many(start(tmp_path), nodes, slow)
    traffic = joined.traffic
    assert len(joined.slowness) == len(nodes)
    assert len(traffic.pair_rate) == {40: 16, 1024: 16 // FEWER}[len(nodes)] * num_telling
    assert {sender for sender, _ in traffic.pair_rate} == {receiver for _, receiver in traffic.pair_rate}
    # Each rank greets two that are a third of all ranks away, and the one that is half of them away.
    assert len(traffic.round_trip_s) == {40: 3 * 40 // 2, 1024: 3 * num_telling // FEWER // 2}[len(nodes)]
    assert len(traffic.bursts) == num_telling
    assert len(counted_bursts([Burst(1, 0.1)] * 9, 0, nodes)) == {40: 9, 1024: MAX_BURSTS - 1}[len(nodes)]
    link = PassiveLink()
    link.add_traffic(traffic, probed_latency_s=1e-4)
    assert link.latency_s is not None
    assert link.latency_s.value == pytest.approx(1e-3)
    assert link.slow == {slow: pytest.approx(1e7)}


def test_records_keep_the_steps_of_two_passes_apart_and_each_rank_in_order(tmp_path: Path) -> None:
    run = start(tmp_path)

    def sample(rank: int, step: int) -> StepSample:
        return replace(run.sample(rank), step=step)

    samples = [sample(0, 8), sample(0, 9), sample(0, 5), sample(1, 8), sample(1, 9), sample(1, 5), sample(0, 6)]
    found = [(part.step, part.ranks) for part in node_steps(samples)]
    assert found == [(8, (0, 1)), (9, (0, 1)), (5, (0, 1)), (6, (0,))]


def test_a_step_is_the_same_whether_its_ranks_come_in_one_record_or_in_several(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.loss, run.lr, run.norm = float, 0.1, 2.0
    samples = [
        replace(run.sample(rank), compute_s=0.1 * (1 + rank), gain={"bf16": 0.5 + rank / 10} if rank != 2 else {})
        for rank in range(WORLD)
    ]
    (whole,) = StepJoiner(WORLD).add_node_steps(node_steps(samples), 0.0)
    in_other_order = [part for rank in (2, 0, 3, 1) for part in node_steps([samples[rank]])]
    (again,) = StepJoiner(WORLD).add_node_steps(in_other_order, 0.0)
    assert again == whole
    assert whole.gain == {"bf16": pytest.approx((0.5 + 0.6 + 0.8) / 3)}
    assert whole.compute_s == pytest.approx(0.4)
    assert whole.slowness == {rank: pytest.approx(0.4 * (1 + rank)) for rank in range(WORLD)}


def test_a_pause_of_one_rank_is_no_time_of_the_step_of_those_that_wait_for_it(tmp_path: Path) -> None:
    run = start(tmp_path)
    quiet = join(node_steps([run.sample(rank) for rank in range(WORLD)]), WORLD)
    run.pause_s = lambda step, rank: (10.0, 0.25, 0.0, 0.0)[rank]
    paused = join(node_steps([run.sample(rank) for rank in range(WORLD)]), WORLD)
    assert paused.between_s == 10.0
    assert paused.step_s == pytest.approx(quiet.step_s)
    assert (paused.compute_s, paused.slowness) == (quiet.compute_s, quiet.slowness)
    assert paused.means == pytest.approx(quiet.means)
    # A rank whose compute is longer than the pause has waited for no other.
    run.pause_s = lambda step, rank: 0.0 if rank else 0.25
    slow = [replace(run.sample(rank), compute_s=5.0, step_s=5.5) for rank in range(WORLD)]
    assert join(node_steps(slow), WORLD).step_s == pytest.approx(5.25)
