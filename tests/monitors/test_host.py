"""A node's monitor: its readings of cards, processors and memory, and the traffic that it takes for others'."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.samples import step_sample

from cgx_ray.monitors import host
from cgx_ray.monitors.host import (
    CARDS_HOLD_S,
    CardMeter,
    HostMonitor,
    Neighbours,
    NicBytes,
    NicRates,
    card_with,
    read_nics,
    read_pressure,
)
from cgx_ray.monitors.node_monitor import OwnBytes

HOST = "127.0.0.1"


def test_nic_rates_are_bytes_a_second_of_all_cards_between_two_reads() -> None:
    times_s = iter([10.0, 12.0, 12.0, 16.0])
    counters = iter(
        [
            {"eth0": NicBytes(1000, 100), "eth1": NicBytes(0, 0)},
            {"eth0": NicBytes(3000, 200), "eth1": NicBytes(500, 50)},
            {"eth0": NicBytes(3000, 200), "eth1": NicBytes(500, 50)},
            # eth1 was reset and eth2 is new, so neither counts in this interval.
            {"eth0": NicBytes(3400, 200), "eth1": NicBytes(7, 7), "eth2": NicBytes(10**9, 10**9)},
        ]
    )
    rates = NicRates(clock=lambda: next(times_s), read_nics=lambda: next(counters))
    assert rates.read() == (1250.0, 75.0)
    assert rates.read() == (0.0, 0.0)
    assert rates.read() == (100.0, 0.0)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        ({"eth0": NicBytes(10**9, 10**9), "bond0": NicBytes(2200, 1150)}, (500.0, 250.0)),
        ({"bond0": NicBytes(7, 1150)}, (0.0, 250.0)),
        ({"eth0": NicBytes(10**9, 10**9)}, (0.0, 0.0)),
    ],
    ids=["other cards", "reset", "gone"],
)
def test_a_meter_reads_the_card_with_the_address(
    after: dict[str, NicBytes], expected: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "card_with", {"10.0.0.1": "bond0"}.get)
    counters = iter([{"eth0": NicBytes(0, 0), "bond0": NicBytes(100, 100)}, after])
    times_s = iter([10.0, 14.0])
    meter = CardMeter("10.0.0.1", clock=lambda: next(times_s), read_nics=lambda: next(counters))
    assert meter.read() == pytest.approx(expected)


def test_a_node_whose_cards_cannot_be_read_has_a_meter_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> dict[str, NicBytes]:
        raise PermissionError("no /proc/net/dev")

    monkeypatch.setattr(psutil, "net_if_addrs", refuse)
    assert CardMeter("10.0.0.1", read_nics=refuse).read() == (0.0, 0.0)


def test_loopback_and_unknown_addresses_have_no_card() -> None:
    assert card_with(HOST) is None
    assert card_with("192.0.2.77") is None


def test_a_node_with_nothing_but_loopback_has_no_traffic() -> None:
    times_s = iter([0.0, 1.0])
    assert NicRates(clock=lambda: next(times_s), read_nics=dict).read() == (0.0, 0.0)


def test_loopback_is_left_out_of_this_nodes_cards() -> None:
    loopback = {
        name
        for name, addresses in psutil.net_if_addrs().items()
        if any(address.address == HOST for address in addresses)
    }
    assert loopback
    assert not loopback & read_nics().keys()


def test_a_neighbour_is_what_the_cards_carry_beside_our_own_bytes() -> None:
    neighbours = Neighbours()
    # Steps take 3 s. Their bytes are known at the end, and headers add 5 %.
    for step in range(10):
        for second in range(3):
            found = neighbours.add_interval(1.05e6, 3e6 if second == 2 else 0, 1.0)
        assert found < 0.1e6, (step, found)
    for _ in range(10):
        for second in range(3):
            found = neighbours.add_interval(6.05e6, 3e6 if second == 2 else 0, 1.0)
    assert found == pytest.approx(5e6, rel=0.02)
    assert Neighbours().add_interval(0.0, 0.0, 0.0) == 0.0


def test_neighbours_are_unknown_for_half_a_minute_after_own_bytes_were() -> None:
    neighbours = Neighbours()
    found = [neighbours.add_interval(1e6, None if second == 2 else 0.0, 1.0) for second in range(40)]
    assert found == [1e6, 1e6, *[None] * 30, *[1e6] * 8]


def test_own_bytes_are_those_that_leave_the_node_or_unknown() -> None:
    """Each step sends 1,000 bytes. Ranks of a node that share no memory also count what they send to each other."""
    apart = [replace(step_sample(rank, 0), card_bytes=1000) for rank in (0, 1)]
    sharing = [replace(step, num_local=2) for step in apart]
    assert OwnBytes(has_peers=False).of(sharing) == 0
    alone = OwnBytes(has_peers=True)
    assert [alone.of(apart[:1]), alone.of([])] == [1000, 0]
    together = OwnBytes(has_peers=True)
    steps = [sharing[:1], sharing, [], apart, apart[:1]]
    assert [together.of(some) for some in steps] == [1000, 2000, 0, None, None]


def test_pressure_is_the_share_of_the_last_ten_seconds_or_unknown(tmp_path: Path) -> None:
    (tmp_path / "cpu").write_text("some avg10=25.50 avg60=1.00 avg300=0.00 total=9\nfull avg10=0.00 avg60=0.00\n")
    assert read_pressure("cpu", tmp_path) == 0.255
    assert read_pressure("memory", tmp_path) is None


def test_a_monitor_asks_for_the_cards_every_ten_seconds_and_for_their_bytes_at_each_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    asked_s: list[float] = []
    speeds = {"eth0": 1e9}

    def read_speeds() -> dict[str, float]:
        asked_s.append(now_s)
        return dict(speeds)

    def count(cards: Collection[str]) -> dict[str, NicBytes]:
        return {name: NicBytes(int(1000 * now_s), 0) for name in cards}

    monkeypatch.setattr(host, "_speeds", read_speeds)
    monkeypatch.setattr(host, "_counters", count)
    monitor = HostMonitor(clock=lambda: now_s)
    speeds["eth1"] = 2e9
    loads = []
    for second in range(1, 13):
        now_s = float(second)
        loads.append(monitor.read(0))
    assert asked_s == [0.0, CARDS_HOLD_S]
    # A new card counts from the second interval on.
    assert [load.sent_bytes_per_s for load in loads] == [1000.0] * 10 + [2000.0] * 2
    assert [load.nic_speed_bits_per_s for load in loads] == [1e9] * 9 + [2e9] * 3


def test_a_host_is_within_its_bounds() -> None:
    load = HostMonitor().read(0)
    assert 0 <= load.cpu_share <= 1, load
    assert 0 < load.memory_share <= 1, load
    assert all(0 <= share <= 1 for share in load.pressure.values()), load
