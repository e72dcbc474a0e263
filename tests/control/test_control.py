"""The control loop, stepped over made-up samples: no Ray, no clock, no network."""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from cgx_ray.control.joined_steps import StepBook
from cgx_ray.control.journal import Journal
from cgx_ray.control.known_network import PROBE_HOLDS_S, RATE_HOLDS_S, KnownNetwork
from cgx_ray.control.link_estimate import PassiveLink
from cgx_ray.control.loop import BAN_STEPS, JUDGED_STEPS, LINK_STEPS, WARM_UP_STEPS, ControlLoop
from cgx_ray.control.measured import beside_dense, is_dense, layer_times
from cgx_ray.control.policy import AdaptivePolicy, Decision, Disable, Keep, Replace, StaticPolicy
from cgx_ray.monitors.sample import Burst, HostLoad, NodeSample, StepSample, Transfer
from cgx_ray.plan import NONE, CodecSpec, GroupPlan, Intra, Layer, Option, Plan, Scheme, make_plan
from cgx_ray.planner.cost import Link, exchange_s
from cgx_ray.planner.options import CodecCost, candidate_options

WORLD = 4
DENSITIES = (0.1, 0.01)
LAYERS = (
    Layer(name="embed", numel=1_000_000, ndim=2),
    Layer(name="bias", numel=1_000, ndim=1),
    Layer(name="head", numel=4_000_000, ndim=2),
)
COST = CodecCost(encode_a_s=1e-5, encode_b_s_per_element=5e-10, decode_a_s=1e-5, decode_b_s_per_element=2e-10)
COSTS = {str(option.codec): COST for option in candidate_options(DENSITIES)}
GAIN = {
    "bf16": 1.0,
    "qsgd:bits=4,bucket_size=128": 0.98,
    "topk:density=0.1": 0.7,
    "topk:density=0.01": 0.3,
}
QUIET = HostLoad(sent_bytes_per_s=0.0, received_bytes_per_s=0.0)


@dataclass
class FakeRun:
    """A run whose steps take what flat schemes do by the cost model, times `slowdown` for all but dense ones."""

    loop: ControlLoop
    gbps: float = 1.0
    compute_s: float = 0.3
    slowdown: float = 1.0
    gain: dict[str, float] = field(default_factory=lambda: dict(GAIN))
    late_rank_s: float = 0.0
    step: int = 0
    noise: float = 0.0
    latency_s: float = 1e-4
    num_local: int = 1
    jitter: float = 0.0

    def run(self, num_steps: int) -> list[Decision]:
        decisions = []
        for _ in range(num_steps):
            self.noise = self.jitter * (2 * random.Random(self.step).random() - 1)
            samples = tuple(self._sample(rank) for rank in range(WORLD))
            self.step += 1
            sample = NodeSample(
                node_id="node",
                time_s=float(self.step),
                steps=samples,
                latency_s={"other": self.latency_s},
                host=QUIET,
            )
            decisions += self.loop.observe(sample, float(self.step))
        return decisions

    def _sample(self, rank: int) -> StepSample:
        plan = self.loop.plans[-1]
        link = Link.from_rates(bandwidth_gbps=self.gbps, latency_ms=self.latency_s * 1e3)
        numel = {layer.name: layer.numel for layer in LAYERS}
        transfers = []
        for index, group in enumerate(plan.groups):
            n = sum(numel[name] for name in group.layers)
            m = group.option.codec.payload_bytes(n)
            m_i = group.option.codec.index_bytes(n)
            seconds = exchange_s(
                group.option.scheme, num_workers=WORLD, dense_bytes=4 * n, wire_bytes=m, index_bytes=m_i, link=link
            )
            transfers.append(
                Transfer(
                    group=index,
                    scheme=str(group.option.scheme),
                    numel=n,
                    wire_bytes=m,
                    index_bytes=m_i,
                    seconds=seconds,
                    intra=str(group.option.intra),
                )
            )
        exchange = sum(transfer.seconds for transfer in transfers)
        late_s = self.late_rank_s if rank else 0.0
        return StepSample(
            rank=rank,
            step=self.step,
            plan_version=plan.version,
            step_s=(self.compute_s + exchange) * (1.0 if is_dense(plan) else self.slowdown),
            compute_s=self.compute_s * (1 + self.noise),
            encode_s=0.002,
            exchange_s=exchange + late_s,
            decode_s=0.002,
            wire_bytes=1,
            dense_bytes=1,
            ready_s=(self.compute_s * (1 + self.noise),) * len(plan.groups),
            num_local=self.num_local,
            transfers=tuple(replace(transfer, seconds=transfer.seconds + late_s) for transfer in transfers),
            gain=self.gain if self.step % 20 == 1 else {},
        )


def start(
    tmp_path: Path, *, min_gain: float = 0.8, options: Sequence[Option] = candidate_options(DENSITIES)
) -> FakeRun:
    policy = AdaptivePolicy(options, min_gain=min_gain)
    loop = ControlLoop(policy, Journal(tmp_path / "decisions.jsonl"), group_bytes=4 << 20)
    loop.register(LAYERS, make_plan(LAYERS, version=0, world_size=WORLD), COSTS)
    run = FakeRun(loop)
    run.step = 1
    return run


def journal(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]


def test_first_decision_comes_after_three_steps_and_leaves_dense_on_a_slow_network(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 0.1
    decisions = run.run(LINK_STEPS)
    assert [type(decision) for decision in decisions] == [Replace]
    assert run.loop.plans[-1].describe() == "qsgd:bits=4,bucket_size=128 over sra"
    assert "qsgd:bits=4,bucket_size=128 over sra, 1x none over sra: 0.621 s a step" in decisions[0].reason
    assert "dense 2.705 s, keeps 98.0% of the gradient, gap 0.0%" in decisions[0].reason


def test_a_fast_network_keeps_dense(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 1000
    decisions = run.run(5)
    assert [type(decision) for decision in decisions] == [Keep]
    assert "nothing beats dense" in decisions[0].reason or "less than 5%" in decisions[0].reason


@pytest.mark.parametrize("late_rank_s", [0.0, 2.0])
def test_a_slower_network_is_noticed_within_three_steps_even_if_a_rank_is_late(
    tmp_path: Path, late_rank_s: float
) -> None:
    run = start(tmp_path)
    run.late_rank_s = late_rank_s
    run.run(20)
    run.gbps = 0.1
    decisions = run.run(3)
    assert len(decisions) == 1
    assert "bandwidth 1.00 Gbit/s -> 100 Mbit/s" in decisions[0].reason


def test_an_unchanged_network_causes_no_decision_until_the_review(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.run(10)
    assert run.run(80) == []
    assert len(run.run(20)) == 1


def test_every_decision_is_journalled_with_its_prediction_and_then_its_outcome(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 0.1
    run.run(LINK_STEPS + WARM_UP_STEPS + JUDGED_STEPS)
    decision, outcome = journal(tmp_path)
    assert decision["event"] == "decision"
    assert decision["old"] == {"version": 0, "plan": "dense", "options": {"dense": {"groups": 2, "layers": 3}}}
    qsgd = "qsgd:bits=4,bucket_size=128 over sra"
    options = {qsgd: {"groups": 1, "layers": 2}, "none over sra": {"groups": 1, "layers": 1}}
    assert decision["new"] == {"version": 1, "plan": qsgd, "options": options}
    assert decision["inputs"]["bandwidth_gbps"] == pytest.approx(0.1)
    assert decision["predicted_dense_s"] == pytest.approx(0.3 + 2 * 3 / 4 * 20.004e6 * 8 / 1e8, rel=0.01)
    assert outcome["event"] == "outcome"
    assert outcome["version"] == 1
    assert outcome["predicted_step_s"] == decision["predicted_step_s"]
    assert outcome["measured_step_s"] == pytest.approx(outcome["predicted_step_s"], rel=0.05)


def test_a_plan_slower_than_dense_is_taken_back_and_others_are_tried_more_and_more_rarely(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.slowdown = 30.0
    first, second = run.run(LINK_STEPS + WARM_UP_STEPS + JUDGED_STEPS)
    assert isinstance(first, Replace)
    assert isinstance(second, Disable)
    assert run.loop.plans[-1].describe() == "dense"
    assert "on this network; nothing else is tried for 500 steps, its options for 1000" in second.reason
    assert run.run(BAN_STEPS - 1) == []
    next_one, its_end = run.run(2 * BAN_STEPS)
    assert isinstance(next_one, Replace)
    assert isinstance(its_end, Disable)
    tried = [{(option.codec, option.scheme) for option in beside_dense(one.plan)} for one in (first, next_one)]
    assert all(tried)
    assert tried[0].isdisjoint(tried[1]), tried


def test_a_network_that_changes_ends_the_pause_after_a_failure(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.slowdown = 2.0
    run.run(20)
    assert run.loop.plans[-1].describe() == "dense"
    run.gbps, run.slowdown = 0.02, 1.0
    decision, *_ = run.run(3)
    assert isinstance(decision, Replace)
    assert run.loop.plans[-1].describe() != "qsgd:bits=4,bucket_size=128 over sra"


@pytest.mark.parametrize(
    ("gbps", "change"), [(0.8, {"latency_s": 0.15}), (0.1, {"compute_s": 3.0})], ids=["latency", "compute"]
)
def test_what_dense_took_before_latency_or_compute_grew_disables_no_plan(
    tmp_path: Path, gbps: float, change: dict[str, float]
) -> None:
    run = start(tmp_path)
    run.gbps = gbps
    run.run(40)
    assert run.loop.plans[-1].describe().startswith("qsgd")
    vars(run).update(change)
    decisions = run.run(150)
    assert decisions
    assert not any(isinstance(decision, Disable) for decision in decisions), [one.reason for one in decisions]
    assert run.loop.plans[-1].describe().startswith("qsgd")


def test_what_dense_took_before_compute_fell_keeps_no_plan_that_is_slower_than_dense_now(tmp_path: Path) -> None:
    """Dense fell from 5.7 to 3.0 s, and the plan takes 3.7."""
    run = start(tmp_path)
    run.gbps, run.compute_s = 0.1, 3.0
    run.run(20)
    run.compute_s, run.slowdown = 0.3, 6.0
    decisions = run.run(100)
    assert isinstance(decisions[-1], Disable), [one.reason for one in decisions]


def test_hierarchical_sums_that_are_slower_than_dense_are_taken_back(tmp_path: Path) -> None:
    """What a link inside nodes carries is assumed, so they are judged like any other plan. They tell no bandwidth."""
    run = start(tmp_path, options=[Option(codec=NONE, scheme=Scheme.DENSE, intra=Intra.DENSE)])
    run.num_local, run.latency_s, run.slowdown = 2, 0.02, 3.0
    first, second = run.run(LINK_STEPS + WARM_UP_STEPS + JUDGED_STEPS)
    assert isinstance(first, Replace)
    assert first.plan.describe() == "dense, dense inside nodes"
    assert isinstance(second, Disable)
    assert is_dense(run.loop.plans[-1])


def test_a_codec_whose_gain_falls_in_use_is_left_and_not_tried_again(tmp_path: Path) -> None:
    run = start(tmp_path, min_gain=0.5)
    run.gbps = 0.02
    run.gain["topk:density=0.01"] = 0.7
    run.run(10)
    left = run.loop.plans[-1].describe()
    assert left == "topk:density=0.01 over artopk_tree"
    run.gain["topk:density=0.01"] = 0.2
    assert run.run(20) == [], "one measurement is not enough"
    (decision,) = run.run(20)
    assert decision.reason.startswith("gain of topk:density=0.01 fell from 0.70 to 0.20; ")
    # Not in use, it is estimated from each rank's own top-k again.
    run.gain["topk:density=0.01"] = 0.7
    run.run(200)
    used = {option.codec for plan in run.loop.plans[2:] for option in beside_dense(plan)}
    assert used
    assert CodecSpec(name="topk", density=0.01) not in used


def test_a_plan_under_min_gain_is_left_even_for_a_slower_one(tmp_path: Path) -> None:
    run = start(tmp_path, min_gain=0.8)
    run.gbps = 0.005
    run.gain["topk:density=0.01"] = 0.9
    run.run(10)
    assert run.loop.plans[-1].describe() == "topk:density=0.01 over artopk_tree"
    run.gain["topk:density=0.01"] = 0.78
    run.run(40)
    assert run.loop.plans[-1].describe() == "qsgd:bits=4,bucket_size=128 over sra"


def test_a_codec_whose_gain_rises_is_taken_before_the_review(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 0.02
    run.run(110)
    assert run.loop.plans[-1].describe() == "qsgd:bits=4,bucket_size=128 over sra"
    run.gain["topk:density=0.01"] = 0.9
    (decision,) = run.run(35)
    assert decision.reason.startswith("gain of topk:density=0.01 rose from 0.30 to 0.90; ")
    assert "topk:density=0.01" in run.loop.plans[-1].describe()


def test_gains_that_change_end_no_pause_after_a_failure(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.slowdown = 30.0
    assert isinstance(run.run(20)[-1], Disable)
    run.gain |= {"topk:density=0.01": 0.95, "topk:density=0.1": 0.99}
    assert run.run(BAN_STEPS - 30) == []


def test_compression_that_a_recovered_network_made_useless_is_taken_back(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 0.1
    run.run(20)
    run.gbps, run.slowdown = 10.0, 1.6
    run.run(20)
    assert run.loop.plans[-1].describe() == "dense"
    assert journal(tmp_path)[-2]["kind"] == "disable"


def test_compute_times_that_scatter_by_a_fifth_flip_no_plan(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps, run.jitter = 0.2, 0.2
    first, *later = run.run(500)
    assert isinstance(first, Replace)
    assert len(later) >= 4
    assert {type(decision) for decision in later} == {Keep}, [decision.reason for decision in later]


def test_where_some_ranks_share_memory_nodes_sum_before_they_exchange(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps, run.num_local = 0.1, 2
    (decision,) = run.run(LINK_STEPS)
    assert journal(tmp_path)[0]["inputs"]["ranks_per_node"] == 2
    assert "inside nodes" in decision.reason, decision.reason
    assert Intra.FLAT not in {group.option.intra for group in run.loop.plans[-1].groups}


def test_bursts_count_for_the_node_whose_link_its_ranks_share(tmp_path: Path) -> None:
    run = start(tmp_path)
    for num_local, factor in ((1, 1), (2, 2), (WORLD, 1)):
        run.num_local = num_local
        samples = [replace(run._sample(rank), bursts=(Burst(1000, 0.1),)) for rank in range(WORLD)]
        (joined,) = StepBook(WORLD).add(samples)
        assert joined.seen.bursts[1] == (Burst(1000 * factor, 0.1),)
        assert joined.num_local == num_local
    odd = [replace(run._sample(rank), num_local=1 + (rank > 0) * 2) for rank in range(WORLD)]
    assert StepBook(WORLD).add(odd)[0].num_local == 1


def test_layer_times_follow_ready_groups_and_between_them_elements() -> None:
    """Backward: c, b, a; the small b is sent last. Forward is a third of 0.9 s."""
    layers = tuple(Layer(name=name, numel=numel, ndim=2) for name, numel in (("a", 3000), ("b", 100), ("c", 2000)))
    groups = tuple(GroupPlan(layers=(name,)) for name in ("c", "a", "b"))
    plan = Plan(version=0, world_size=2, groups=groups)
    assert layer_times(layers, plan, (0.5, 0.9, 0.6)) == pytest.approx((0.5, 0.1, 0.3))
    whole = Plan(version=0, world_size=2, groups=(GroupPlan(layers=("a", "b", "c")),))
    assert layer_times(layers, whole, (0.9,)) == pytest.approx((0.3 + 0.6 * 20 / 51, 0.6 / 51, 0.6 * 30 / 51))


def test_a_tenfold_latency_is_a_cause(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.run(20)
    run.latency_s = 0.02
    decisions = run.run(3)
    assert "latency 0.1 -> 20.0 ms" in decisions[0].reason


def test_codecs_that_keep_too_little_are_not_chosen(tmp_path: Path) -> None:
    run = start(tmp_path, min_gain=0.99)
    run.gbps = 0.01
    run.run(5)
    assert run.loop.plans[-1].describe() == "bf16 over sra"


def test_a_static_policy_never_decides(tmp_path: Path) -> None:
    loop = ControlLoop(StaticPolicy(), Journal(tmp_path / "decisions.jsonl"), group_bytes=4 << 20)
    loop.register(LAYERS, make_plan(LAYERS, version=0, world_size=WORLD), COSTS)
    run = FakeRun(loop, step=1)
    assert run.run(150) == []
    assert not (tmp_path / "decisions.jsonl").exists()


def test_a_restart_goes_on_with_the_plan_and_another_world_size_starts_dense(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 0.1
    run.run(5)
    in_force = run.loop.plans[-1]
    assert run.loop.register(LAYERS, make_plan(LAYERS, version=0, world_size=WORLD), COSTS) == in_force
    smaller = run.loop.register(LAYERS, make_plan(LAYERS, version=0, world_size=2), COSTS)
    assert smaller.describe() == "dense"
    assert smaller.version == in_force.version + 1


def test_probes_are_asked_for_and_used_only_while_messages_are_not_sure(tmp_path: Path) -> None:
    run = start(tmp_path)

    def report(node_id: str, time_s: float, bandwidth: dict[str, float]) -> None:
        others = {other: 1e-3 for other in "ab" if other != node_id}
        run.loop.observe(
            NodeSample(node_id=node_id, time_s=time_s, steps=(), latency_s=others, host=QUIET, bandwidth=bandwidth),
            time_s,
        )

    for node_id in "ab":
        report(node_id, 0.0, {})
    assert run.loop.next_probe("a", 0.0) is None, "the first minute belongs to messages"
    assert (run.loop.next_probe("b", 60.0), run.loop.next_probe("a", 60.0)) == (None, "b")
    report("a", 1.0, {"b": 25e6})
    assert run.loop.facts().bandwidth_bits_per_s == 200e6
    report("b", 2 + RATE_HOLDS_S, {})
    assert run.loop.facts().bandwidth_bits_per_s is None, "too old, though a is silent"
    assert run.loop.next_probe("b", 120.0) == "a"
    report("b", 3 + RATE_HOLDS_S, {"a": 25e6})
    run.run(LINK_STEPS)
    assert run.loop.facts().bandwidth_bits_per_s == pytest.approx(1e9, rel=0.1)
    assert (run.loop.next_probe("a", 300.0), run.loop.next_probe("b", 300.0)) == (None, None)


WAYS = tuple(map("".join, itertools.permutations("abcd", 2)))
TO_D = tuple(way for way in WAYS if way[1] == "d")
OF_D = tuple(way for way in WAYS if "d" in way)


@pytest.mark.parametrize(
    ("ways", "slow_ways", "named"),
    [
        (WAYS, TO_D, {3}),
        (WAYS, OF_D, {3}),
        (["ab", "cd"], ["cd"], set()),
        (["ab", "ad"], ["ad"], {3}),
        (["ab", "ba"], ["ba"], set()),
        (["ab", "bc", "cd", "da"], ["cd", "da"], set()),
        (["ab", "cd", "bc", "db"], ["cd", "db"], {3}),
    ],
    ids=["down", "both", "either end", "other end cleared", "two nodes", "nobody cleared", "as granted"],
)
def test_probes_count_with_a_slow_node_and_name_it_once_the_other_end_was_fast_elsewhere(
    ways: Sequence[str], slow_ways: Sequence[str], named: set[int], tmp_path: Path
) -> None:
    run, network = start(tmp_path), KnownNetwork()

    def report(node: str, found: dict[str, float]) -> None:
        steps, latency_s = (run._sample("abcd".index(node)),), {other: 1e-3 for other in "abcd" if other != node}
        network.hear(
            NodeSample(node_id=node, time_s=0.0, steps=steps, latency_s=latency_s, host=QUIET, bandwidth=found), 0.0
        )

    for node in "abcd":
        report(node, {})
    for way in ways:
        report(way[0], {way[1]: 1.25e6 if way in slow_ways else 1.25e8})
    assert network.bandwidth is not None
    assert (network.bandwidth.value, network.bandwidth.source) == (1.25e6, "probes")
    assert network.bandwidth.low <= network.bandwidth.value <= network.bandwidth.high
    assert network.slow == dict.fromkeys(named, 1.25e6)


def test_what_a_node_probed_counts_no_longer_once_it_is_silent(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.latency_s = 1e-3
    run.run(1)
    far = NodeSample(
        node_id="far", time_s=0.0, steps=(), latency_s={"node": 0.101}, host=QUIET, bandwidth={"node": 1e6}
    )
    run.loop.observe(far, 1.0)
    assert run.loop.facts().latency_s == pytest.approx(0.051)
    run.step = 2 + int(PROBE_HOLDS_S)
    run.run(1)
    assert run.loop.facts().latency_s == pytest.approx(1e-3)


def test_the_number_of_link_changes_only_grows(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.run(20)
    assert run.loop.facts().num_link_changes == 0
    run.gbps = 0.1
    run.run(20)
    slower = run.loop.facts().num_link_changes
    assert slower > 0
    run.latency_s = 0.15
    run.run(1)
    assert run.loop.facts().num_link_changes > slower


def test_a_full_disk_costs_lines_and_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "blocked").write_text("")
    log = Journal(tmp_path / "blocked" / "decisions.jsonl")
    with caplog.at_level(logging.WARNING):
        log.write({"event": "decision"})
        log.write({"event": "decision"})
    assert log.num_errors == 2
    assert len(caplog.records) == 1
    assert "training goes on" in caplog.text


def test_steps_join_when_the_last_rank_reports_and_the_shortest_transfer_counts(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.late_rank_s = 5.0
    samples = [run._sample(rank) for rank in range(WORLD)]
    book = StepBook(WORLD)
    assert book.add(samples[1:]) == []
    (joined,) = book.add(samples[:1])
    link = PassiveLink()
    link.add(joined.seen, probed_latency_s=1e-4)
    assert link.bandwidth is not None
    assert 8 * link.bandwidth.value == pytest.approx(1e9)


def test_bandwidth_is_told_from_the_indices_and_values_of_artopk(tmp_path: Path) -> None:
    run = start(tmp_path)
    topk = CodecSpec(name="topk", density=0.1)
    run.loop.plans.append(make_plan(LAYERS, version=1, world_size=WORLD, codec=topk, scheme=Scheme.ARTOPK_RING))
    (joined,) = StepBook(WORLD).add([run._sample(rank) for rank in range(WORLD)])
    link = PassiveLink()
    link.add(joined.seen, probed_latency_s=1e-4)
    assert link.bandwidth is not None
    assert 8 * link.bandwidth.value == pytest.approx(1e9)


def test_a_plan_survives_json() -> None:
    plan = make_plan(LAYERS, version=3, world_size=WORLD)
    assert Plan.from_json(plan.to_json()) == plan


def test_latencies_from_before_a_change_do_not_count_until_all_nodes_have_measured_anew(tmp_path: Path) -> None:
    run, nodes = start(tmp_path), "abcd"
    said = {node: {peer: 1e-3 + 1e-6 * i for i, peer in enumerate(nodes) if peer != node} for node in nodes}

    def step(latency_s: float) -> float | None:
        lag_s = [tuple(0.0 if peer == rank else latency_s for peer in range(4)) for rank in range(4)]
        samples = [replace(run._sample(rank), lag_s=lag_s[rank]) for rank in range(4)]
        run.step += 1
        for node, sample in zip(nodes, samples, strict=True):
            told = NodeSample(node_id=node, time_s=run.step, steps=(sample,), latency_s=dict(said[node]), host=QUIET)
            run.loop.observe(told, float(run.step))
        return run.loop.facts().latency_s

    for _ in range(20):
        assert step(1e-3) == pytest.approx(1e-3, rel=0.01)
    changes = run.loop.facts().num_link_changes
    while run.loop.facts().num_link_changes == changes:
        step(20e-3)
    # Agents measure one peer after the other, and one agent is late.
    for peer in nodes:
        for node in nodes[1:]:
            said[node] |= {peer: 30e-3} if peer != node else {}
            assert step(20e-3) == pytest.approx(20e-3, rel=0.01)
    said["a"] = dict.fromkeys("bcd", 15e-3)
    for node in nodes[1:]:
        said[node] = {peer: 15e-3 for peer in nodes if peer != node}
    assert step(20e-3) == pytest.approx(15e-3, rel=0.01), "the shorter of both, once all have measured"
