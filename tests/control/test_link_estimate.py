"""The link as the engine's own messages show it: made-up streams with a known truth."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cgx_ray.control.network.link_estimate import PassiveLink
from cgx_ray.control.network.traffic import ObservedExchange, StepTraffic
from cgx_ray.monitors.sample import Burst

WORLD = 4


PAIRS = list(itertools.combinations(range(WORLD), 2))


MIB = 1 << 20


class NoisyNetwork:
    """Steps on a network with known rates, beside busy processors, which only make things slower."""

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
        """Return the factor of a delay: a few percent of noise, and in a third of the cases up to 2x."""
        return 1 + abs(self._random.gauss(0, 0.02)) + (self._random.random() if self._random.random() < 0.33 else 0)


def watch(
    link: PassiveLink,
    network: NoisyNetwork,
    num_steps: int,
    probed_latency_s: float = 1e-3,
    **step: bool,
) -> None:
    for _ in range(num_steps):
        link.add_traffic(network.step(**step), probed_latency_s)


@pytest.mark.parametrize("rate", [12.5e6, 125e6, 250e6])
@pytest.mark.parametrize("latency_s", [1e-4, 1e-3, 0.05])
def test_messages_tell_bandwidth_within_5_percent_and_latency_within_10_beside_busy_processors(
    rate: float, latency_s: float
) -> None:
    link = PassiveLink()
    watch(link, NoisyNetwork(rate=rate, latency_s=latency_s), 20)
    assert link.bandwidth is not None
    assert link.latency_s is not None
    assert (link.bandwidth.source, link.latency_s.source) == ("bursts", "greetings")
    assert link.bandwidth.is_sure
    assert link.bandwidth.value == pytest.approx(rate, rel=0.05)
    assert link.latency_s.value == pytest.approx(latency_s, rel=0.1)


def test_without_a_mesh_exchanges_tell_bandwidth_by_the_probed_latency() -> None:
    network, link = NoisyNetwork(rate=125e6, latency_s=0.01), PassiveLink()
    watch(link, network, 20, probed_latency_s=0.01, has_mesh=False)
    assert link.bandwidth is not None
    assert link.bandwidth.source == "exchanges"
    assert link.bandwidth.value == pytest.approx(125e6, rel=0.2)


def test_exchanges_that_processors_could_have_taken_are_not_sure() -> None:
    """The last rank finds the messages of the others already there, so 170 KB in 0.1 ms do not prove 14 Gbit/s."""
    for seconds, is_sure in ((1e-4, False), (3e-3, False), (0.1, True)):
        link = PassiveLink()
        for _ in range(40):
            link.add_traffic(
                StepTraffic(seconds=0.2, exchanges=[ObservedExchange(hops=1, num_bytes=170_000, seconds=seconds)]), 1e-5
            )
        assert link.bandwidth is not None
        assert link.bandwidth.is_sure == is_sure, (seconds, link.bandwidth)


def test_messages_that_were_already_there_make_the_link_no_faster() -> None:
    """Recorded with top-k over allgather at 1 Gbit/s: in every fifth step the last rank waits for 50 us only."""
    chance, network, link = random.Random(0), NoisyNetwork(rate=125e6, latency_s=1e-4), PassiveLink()
    for step in range(40):
        seconds = 5e-5 if step % 5 == 4 else 800_000 / 125e6 * chance.uniform(1, 2)
        exchange = ObservedExchange(hops=1, num_bytes=800_000, seconds=seconds)
        link.add_traffic(replace(network.step(), bursts={}, pair_rate={}, exchanges=[exchange]), 1e-4)
        if step >= 4:
            assert link.bandwidth is not None
            assert link.bandwidth.value <= 1.1 * 125e6, step
            assert not link.bandwidth.is_sure


def test_steps_with_few_bursts_count_together_whatever_their_exchanges_take() -> None:
    network, link = NoisyNetwork(rate=125e6, latency_s=1e-3, step_s=0.3), PassiveLink()
    for rate in (125e6, 62.5e6):
        network.rate = rate
        for step in range(60):
            seen = network.step()
            few = {step % WORLD: seen.bursts[step % WORLD][:1]} if step % 2 else {}
            # The plan alternates, and the exchanges of each plan would give another rate.
            exchange = ObservedExchange(hops=1, num_bytes=1e5, seconds=1e-4 if step // 16 % 2 else 0.1)
            link.add_traffic(replace(seen, bursts=few, pair_rate={}, exchanges=[exchange]), 1e-3)
    assert link.num_changes == 1
    assert link.bandwidth is not None
    assert link.bandwidth.source == "bursts"


def test_nothing_seen_is_no_estimate() -> None:
    link = PassiveLink()
    link.add_traffic(StepTraffic(seconds=1.0), 1e-3)
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
    assert link.bandwidth.value == pytest.approx(network.rate, rel=0.15 if has_mesh else 0.2)


def _far_slower(rates: Sequence[float], *, latency_s: float = 1e-3, exchange_s: float = 0.0) -> StepTraffic:
    """Return a step whose bursts came at `rates`, one after the other."""
    return StepTraffic(
        seconds=2.0,
        bursts={rank: [Burst(MIB, MIB / rate) for rate in rates] for rank in range(WORLD)} if rates else {},
        exchanges=[ObservedExchange(hops=6, num_bytes=4 * MIB, seconds=exchange_s)] if exchange_s else [],
        round_trip_s=dict.fromkeys(PAIRS, 2 * latency_s) if rates else {},
    )


@pytest.mark.parametrize("num_before", [0, 4])
def test_a_far_slower_step_is_enough_where_its_bursts_show_why_also_if_it_began_before_the_change(
    num_before: int,
) -> None:
    link = PassiveLink()
    watch(link, NoisyNetwork(rate=125e6, latency_s=1e-3), 20)
    assert link.restart_if_slower(_far_slower([125e6] * num_before + [12.5e6] * 8), 1e-3)
    assert link.num_changes == 1
    assert link.bandwidth is not None
    assert link.bandwidth.value == pytest.approx(12.5e6, rel=0.2)
    watch(link, NoisyNetwork(rate=12.5e6, latency_s=1e-3), 20)
    assert link.num_changes == 1, "what comes next confirms it"
    assert link.bandwidth.value == pytest.approx(12.5e6, rel=0.2)


def test_far_slower_steps_whose_latency_rose_are_enough_but_no_greeting_alone() -> None:
    link = PassiveLink()
    watch(link, NoisyNetwork(rate=125e6, latency_s=1e-3), 20)
    late = _far_slower([125e6] * 8, latency_s=0.02)
    assert not link.restart_if_slower(late, 1e-3)
    link.add_traffic(late, 1e-3)
    assert link.restart_if_slower(late, 1e-3)
    assert link.latency_s is not None
    assert link.latency_s.value == pytest.approx(0.02, rel=0.2)


def test_a_far_slower_step_without_bursts_is_judged_by_its_exchanges() -> None:
    link, network = PassiveLink(), NoisyNetwork(rate=125e6, latency_s=1e-4)
    watch(link, network, 20, has_mesh=False)
    assert not link.restart_if_slower(_far_slower([], exchange_s=4 * MIB / 125e6), 1e-4)
    assert link.restart_if_slower(_far_slower([], exchange_s=4 * MIB / 12.5e6), 1e-4)
    assert link.bandwidth is not None
    assert link.bandwidth.value == pytest.approx(12.5e6, rel=0.2)


@pytest.mark.parametrize(("exchange_s", "is_another"), [(0.6, False), (1.6, True)])
def test_a_mixture_without_bursts_is_judged_by_the_same_exchanges_before(exchange_s: float, is_another: bool) -> None:
    link, exchange = PassiveLink(), ObservedExchange(hops=6, num_bytes=15 * MIB, seconds=0.4)
    usual = StepTraffic(seconds=0.5, exchanges=[exchange], round_trip_s=dict.fromkeys(PAIRS, 2e-4))
    for _ in range(20):
        link.add_traffic(usual, 1e-4)
    slower = replace(usual, seconds=2.0, exchanges=[replace(exchange, seconds=exchange_s)])
    assert link.restart_if_slower(slower, 1e-4) is is_another


def test_a_pause_of_processors_is_no_change_of_the_network() -> None:
    link = PassiveLink()
    watch(link, NoisyNetwork(rate=125e6, latency_s=1e-3), 20)
    assert not link.restart_if_slower(_far_slower([120e6] * 8), 1e-3)
    # Short messages of the mesh make no bursts, and look far slower than the link.
    exchanges = [ObservedExchange(hops=6, num_bytes=25_000, seconds=0.003)]
    short = StepTraffic(seconds=2.0, exchanges=exchanges, round_trip_s=dict.fromkeys(PAIRS, 2e-3))
    assert not link.restart_if_slower(short, 1e-3)
    assert link.num_changes == 0


def test_a_bandwidth_that_falls_while_plans_change_every_second_is_noticed() -> None:
    network, link = NoisyNetwork(rate=12.5e6, latency_s=1e-4, step_s=0.05), PassiveLink()
    plans = itertools.cycle([(25_000, 25_000), (33_000, 33_000), (25_000, 25_000), (264_000,)])
    for rate in (12.5e6, 1.25e6):
        network.rate = rate
        for sizes in itertools.islice(plans, 8):
            for _ in range(16):
                link.add_traffic(network.step(has_mesh=False, sizes=sizes), 1e-4)
    assert link.num_changes == 1
    assert link.bandwidth is not None
    assert link.bandwidth.value == pytest.approx(1.25e6, rel=0.15)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_latency_that_changes_by_2x_is_noticed_within_3_s(factor: float) -> None:
    network, link = NoisyNetwork(rate=125e6, latency_s=0.01), PassiveLink()
    watch(link, network, 40)
    network.latency_s *= factor
    watch(link, network, 6)
    assert link.num_changes == 1
    assert link.latency_s is not None
    assert link.latency_s.value == pytest.approx(network.latency_s, rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
def test_ten_minutes_beside_a_bursty_neighbour_are_no_change(seed: int) -> None:
    network, link = NoisyNetwork(rate=125e6, latency_s=1e-3, seed=seed), PassiveLink()
    chance = random.Random(seed)
    passed_s = 0.0
    while passed_s < 600:
        # The neighbour takes up to half of the link, as fair queues give one more flow, for up to 2 s every 5 to 15 s.
        for steps, share in ((chance.randint(10, 30), 0.0), (chance.randint(1, 4), chance.uniform(0.2, 0.5))):
            network.neighbour = share
            watch(link, network, steps)
            passed_s += steps * network.step_s
    assert link.num_changes == 0


def test_a_first_greeting_that_waited_in_a_queue_is_no_change() -> None:
    network, link = NoisyNetwork(rate=25e6, latency_s=5e-3), PassiveLink()
    first = network.step()
    link.add_traffic(replace(first, round_trip_s={(0, 1): 44e-3}), 1e-3)
    watch(link, network, 20)
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
        link.add_traffic(StepTraffic(seconds=0.5, round_trip_s=trips), 1e-3)
    assert link.latency_s is not None
    assert link.latency_s.value == 0.01


def test_a_known_rate_stands_but_is_not_sure_while_short_messages_show_little() -> None:
    network, link = NoisyNetwork(rate=125e6, latency_s=1e-3), PassiveLink()
    watch(link, network, 20)
    for seconds in (1e-4, 0.05):
        for _ in range(40):
            # Messages that were already there, or late ones: 3 Gbit/s or 6 Mbit/s.
            short = ObservedExchange(hops=1, num_bytes=40_000, seconds=seconds)
            traffic = StepTraffic(seconds=0.5, exchanges=[short], round_trip_s=network.step().round_trip_s)
            link.add_traffic(traffic, 1e-3)
        if link.num_changes == 0:
            assert link.bandwidth is not None
            assert link.bandwidth.value == pytest.approx(125e6, rel=0.05)
            assert not link.bandwidth.is_sure
    assert link.num_changes == 1, "exchanges of one size that take 500 times as long are another network"


def test_a_faster_link_on_which_messages_no_longer_make_bursts_is_noticed_within_3_s() -> None:
    """At 100 Mbit/s messages of 400 KB fill the link; at 1 Gbit/s they pass within its token bucket."""
    network, link = NoisyNetwork(rate=12.5e6, latency_s=1e-4, step_s=0.1), PassiveLink()
    for _ in range(60):
        exchange = network._exchange(400_000)
        link.add_traffic(replace(network.step(), exchanges=[exchange]), 1e-4)
    assert link.num_changes == 0
    network.rate = 125e6
    # One burst begins on the slow link and ends on the fast one.
    last = {0: [Burst(MIB // 4, MIB / 4 / 12.5e6)]}
    for step in range(30):
        exchange = network._exchange(400_000)
        seen = replace(network.step(), exchanges=[exchange], bursts=last if step == 0 else {}, pair_rate={})
        link.add_traffic(seen, 1e-4)
    assert link.num_changes == 1
    assert link.bandwidth is not None
    assert link.bandwidth.value > 50e6
    assert not link.bandwidth.is_sure


@pytest.mark.parametrize("num_fast", [6, 30])
def test_a_slower_link_on_which_messages_make_their_first_bursts_is_noticed_within_3_s(num_fast: int) -> None:
    link = PassiveLink()
    for rate, num_steps in ((125e6, num_fast), (12.5e6, 3)):
        assert link.num_changes == 0
        exchanges = [ObservedExchange(hops=6, num_bytes=8 * MIB, seconds=6e-3 + 8 * MIB / rate)]
        bursts = {rank: [Burst(MIB, MIB / rate)] * 4 for rank in range(WORLD)} if rate < 1e8 else {}
        trips = dict.fromkeys(PAIRS, 2e-3)
        for _ in range(num_steps):
            link.add_traffic(StepTraffic(seconds=1.0, exchanges=exchanges, bursts=bursts, round_trip_s=trips), 1e-3)
    assert link.num_changes == 1
    assert link.bandwidth is not None
    assert link.bandwidth.value == pytest.approx(12.5e6, rel=0.01)


@pytest.mark.parametrize("slower", [2.5, 3.1, 8.0])
def test_a_drop_that_bursts_and_exchanges_show_is_one_change(slower: float) -> None:
    link = PassiveLink()
    for rate in (125e6, 125e6 / slower):
        exchange = ObservedExchange(hops=6, num_bytes=8 * MIB, seconds=6e-3 + 8 * MIB / rate)
        bursts = {rank: [Burst(MIB, MIB / rate)] * 4 for rank in range(WORLD)}
        for _ in range(100):
            seen = StepTraffic(
                seconds=0.1, exchanges=[exchange], bursts=bursts, round_trip_s=dict.fromkeys(PAIRS, 2e-3)
            )
            link.add_traffic(seen, 1e-3)
    assert link.num_changes == 1


def test_few_bursts_are_not_sure_however_much_they_agree() -> None:
    for num_bursts, is_sure in ((4, False), (11, False), (12, True)):
        link = PassiveLink()
        link.add_traffic(StepTraffic(seconds=0.5, bursts={0: [Burst(MIB, MIB / 125e6)] * num_bursts}), 1e-3)
        assert link.bandwidth is not None
        assert link.bandwidth.value == pytest.approx(125e6)
        assert link.bandwidth.is_sure == is_sure, num_bursts


def test_long_bursts_outweigh_short_ones_whose_time_stamps_bunch() -> None:
    long, short = Burst(6 * MIB, 6 * MIB / 125e6), Burst(2 * MIB, 2 * MIB / 187e6)
    link = PassiveLink()
    for _ in range(10):
        link.add_traffic(StepTraffic(seconds=0.5, bursts={rank: [long] * 3 + [short] for rank in range(WORLD)}), 1e-3)
    assert link.bandwidth is not None
    assert link.bandwidth.value == pytest.approx(125e6)


def test_a_sender_that_gets_no_processor_within_short_messages_is_no_slow_link() -> None:
    """Recorded at 1 Gbit/s: single senders at 0.02 to 0.25 of the link; here one of four mostly waits."""
    chance, link = random.Random(0), PassiveLink()
    for step in range(120):
        pairs = {
            (a, b): 125e6 * (0.24 if chance.random() < (0.4 if a == 1 else 0.7) else 0.03)
            for a, b in itertools.permutations(range(WORLD), 2)
        }
        bursts = {step % WORLD: [Burst(MIB, MIB / (125e6 * chance.uniform(0.85, 1)))]}
        link.add_traffic(StepTraffic(seconds=0.15, bursts=bursts, pair_rate=pairs), 1e-3)
        if step > 40:
            assert link.slow == {}, step
    assert link.bandwidth is not None
    assert link.bandwidth.value == pytest.approx(120e6, rel=0.05)


def test_a_slow_downlink_stays_named_while_only_other_links_show_their_rates() -> None:
    network, link = NoisyNetwork(rate=25e6, latency_s=5e-3), PassiveLink()
    watch(link, network, 20)
    network.slow_down[1] = 0.25
    watch(link, network, 20)
    assert link.slow.keys() == {1}
    changes = link.num_changes
    for step in range(60):
        # Another plan: messages are so short that few ranks have bursts, and never the slow one.
        seen = network.step()
        few = {rank: seen.bursts[rank][:2] for rank in (0, 2 + step % 2)}
        link.add_traffic(replace(seen, bursts=few, pair_rate={}), 1e-3)
        assert link.slow.keys() == {1}, step
    assert link.num_changes == changes
    network.slow_down.clear()
    watch(link, network, 20)
    assert link.slow == {}


def test_a_link_is_named_slow_if_it_is_the_only_one_that_messages_fill_after_a_change() -> None:
    network, link = NoisyNetwork(rate=25e6, latency_s=5e-3), PassiveLink()
    watch(link, network, 20)
    network.slow_down[1] = 0.25
    for _ in range(20):
        seen = network.step()
        link.add_traffic(replace(seen, bursts={1: seen.bursts[1]}, pair_rate={}), 1e-3)
    assert link.num_changes >= 1
    assert link.slow.keys() == {1}
    assert link.bandwidth is not None
    assert link.bandwidth.value == pytest.approx(6.25e6, rel=0.1)


def test_a_drop_of_all_links_names_nobody_slow_for_long() -> None:
    network, link = NoisyNetwork(rate=125e6, latency_s=1e-3), PassiveLink()
    watch(link, network, 20)
    network.rate /= 10
    watch(link, network, 10)
    assert link.num_changes == 1
    assert link.slow == {}
    # Short messages on a link that has recovered: two ranks show its rate, and the others' old ones name nobody.
    network.rate *= 10
    for _ in range(20):
        seen = network.step()
        link.add_traffic(replace(seen, bursts={rank: seen.bursts[rank] for rank in (0, 1)}, pair_rate={}), 1e-3)
        assert link.slow == {}


def test_exchanges_that_wait_for_processors_are_no_change_off_the_mesh_either() -> None:
    """1.2 MB between ranks of one machine take 0.3 ms, and 1.5 while another program takes processors."""
    link, random_ = PassiveLink(), random.Random(0)
    for step in range(2000):
        is_busy = step % 1000 > 500
        seconds = (1e-3 if is_busy else 2e-4) + random_.expovariate(1 / (5e-4 if is_busy else 1e-4))
        exchange = ObservedExchange(hops=2, num_bytes=1_200_000, seconds=seconds)
        link.add_traffic(StepTraffic(seconds=0.006, exchanges=[exchange]), 5e-5)
    assert link.num_changes == 0
