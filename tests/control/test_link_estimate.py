"""What the engine's own messages say of the network: made-up streams with known truth, then real sockets."""

from __future__ import annotations

import itertools
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from support.ranks import run_ranks

from cgx_ray.collectives import tcp
from cgx_ray.control.changes import ChangeDetector, SlowRanks
from cgx_ray.control.estimate import quantile_interval
from cgx_ray.control.joined_steps import StepJoiner
from cgx_ray.control.link_estimate import PassiveLink
from cgx_ray.control.rate_estimates import fit_exchanges
from cgx_ray.control.topology import SilentNodes, clusters, slow_links
from cgx_ray.control.traffic import ObservedExchange, StepTraffic
from cgx_ray.lab.namespaces import Lab
from cgx_ray.monitors.sample import Burst, StepSample
from cgx_ray.session.attach import attach

WORLD = 4
PAIRS = list(itertools.combinations(range(WORLD), 2))
MIB = 1 << 20


class NoisyNetwork:
    """Steps on a network that is known, beside processors that are busy: they only make things slower."""

    def __init__(self, *, rate: float, latency_s: float, seed: int = 0, step_s: float = 0.5) -> None:
        self.rate, self.latency_s, self.step_s = rate, latency_s, step_s
        self.slow_down: dict[int, float] = {}
        self.slow_up: dict[int, float] = {}
        self.neighbour = 0.0
        self._random = random.Random(seed)

    def step(self, *, has_mesh: bool = True, sizes: tuple[int, ...] = (40_000, *[4 * MIB] * 5, MIB)) -> StepTraffic:
        if not has_mesh:
            return StepTraffic(seconds=self.step_s, exchanges=[self._exchange(size) for size in sizes])
        left = 1 - self.neighbour
        down = {rank: left * self.rate * self.slow_down.get(rank, 1.0) for rank in range(WORLD)}
        up = {rank: left * self.rate * self.slow_up.get(rank, 1.0) for rank in range(WORLD)}
        return StepTraffic(
            seconds=self.step_s,
            bursts={
                rank: [Burst(MIB, MIB / rate * self._contention()) for _ in range(6)] for rank, rate in down.items()
            },
            pair_rate={
                (a, b): min(up[a], down[b]) / (WORLD - 1) / self._contention()
                for a, b in itertools.permutations(range(WORLD), 2)
            },
            round_trip_s={pair: 2 * self.latency_s * self._contention() for pair in PAIRS},
        )

    def _exchange(self, num_bytes: int) -> ObservedExchange:
        seconds = (6 * self.latency_s + num_bytes / self.rate) * self._contention()
        return ObservedExchange(hops=6, num_bytes=num_bytes, seconds=seconds)

    def _contention(self) -> float:
        """A few percent of noise, and a third of the time up to twice as long."""
        return 1 + abs(self._random.gauss(0, 0.02)) + (self._random.random() if self._random.random() < 0.33 else 0)


def watch(
    link: PassiveLink, network: NoisyNetwork, num_steps: int, probed_latency_s: float = 1e-3, **step: bool
) -> None:
    for _ in range(num_steps):
        link.add(network.step(**step), probed_latency_s)


@pytest.mark.parametrize("rate", [12.5e6, 125e6, 250e6])
@pytest.mark.parametrize("latency_s", [1e-4, 1e-3, 0.05])
def test_messages_tell_bandwidth_within_5_percent_and_latency_within_10_beside_busy_processors(
    rate: float, latency_s: float
) -> None:
    link = PassiveLink()
    watch(link, NoisyNetwork(rate=rate, latency_s=latency_s), 20)
    assert link.bandwidth is not None
    assert link.latency_s is not None
    assert (link.bandwidth.source, link.latency_s.source) == ("bursts", "agreement")
    assert link.bandwidth.is_sure
    assert link.bandwidth.value == pytest.approx(rate, rel=0.05)
    assert link.latency_s.value == pytest.approx(latency_s, rel=0.1)


@pytest.mark.parametrize("latency_s", [1e-4, 0.01, 0.05])
def test_without_a_mesh_sizes_tell_bandwidth_whatever_latency_was_probed(latency_s: float) -> None:
    link = PassiveLink()
    watch(link, NoisyNetwork(rate=125e6, latency_s=latency_s), 20, probed_latency_s=1e-5, has_mesh=False)
    assert link.bandwidth is not None
    assert link.bandwidth.source == "fit"
    assert link.bandwidth.value == pytest.approx(125e6, rel=0.1)
    assert link.latency_s is None


def test_groups_of_one_size_do_not_tell_bandwidth_from_latency_and_the_probed_one_is_used() -> None:
    network, link = NoisyNetwork(rate=125e6, latency_s=0.01), PassiveLink()
    for _ in range(20):
        link.add(network.step(has_mesh=False, sizes=(4 * MIB, 4 * MIB)), 0.01)
    assert fit_exchanges([network._exchange(4 * MIB) for _ in range(50)]) is None
    assert link.bandwidth is not None
    assert link.bandwidth.source == "exchanges"
    assert link.bandwidth.value == pytest.approx(125e6, rel=0.1)


def test_exchanges_that_processors_could_have_taken_are_not_sure() -> None:
    """The last rank finds the messages of the others already there: 170 KB in 0.1 ms are no 14 Gbit/s."""
    for seconds, is_sure in ((1e-4, False), (3e-3, False), (0.1, True)):
        link = PassiveLink()
        for _ in range(40):
            link.add(
                StepTraffic(seconds=0.2, exchanges=[ObservedExchange(hops=1, num_bytes=170_000, seconds=seconds)]), 1e-5
            )
        assert link.bandwidth is not None
        assert link.bandwidth.is_sure == is_sure, (seconds, link.bandwidth)


def test_steps_with_few_bursts_count_together_whatever_their_exchanges_take() -> None:
    network, link = NoisyNetwork(rate=125e6, latency_s=1e-3, step_s=0.3), PassiveLink()
    for rate in (125e6, 62.5e6):
        network.rate = rate
        for step in range(60):
            seen = network.step()
            few = {step % WORLD: seen.bursts[step % WORLD][:1]} if step % 2 else {}
            # Another plan every second: one whose exchanges say something else.
            exchange = ObservedExchange(hops=1, num_bytes=1e5, seconds=1e-4 if step // 8 % 2 else 0.1)
            link.add(replace(seen, bursts=few, pair_rate={}, exchanges=[exchange]), 1e-3)
    assert link.num_changes == 1
    assert link.bandwidth is not None
    assert link.bandwidth.source == "bursts"


def test_three_exchanges_are_not_sure_of_a_slope() -> None:
    few = [ObservedExchange(hops=6, num_bytes=size, seconds=size / 1e8) for size in (1000, 10_000, 100_000)]
    noisy = [
        ObservedExchange(hops=6, num_bytes=one.num_bytes, seconds=one.seconds * (1 + i)) for i, one in enumerate(few)
    ]
    assert fit_exchanges(noisy) is None


def test_nothing_seen_is_no_estimate() -> None:
    link = PassiveLink()
    link.add(StepTraffic(seconds=1.0), 1e-3)
    assert link.bandwidth is None
    assert link.latency_s is None
    assert (link.slow, link.num_changes) == ({}, 0)


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("has_mesh", [True, False])
@pytest.mark.parametrize("step_s", [0.1, 0.5, 1.0])
def test_a_bandwidth_that_changes_by_2x_is_noticed_within_3_s(factor: float, has_mesh: bool, step_s: float) -> None:
    network, link = NoisyNetwork(rate=125e6, latency_s=1e-3, step_s=step_s), PassiveLink()
    watch(link, network, round(20 / step_s), has_mesh=has_mesh)
    assert link.num_changes == 0
    network.rate *= factor
    watch(link, network, round(3 / step_s), has_mesh=has_mesh)
    assert link.num_changes == 1
    assert link.bandwidth is not None
    assert link.bandwidth.value == pytest.approx(network.rate, rel=0.15)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_latency_that_changes_by_2x_is_noticed_within_3_s(factor: float) -> None:
    network, link = NoisyNetwork(rate=125e6, latency_s=0.01), PassiveLink()
    watch(link, network, 40)
    network.latency_s *= factor
    watch(link, network, 6)
    assert link.num_changes == 1
    assert link.latency_s is not None
    assert link.latency_s.value == pytest.approx(network.latency_s, rel=0.1)


@pytest.mark.parametrize("seed", range(2))
def test_ten_minutes_beside_a_bursty_neighbour_are_no_change(seed: int) -> None:
    network, link = NoisyNetwork(rate=125e6, latency_s=1e-3, seed=seed), PassiveLink()
    chance = random.Random(seed)
    passed_s = 0.0
    while passed_s < 600:
        # Up to half of the link, which is what fair queues leave one more flow, for up to 2 s every 5 to 15 s.
        for steps, share in ((chance.randint(10, 30), 0.0), (chance.randint(1, 4), chance.uniform(0.2, 0.5))):
            network.neighbour = share
            watch(link, network, steps)
            passed_s += steps * network.step_s
    assert link.num_changes == 0


@pytest.mark.parametrize("direction", ["slow_up", "slow_down"])
def test_the_one_slow_host_of_four_is_named_and_its_return_noticed(direction: str) -> None:
    network, link = NoisyNetwork(rate=125e6, latency_s=1e-3), PassiveLink()
    watch(link, network, 20)
    getattr(network, direction)[2] = 0.2
    watch(link, network, 20)
    assert link.slow.keys() == {2}, link.slow
    assert link.bandwidth is not None
    assert link.bandwidth.value == pytest.approx(25e6, rel=0.5 if direction == "slow_up" else 0.1)
    getattr(network, direction).clear()
    watch(link, network, 20)
    assert link.slow == {}
    assert link.bandwidth.value == pytest.approx(125e6, rel=0.05)


def test_latency_is_that_between_hosts_where_some_ranks_share_one() -> None:
    link = PassiveLink()
    trips = {(a, b): 5e-5 if a // 2 == b // 2 else 0.02 for a, b in PAIRS}
    for _ in range(5):
        link.add(StepTraffic(seconds=0.5, round_trip_s=trips), 1e-3)
    assert link.latency_s is not None
    assert link.latency_s.value == 0.01


# Changes.


def noisy(level: float, num: int, *, seed: int = 0, sigma: float = 0.05) -> Iterator[float]:
    chance = random.Random(seed)
    return (level * math.exp(chance.gauss(0, sigma)) for _ in range(num))


@pytest.mark.parametrize("factor", [0.25, 0.5, 2.0, 10.0])
@pytest.mark.parametrize("seed", range(8))
def test_a_step_by_2x_is_noticed_within_3_samples_of_a_second_and_once(factor: float, seed: int) -> None:
    detector = ChangeDetector()
    assert [detector.add(value, 1.0) for value in noisy(7.0, 60, seed=seed)] == [None] * 60
    found = [detector.add(value, 1.0) for value in noisy(7.0 * factor, 60, seed=seed + 100)]
    alarms = [second for second, since_s in enumerate(found, 1) if since_s is not None]
    assert len(alarms) == 1, alarms
    assert alarms[0] <= 3
    assert found[alarms[0] - 1] == alarms[0]


@pytest.mark.parametrize("seed", range(8))
def test_ten_minutes_of_noise_and_bursts_of_2_s_raise_no_alarm(seed: int) -> None:
    detector, chance = ChangeDetector(), random.Random(seed)
    values = list(noisy(3.0, 600, seed=seed))
    for start in range(10, 590, 12):
        for second in range(start, start + chance.randint(1, 2)):
            values[second] *= chance.uniform(0.55, 1.0)
    assert [second for second, value in enumerate(values) if detector.add(value, 1.0) is not None] == []


def test_a_change_for_the_better_is_noticed_within_2_s_and_one_for_the_worse_is_not() -> None:
    for better, factor, allowed_s in ((1, 2.0, 2.0), (-1, 0.5, 2.0), (1, 0.5, 3.0), (-1, 2.0, 3.0)):
        detector = ChangeDetector(better)
        assert not any(detector.add(value, 0.25) for value in noisy(7.0, 80))
        found = [detector.add(value, 0.25) for value in noisy(7.0 * factor, 20, seed=1)]
        noticed_s = 0.25 * (1 + [since_s is not None for since_s in found].index(True))
        assert allowed_s - 1.0 < noticed_s <= allowed_s, (better, factor, noticed_s)


def test_one_sample_says_as_much_as_several_that_cover_the_same_time() -> None:
    coarse, fine = ChangeDetector(), ChangeDetector()
    for _ in range(5):
        assert coarse.add(1.0, 2.5) is None
    assert coarse.add(2.0, 2.5) is None, "one sample is never enough"
    assert coarse.add(2.0, 2.5) == pytest.approx(5.0)
    for _ in range(125):
        assert fine.add(1.0, 0.1) is None
    found = [fine.add(2.0, 0.1) for _ in range(25)]
    assert [since_s is not None for since_s in found].index(True) in (19, 20)


def test_a_run_of_steps_of_20_ms_is_learned_in_ten_of_them() -> None:
    detector = ChangeDetector()
    assert [detector.add(1.0, 0.02) for _ in range(60)] == [None] * 60
    found = [detector.add(0.1, 0.03) for _ in range(60)]
    assert [since_s is not None for since_s in found].index(True) <= 46


def test_a_slow_drift_is_followed_without_alarm() -> None:
    detector = ChangeDetector()
    assert all(detector.add(2.0 ** (second / 120), 1.0) is None for second in range(600))


def test_a_value_without_a_logarithm_is_refused() -> None:
    for value in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive"):
            ChangeDetector().add(value, 1.0)


def test_a_straggler_is_named_after_seconds_and_forgiven_when_it_is_back() -> None:
    slow = SlowRanks(3)
    # One slow step is nobody's fault.
    assert not slow.add([1.0, 3.0, 1.0], 0.5)
    assert not any(slow.add([1.0, 1.0, 0.9], 0.5) for _ in range(10))
    changed = [slow.add([1.0, 1.9, 1.0], 0.5) for _ in range(12)]
    assert slow.ranks == {1}
    assert changed.index(True) <= 5
    assert changed.count(True) == 1
    changed = [slow.add([1.0, 1.0, 1.0], 0.5) for _ in range(16)]
    assert slow.ranks == set()
    assert changed.count(True) == 1


# Topology.


def test_clusters_are_hosts_whatever_the_order_of_pairs() -> None:
    trips = {(b, a): 3e-5 * (1 + 0.5 * (a == 0)) if a % 3 == b % 3 else 1e-3 for a, b in PAIRS}
    assert clusters(trips) == [[0, 3], [1], [2]]
    assert clusters({pair: 1e-3 * (1 + 0.1 * sum(pair)) for pair in PAIRS}) == [[0, 1, 2, 3]]
    assert clusters({}) == []


def test_two_links_do_not_say_which_of_them_is_slow() -> None:
    assert slow_links({0: 1.0, 1: 10.0}) == {}
    assert slow_links({0: 1.0, 1: 10.0, 2: 9.0}) == {0: 1.0}


def test_a_node_that_answers_nobody_any_more_is_silent_until_it_does() -> None:
    silent = SilentNodes()
    nodes = set("abcd")
    silent.add("a", [])
    assert silent.node_ids == set(), "nobody has asked yet"
    for node in sorted(nodes):
        silent.add(node, nodes - {node})
    assert silent.node_ids == set()
    for node in "abc":
        silent.add(node, nodes - {node, "d"})
    assert silent.node_ids == {"d"}
    # What the cut one sees does not matter: it may be heard of late, or not at all.
    silent.add("d", [])
    assert silent.node_ids == {"d"}
    silent.add("b", nodes - {"b"})
    assert silent.node_ids == set()
    for node in nodes:
        silent.add(node, [])
    assert silent.node_ids == set(), "all at once: nobody knows who is cut off"


def test_an_interval_holds_its_quantile_about_19_times_in_20() -> None:
    chance = random.Random(0)
    hits = 0
    for _ in range(1000):
        low, value, high = quantile_interval([chance.random() for _ in range(60)], 0.9)
        assert low <= value <= high
        hits += low <= 0.9 <= high
    # 60 samples give a discrete interval; binomial: P(85 <= index ...) lies between 0.90 and 0.99.
    assert 880 <= hits <= 995, hits


# Real ranks.


def train(rank: int, transport: str) -> list[StepSample]:
    # Each on a host of its own: what goes through shared memory says nothing of a network.
    tcp.host_key = lambda: f"host {rank}"
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    attachment = attach(ddp, codec="bf16", scheme="sra", transport=transport)
    for _ in range(6):
        ddp(torch.ones(1, 1024)).sum().backward()
    samples = attachment.take_samples()
    attachment.close()
    return samples


def test_round_trips_of_real_ranks_add_up_and_long_messages_have_a_rate() -> None:
    by_rank = run_ranks(3, train, "tcp")
    steps = StepJoiner(3).add(sample for samples in by_rank for sample in samples)
    assert len(steps) == 6
    # The first step reads no agreement.
    assert steps[0].traffic.round_trip_s == {}
    for step in steps[1:]:
        trips = step.traffic.round_trip_s
        assert trips.keys() == {(0, 1), (0, 2), (1, 2)}
        # Loopback: above nothing, under what it takes to train all steps.
        assert all(0 < seconds < sum(one.step_s for one in steps) for seconds in trips.values()), trips
    bursts = [burst for step in steps for bursts in step.traffic.bursts.values() for burst in bursts]
    sent = sum(sample.wire_bytes for samples in by_rank for sample in samples)
    assert all(burst.seconds > 0 and burst.num_bytes > 0 for burst in bursts)
    assert sum(burst.num_bytes for burst in bursts) <= sent
    assert all(sender != receiver for step in steps for sender, receiver in step.traffic.pair_rate)


def test_over_torch_distributed_only_exchanges_tell() -> None:
    steps = StepJoiner(2).add(sample for samples in run_ranks(2, train, "gloo") for sample in samples)
    link = PassiveLink()
    for step in steps:
        assert not step.traffic.round_trip_s
        assert not any(step.traffic.bursts.values())
        link.add(step.traffic, 1e-5)
    assert link.latency_s is None
    assert link.bandwidth is not None
    assert link.bandwidth.source in {"fit", "exchanges"}


@pytest.mark.skipif(Lab.available() is not None, reason=Lab.available() or "")
def test_a_real_exchange_shows_the_rate_of_the_lab_within_10_percent() -> None:
    with Lab(3, rate_bit_per_s=1e8) as lab, tempfile.TemporaryDirectory() as folder:
        ranks = [
            lab.popen(rank, [sys.executable, "-c", _EXCHANGE, str(rank), folder, "1500000"], stdout=subprocess.PIPE)
            for rank in range(3)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    link = PassiveLink()
    for step in zip(*(json.loads(output) for output in outputs), strict=True):
        bursts = {rank: [Burst(*burst) for burst in seen["bursts"]] for rank, seen in enumerate(step)}
        trips = {(a, b): step[a]["lag_s"][b] + step[b]["lag_s"][a] for a, b in itertools.combinations(range(3), 2)}
        link.add(StepTraffic(seconds=1.0, bursts=bursts, round_trip_s=trips), 1e-3)
    assert link.bandwidth is not None
    assert link.latency_s is not None
    # 1448 of 1514 bytes are payload.
    assert 8 * link.bandwidth.value == pytest.approx(0.956e8, rel=0.1), link.bandwidth
    assert 0 < link.latency_s.value < 5e-3, link.latency_s


_EXCHANGE = """
import json, sys, torch, torch.distributed as dist
from cgx_ray.collectives.tcp import connect_mesh
rank, folder, numel = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 3), rank=rank, world_size=3)
mesh = connect_mesh(dist.group.WORLD, 60.0)
peers = [peer for peer in range(3) if peer != rank]
steps = []
for _ in range(8):
    flags = {peer: torch.zeros(5, dtype=torch.int64) for peer in peers}
    lag_s = mesh.wait(mesh.post({peer: torch.zeros(5, dtype=torch.int64) for peer in peers}, flags), 60.0)
    sent, received = torch.zeros(numel), {peer: torch.zeros(numel) for peer in peers}
    mesh.wait(mesh.post(dict.fromkeys(peers, sent), received), 60.0)
    dist.barrier()
    steps.append({"lag_s": lag_s, "bursts": [burst[1:] for burst in mesh.take_bursts() if burst[0] < 0]})
print(json.dumps(steps), flush=True)
dist.barrier()
mesh.close()
"""
