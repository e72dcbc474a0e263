"""Active probes over real sockets: what they find, what they cost, and that no node is probed twice at once."""

from __future__ import annotations

import errno
import itertools
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest
from support.strangers import honest_rate

from cgx_ray.lab.namespaces import Lab
from cgx_ray.monitors import probe
from cgx_ray.monitors.guarded_server import WELCOME, Address, connect
from cgx_ray.monitors.probe import (
    BulkServer,
    Prober,
    count_hops,
    measure_tcp,
)
from cgx_ray.monitors.probe_schedule import BUDGET_S, ProbeSchedule, budget_bytes, rounds
from cgx_ray.monitors.sample import Bandwidth

HOST = "127.0.0.1"


@pytest.fixture
def bulk() -> Iterator[BulkServer]:
    server = BulkServer(HOST)
    yield server
    server.close()


@pytest.mark.parametrize("num_nodes", [0, 1, 2, 3, 4, 7, 16])
def test_rounds_have_every_pair_once_and_no_node_twice_at_a_time(num_nodes: int) -> None:
    schedule = rounds(num_nodes)
    assert sorted(itertools.chain(*schedule)) == sorted(itertools.permutations(range(num_nodes), 2))
    for pairs in schedule:
        nodes = list(itertools.chain(*pairs))
        assert len(nodes) == len(set(nodes)), pairs


def test_a_probe_a_minute_costs_1_percent_of_the_link() -> None:
    for bytes_per_s in (12.5e6, 125e6, 1.25e9):
        assert budget_bytes(bytes_per_s) <= 0.01 * 60 * bytes_per_s
    assert budget_bytes(None) == budget_bytes(12.5e6)


@pytest.mark.parametrize("mbit_per_s", [4, 10, 15, 50, 100, 1000, 10_000])
@pytest.mark.parametrize("least_bytes", [200_000, 500_000])
def test_all_probes_of_a_minute_keep_to_the_budget(
    mbit_per_s: int, least_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rate needs at least `least_bytes`; long paths need more than short ones."""
    sent: list[int] = []
    rate = mbit_per_s * 125e3

    def send(host: str, port: int, token: str, num_bytes: int) -> Bandwidth:
        sent.append(num_bytes)
        return Bandwidth(bytes_per_s=rate if num_bytes >= least_bytes else 0.0)

    monkeypatch.setattr(probe, "_send_bulk", send)
    left, found = probe.measure_bulk(Address(HOST, 1, ""))
    assert [one.bytes_per_s for one in found] == [rate] * (2 if left else 1)
    # If a rate needs half a megabyte, it cannot be measured with less.
    allowed = max(budget_bytes(rate), (1 << 18) + ((1 << 19) if least_bytes > 1 << 18 else 0))
    assert sum(sent) + left // 3 <= allowed, sent


@pytest.mark.parametrize(("rates", "expected"), [((90.0, 110.0), 100.0), ((100.0, 150.0), 100.0), ((120.0,), 120.0)])
def test_of_two_probes_that_differ_much_the_slower_one_counts(
    rates: tuple[float, ...], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Bandwidth(bytes_per_s=rate, sent=rate, received=2 * rate) for rate in rates]
    monkeypatch.setattr(probe, "measure_bulk", lambda bulk: (0, found))
    beside = probe.measure_beside_training(Address(HOST, 1, ""))
    assert beside.bytes_per_s == expected
    assert (beside.sent, beside.received) == (sum(rates) / len(rates), 2 * sum(rates) / len(rates))


@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5, 8])
def test_in_two_hours_no_node_takes_part_in_two_probes_a_minute_and_every_way_has_its_turn(num_nodes: int) -> None:
    schedule, nodes = ProbeSchedule(), "abcdefgh"[:num_nodes]
    # Each node asks twice per second, with its own offset.
    asks = sorted((tick / 2 + index / 20, node) for tick in range(14400) for index, node in enumerate(nodes))
    begun = [(s, source, target) for s, source in asks if (target := schedule.grant(source, nodes, s)) is not None]
    seconds = {
        node: ([s for s, *ends in begun if node in ends], [s for s, source, _ in begun if node == source])
        for node in nodes
    }
    for node, (taking_part, sending) in seconds.items():
        receiving = [s for s in taking_part if s not in sending]
        assert taking_part[0] >= BUDGET_S, node
        assert min(after - before for before, after in itertools.pairwise(taking_part)) >= BUDGET_S, node
        for times in (sending, receiving):
            longest = max(after - before for before, after in itertools.pairwise(times))
            assert longest <= (3 if num_nodes % 2 == 0 else 5) * (BUDGET_S + 1), (node, longest)
    turns = Counter((source, target) for _, source, target in begun)
    assert turns.keys() == set(itertools.permutations(nodes, 2))
    assert max(turns.values()) - min(turns.values()) <= 1, turns


def test_who_is_alone_or_left_probes_nobody() -> None:
    schedule = ProbeSchedule()
    assert [schedule.grant("a", ["a"], s) for s in (0.0, 60.0, 120.0)] == [None] * 3
    assert (schedule.grant("b", "ab", 180.0), schedule.grant("a", "ab", 180.0)) == (None, "b")
    assert schedule.grant("a", "ab", 240.0) is None, "b sends next"
    assert schedule.grant("b", "b", 241.0) is None, "to one that has left"
    assert schedule.grant("a", "", 400.0) is None, "nobody answers"


def test_the_rate_is_that_of_the_fast_windows_after_the_queues_have_run_empty() -> None:
    # 128 KiB arrive at once, then 10 MB/s with a pause of half a second.
    times_s = [1e-6 * i for i in range(2)] + [0.001 * i for i in range(1, 101)] + [0.6 + 0.001 * i for i in range(100)]
    sizes = [1 << 16] * 2 + [10_000] * 200
    assert probe._fast_rate(list(zip(times_s, sizes, strict=True))) == pytest.approx(10e6, rel=0.06)
    assert probe._fast_rate([]) == 0.0
    assert probe._fast_rate([(1.0, 1 << 20)]) == 0.0


def test_a_window_smaller_than_the_path_does_not_hide_the_rate_of_the_link() -> None:
    # TCP's slow start at 100 Mbit/s with a round trip of 100 ms: ten packets of 9,000 bytes, then twice as many, ...
    arrivals = [(0.1 * turn + 9000 * packet / 12.5e6, 9000) for turn in range(4) for packet in range(10 << turn)]
    assert sum(num_bytes for _, num_bytes in arrivals) / arrivals[-1][0] < 4e6
    assert probe._fast_rate(arrivals) == pytest.approx(12.5e6, rel=0.01)


def test_whole_trains_of_a_slow_start_are_no_rate() -> None:
    # 256 KiB over a round trip of 100 ms, read by a busy receiver: each train has one time stamp.
    sizes = [14_480, 28_960, 57_920, 115_840, 44_944]
    assert sum(sizes) == 1 << 18
    assert probe._fast_rate([(0.1 * turn, size) for turn, size in enumerate(sizes)]) == 0.0


def test_probes_into_one_node_take_turns(bulk: BulkServer) -> None:
    under_way = threading.Semaphore()
    found: list[float] = []

    def measure() -> None:
        with connect(*bulk.address, timeout_s=20) as client:
            assert under_way.acquire(blocking=False), "two have their turn"
            client.sendall(bytes(20_000_000))
            # The next one has its turn at once when this one is done.
            under_way.release()
            client.shutdown(socket.SHUT_WR)
            found.append(struct.unpack("<dd", client.recv(16, socket.MSG_WAITALL))[0])

    threads = [threading.Thread(target=measure) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(rate > 0 for rate in found), found


def test_a_client_that_vanishes_leaves_the_server_at_work(bulk: BulkServer) -> None:
    with connect(*bulk.address, timeout_s=20) as client:
        client.sendall(bytes(100_000))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closes with a reset
    assert honest_rate(bulk.address) > 0


def test_a_closed_server_refuses_and_one_that_hangs_up_is_an_error(bulk: BulkServer) -> None:
    bulk.close()
    bulk.close()
    with pytest.raises(ConnectionRefusedError):
        measure_tcp(*bulk.address, 1000)

    def hang_up(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client:
            client.sendall(WELCOME)
            while client.recv(1 << 16):
                pass

    with closing(socket.create_server((HOST, 0))) as listener:
        thread = threading.Thread(target=hang_up, args=(listener,))
        thread.start()
        with pytest.raises(ConnectionError, match="hung up"):
            measure_tcp(HOST, listener.getsockname()[1], "", 1000)
        thread.join()


def test_too_little_to_say_a_rate_is_an_error(bulk: BulkServer) -> None:
    with pytest.raises(ConnectionError, match="send more than 131072 bytes"):
        measure_tcp(*bulk.address, 1000)


def test_a_prober_finds_its_way_to_another() -> None:
    here, there = Prober(HOST), Prober(HOST)
    echo, bulk_address = there.addresses()
    way = here.probe(echo, bulk_address, there.start_iperf3(HOST), counts_hops=True)
    here.close()
    there.close()
    assert way.hops == 1
    assert way.tool == "iperf3"
    assert way.bytes_per_s > 0
    assert 0 < way.latency_s < 0.1


def test_where_iperf3_receives_nothing_tcp_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "measure_iperf3", lambda host, port, num_bytes, source: 0.0)
    here, there = Prober(HOST), Prober(HOST)
    way = here.probe(*there.addresses(), (HOST, 1))
    here.close()
    there.close()
    assert way.tool == "tcp"
    assert way.bytes_per_s > 0


def test_a_failed_iperf3_leaves_the_rate_of_tcp(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> float:
        raise OSError("libiperf failed")

    monkeypatch.setattr(probe, "measure_iperf3", fail)
    monkeypatch.setattr(probe, "Iperf3Server", fail)
    here, there = Prober(HOST), Prober(HOST)
    assert there.start_iperf3(HOST) is None
    way = here.probe(*there.addresses(), (HOST, 1))
    here.close()
    there.close()
    assert way.tool == "tcp"
    assert way.bytes_per_s > 0
    assert sum("libiperf failed" in message for message in caplog.messages) == 2, caplog.messages


def test_a_server_that_cannot_accept_for_a_while_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_failures = itertools.count()
    accept = socket.socket.accept

    def fail_twice(listener: socket.socket) -> tuple[socket.socket, object]:
        if next(num_failures) < 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_twice)
    with closing(BulkServer(HOST)) as server:
        assert honest_rate(server.address) > 0
    assert sum("Too many open files" in message for message in caplog.messages) == 1, caplog.messages


def test_hops_to_a_port_where_nobody_listens_are_refused() -> None:
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        assert count_hops(HOST, port) == 1
    with pytest.raises(ConnectionRefusedError):
        count_hops(HOST, port)


@pytest.mark.skipif(Lab.available() is not None, reason=Lab.available() or "")
def test_probes_find_the_rate_of_the_lab() -> None:
    with Lab(2, rate_bit_per_s=1e8) as lab:
        own, address = (host.address for host in lab.hosts)
        server = lab.popen(
            1, [sys.executable, "-c", _SERVE, address, own], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        ports = server.stdout.readline().split()
        client = lab.popen(0, [sys.executable, "-c", _PROBE, address, *ports, own], stdout=subprocess.PIPE, text=True)
        rates = [float(rate) for rate in client.communicate()[0].split()]
        server.communicate("")
    assert len(rates) == 2
    # 1448 of 1514 bytes are payload. Only a busy machine can make the rate lower.
    assert all(0.5 * 0.956e8 < 8 * rate < 1.05 * 0.956e8 for rate in rates), rates


@pytest.mark.skipif(Lab.available() is not None, reason=Lab.available() or "")
def test_a_probe_that_shares_a_link_tells_what_the_card_carries() -> None:
    """Host 2 sends to host 0 all the time, and host 1 probes it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with Lab(3, rate_bit_per_s=1e8) as lab:
        address = lab.hosts[0].address
        server = lab.popen(0, [sys.executable, "-c", _SINK, address], **pipes)
        sink, *bulk = server.stdout.readline().split()
        flood = lab.popen(2, [sys.executable, "-c", _FLOOD, address, sink])
        client = lab.popen(1, [sys.executable, "-c", _PROBE_BESIDE, address, *bulk], stdout=subprocess.PIPE, text=True)
        sent, received = (8 * float(rate) / 0.956e8 for rate in client.communicate()[0].split())
        flood.kill()
        flood.wait()
        server.kill()
        server.communicate()
    assert sent < 0.7
    assert 0.8 < received < 1.05


_SINK = """
import socket, sys
from cgx_ray.monitors.probe import BulkServer
bulk, listener = BulkServer(sys.argv[1]), socket.create_server((sys.argv[1], 0))
print(listener.getsockname()[1], *bulk.address[1:], flush=True)
client, _ = listener.accept()
while client.recv(1 << 16):
    pass
"""
_FLOOD = """
import socket, sys
client = socket.create_connection((sys.argv[1], int(sys.argv[2])))
client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)  # no more under way, so that the probe has its share
while True:
    client.sendall(bytes(1 << 16))
"""
_PROBE_BESIDE = """
import sys, time
from cgx_ray.monitors.probe import measure_tcp
time.sleep(0.5)
found = measure_tcp(sys.argv[1], int(sys.argv[2]), sys.argv[3], 2_500_000)
print(found.sent, found.received)
"""


_SERVE = """
import sys
from cgx_ray.monitors.iperf3_probe import Iperf3Server
from cgx_ray.monitors.probe import BulkServer
bulk, iperf3 = BulkServer(sys.argv[1]), Iperf3Server(*sys.argv[1:])
print(*bulk.address[1:], iperf3.address[1], flush=True)
sys.stdin.read()
"""
_PROBE = """
import sys
from cgx_ray.monitors.iperf3_probe import measure_iperf3
from cgx_ray.monitors.probe import measure_tcp
print(measure_tcp(sys.argv[1], int(sys.argv[2]), sys.argv[3], 7_500_000).bytes_per_s)
print(measure_iperf3(sys.argv[1], int(sys.argv[4]), 7_500_000, sys.argv[5]))
"""
