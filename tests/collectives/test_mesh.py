"""Messages between ranks, over TCP and through shared memory: their arrival, and the errors when they do not arrive."""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.meshes import OVER, TIMEOUT_S, TOKEN, close_all, connect_meshes, in_threads, make_message, seal
from support.ranks import run_ranks

from cgx_ray.collectives.transport.tcp import connect_mesh, connect_mesh_by_store, node_address
from cgx_ray.errors import ConfigError, TransportError
from cgx_ray.runtime_ext.mesh import SEALED_BYTES, Mesh

# Takes a peer (-1: all) and arrivals (stamp, bytes); returns the bytes per second of its bursts.
Meter = Callable[[int, list[tuple[float, int]]], list[float]]


@settings(max_examples=25, deadline=None)
@given(
    world_size=st.integers(1, 5),
    num_streams=st.integers(1, 3),
    # The ring of bytes between two ranks holds 262,144 bytes, and 16 bytes go before each part.
    sizes=st.lists(st.sampled_from([0, 1, 7, 1000, 65_536, 262_128, 262_129, 1_100_001]), min_size=1, max_size=6),
    shares=st.lists(st.booleans(), min_size=5, max_size=5),
    is_sealed=st.booleans(),
)
def test_every_message_arrives_in_order_and_whole(
    world_size: int, num_streams: int, sizes: list[int], shares: list[bool], is_sealed: bool
) -> None:
    sharers = [rank for rank in range(world_size) if shares[rank]]
    if is_sealed:
        sizes = [max(size, SEALED_BYTES) for size in sizes]
    meshes = connect_meshes(world_size, num_streams, sharers if len(sharers) > 1 else ())

    def exchange_all(rank: int) -> list[tuple[int, int]]:
        wrong = []
        peers = [peer for peer in range(world_size) if peer != rank]
        received = [{peer: torch.zeros(size, dtype=torch.uint8) for peer in peers} for size in sizes]
        # All messages are under way at once.
        tickets = [
            meshes[rank].post(
                {peer: make_message(rank, peer, n, size) for peer in peers}, received[n], is_sealed=is_sealed
            )
            for n, size in enumerate(sizes)
        ]
        for n, ticket in enumerate(tickets):
            meshes[rank].wait(ticket, TIMEOUT_S)
            for peer in peers:
                expected = make_message(peer, rank, n, sizes[n])
                if is_sealed:
                    seal(expected)
                wrong += [(peer, n)] * (not torch.equal(received[n][peer], expected))
        return wrong

    results = in_threads([lambda r=rank: exchange_all(r) for rank in range(world_size)])
    close_all(meshes)
    assert results == [[]] * world_size, f"(sender, number) of wrong messages by rank: {results}"


@pytest.mark.parametrize("sharers", [(), (0, 1)], ids=["tcp", "rings"])
def test_a_message_that_no_buffer_holds_arrives_although_the_receiver_comes_late(sharers: Sequence[int]) -> None:
    meshes = connect_meshes(2, 1, sharers)
    sent = make_message(0, 1, 0, 40_000_000)
    received = torch.zeros_like(sent)

    def receive() -> None:
        time.sleep(0.3)
        meshes[1].wait(meshes[1].post({}, {0: received}), TIMEOUT_S)

    results = in_threads([lambda: meshes[0].wait(meshes[0].post({1: sent}, {}), TIMEOUT_S), receive])
    close_all(meshes)
    assert results == [[0.0, 0.0], None]
    assert torch.equal(received, sent)


@pytest.mark.parametrize("sharers", [(), (0, 1)], ids=["tcp", "rings"])
def test_messages_move_while_nobody_waits_for_them(sharers: Sequence[int]) -> None:
    meshes = connect_meshes(2, 1, sharers)
    sent, received = make_message(0, 1, 0, 5_000_000), torch.zeros(5_000_000, dtype=torch.uint8)
    tickets = meshes[0].post({1: sent}, {}), meshes[1].post({}, {0: received})
    deadline = time.monotonic() + TIMEOUT_S
    while not torch.equal(received, sent) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert torch.equal(received, sent)
    for mesh, ticket in zip(meshes, tickets, strict=True):
        mesh.wait(ticket, TIMEOUT_S)
    close_all(meshes)


@OVER
def test_a_time_out_names_the_ranks_that_did_not_answer_and_no_other(sharers: Sequence[int]) -> None:
    meshes = connect_meshes(4, 1, sharers)
    buffers = {peer: torch.zeros(10, dtype=torch.uint8) for peer in (1, 2, 3)}
    sent = torch.zeros(10, dtype=torch.uint8)
    meshes[2].post({0: sent}, {})
    with pytest.raises(RuntimeError, match=r"^rank 1, rank 3 did not answer within 300 ms$"):
        meshes[0].wait(meshes[0].post({}, buffers), 0.3)
    with pytest.raises(RuntimeError, match="closed"):
        meshes[0].post({}, buffers)
    close_all(meshes)


@OVER
def test_a_rank_that_hangs_up_is_named_at_once(sharers: Sequence[int]) -> None:
    meshes = connect_meshes(4, 1, sharers)
    buffer = torch.zeros(10, dtype=torch.uint8)
    ticket = meshes[0].post({}, {2: buffer})
    meshes[2].close()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 2 hung up"):
        meshes[0].wait(ticket, TIMEOUT_S)
    assert time.monotonic() - start < TIMEOUT_S, "it waited for the time-out"
    close_all(meshes)


@pytest.mark.parametrize("sharers", [(), (0, 1)], ids=["tcp", "rings"])
def test_threads_may_hang_up_at_the_same_time(sharers: Sequence[int]) -> None:
    for _ in range(20):
        meshes = connect_meshes(2, 1, sharers)
        together = threading.Barrier(4)

        def close(mesh: Mesh, together: threading.Barrier = together) -> None:
            together.wait()
            mesh.close()

        assert in_threads([lambda m=mesh: close(m) for mesh in meshes for _ in range(2)]) == [None] * 4


def test_what_a_rank_sent_before_it_hung_up_still_arrives() -> None:
    meshes = connect_meshes(2, 1, (0, 1))
    sent, received = make_message(0, 1, 0, 1000), torch.zeros(1000, dtype=torch.uint8)
    meshes[0].wait(meshes[0].post({1: sent}, {}), TIMEOUT_S)
    meshes[0].close()
    meshes[1].wait(meshes[1].post({}, {0: received}), TIMEOUT_S)
    assert torch.equal(received, sent)
    with pytest.raises(RuntimeError, match="rank 0 hung up"):
        meshes[1].wait(meshes[1].post({}, {0: received}), TIMEOUT_S)
    close_all(meshes)


@pytest.mark.parametrize("sharers", [(), (0, 1)], ids=["tcp", "rings"])
@pytest.mark.parametrize("num_bytes", [0, 9, 11])
def test_a_message_of_another_size_is_refused(num_bytes: int, sharers: Sequence[int]) -> None:
    meshes = connect_meshes(2, 1, sharers)
    meshes[1].post({0: torch.zeros(num_bytes, dtype=torch.uint8)}, {})
    with pytest.raises(RuntimeError, match="rank 1 sent another message than the one of 10 bytes"):
        meshes[0].wait(meshes[0].post({}, {1: torch.zeros(10, dtype=torch.uint8)}), TIMEOUT_S)
    close_all(meshes)


HELLO = b"cgx3" + struct.pack("<3I", 1, 0, 1)  # rank, connection, number of connections; then the token


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\n\r\n", b"cgx3" + bytes(28), HELLO + bytes(16)])
def test_strangers_are_hung_up_on_and_do_not_stand_in_the_way(says: bytes) -> None:
    meshes = [Mesh(rank, 2, 1, "127.0.0.1", TOKEN) for rank in range(2)]
    addresses = [(mesh.address, mesh.port) for mesh in meshes]
    with socket.create_connection(addresses[0]) as stranger:
        stranger.sendall(says)
        assert in_threads([lambda m=mesh: m.connect(addresses, TIMEOUT_S) for mesh in meshes]) == [None, None]
        stranger.settimeout(TIMEOUT_S)
        try:
            answer = stranger.recv(100)
        except ConnectionResetError:
            answer = b""
        assert answer == b"", "a stranger got an answer"
    close_all(meshes)


@pytest.mark.parametrize(("far_s", "expected"), [(0.0, 3), (60.0, 1)])
def test_several_connections_go_only_to_ranks_that_are_far(far_s: float, expected: int) -> None:
    meshes = [Mesh(rank, 2, 3, "127.0.0.1", TOKEN, far_s) for rank in range(2)]
    addresses = [(mesh.address, mesh.port) for mesh in meshes]
    assert in_threads([lambda m=mesh: m.connect(addresses, TIMEOUT_S) for mesh in meshes]) == [None, None]
    ports = [connection.laddr.port for connection in psutil.Process().net_connections("tcp4")]
    close_all(meshes)
    assert ports.count(meshes[0].port) == expected, f"connections that rank 0 accepted: {ports.count(meshes[0].port)}"


def test_ranks_of_another_run_are_not_let_in() -> None:
    ours, theirs = Mesh(0, 2, 1, "127.0.0.1", TOKEN), Mesh(1, 2, 1, "127.0.0.1", TOKEN[::-1])
    addresses = [("127.0.0.1", ours.port), ("127.0.0.1", theirs.port)]
    said = in_threads([lambda: ours.connect(addresses, 1.0), lambda: theirs.connect(addresses, 5.0)])
    assert said == ["ranks that did not connect: 1", "rank 0 at 127.0.0.1 did not answer"]


def _connect_where_two_cannot_reach_each_other(rank: int) -> str:
    connect = Mesh.connect

    def refuse(mesh: Mesh, *args: Any) -> None:
        connect(mesh, *args)
        raise RuntimeError(f"cannot reach rank {2 - rank}")

    with pytest.MonkeyPatch.context() as patch:
        if rank != 1:
            patch.setattr(Mesh, "connect", refuse)
        with pytest.raises(TransportError) as error:
            connect_mesh(dist.group.WORLD, TIMEOUT_S)
    return str(error.value)


@pytest.mark.fault("two ranks cannot reach each other", "all ranks name the pair, within a minute")
def test_all_ranks_say_which_cannot_reach_each_other() -> None:
    """Rank 1, which reaches both, must not wait for them until the time-out of the group."""
    for message in run_ranks(3, _connect_where_two_cannot_reach_each_other):
        assert re.match(
            r"rank 0 at \S+ cannot connect to the others \(cannot reach rank 2\); "
            r"rank 2 at \S+ cannot connect to the others \(cannot reach rank 0\); let TCP through",
            message,
        )


def test_meeting_by_a_store_leaves_no_secret_there_and_what_gloo_keeps_in_it() -> None:
    store = dist.HashStore()
    groups = in_threads([lambda r=rank: dist.ProcessGroupGloo(store, r, 2) for rank in range(2)])
    of_gloo = {key: store.get(key) for key in store.list_keys()}
    assert {"0/0", "0/1"} <= set(of_gloo), f"Gloo's keys are others now: {sorted(of_gloo)}"
    meshes = in_threads([lambda r=rank: connect_mesh_by_store(store, r, 2, TIMEOUT_S) for rank in range(2)])
    sent, received = torch.arange(10), torch.zeros(10, dtype=torch.long)
    tickets = meshes[0].post({1: sent}, {}), meshes[1].post({}, {0: received})
    in_threads([lambda m=mesh, t=ticket: m.wait(t, TIMEOUT_S) for mesh, ticket in zip(meshes, tickets, strict=True)])
    close_all(meshes)
    assert torch.equal(received, sent)
    assert {key: store.get(key) for key in of_gloo} == of_gloo
    ours = {key: store.get(key) for key in store.list_keys() if key not in of_gloo}
    # The values of the last round: no error, and rank 0 is the first rank that shares memory.
    assert sorted(ours.values()) == [b"[null, 0]"] * 2, ours
    del groups


def test_it_listens_on_its_own_address_only() -> None:
    mesh = Mesh(0, 2, 1, "127.0.0.1", TOKEN)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", mesh.port), timeout=TIMEOUT_S)
    with pytest.raises(RuntimeError, match=r"cannot listen on 192\.0\.2\.1"):
        Mesh(0, 2, 1, "192.0.2.1", TOKEN)
    with pytest.raises(RuntimeError, match="'localhost' is not a numeric IP address"):
        Mesh(0, 2, 1, "localhost", TOKEN)


@pytest.mark.parametrize("names", ["lo", "lo,lo", "no-such-card,lo", ",lo,"])
def test_the_first_of_several_interfaces_that_has_an_address_is_taken(
    names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    assert node_address() == "127.0.0.1"


def test_interfaces_without_an_address_are_named_beside_those_that_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-card,nor-this")
    with pytest.raises(ConfigError, match=r"'no-such-card,nor-this', which has no IP address here; these do: .*\blo\b"):
        node_address()


def _exchange_then_die(rank: int, folder: Path, shared_memory: bool) -> None:
    mesh = connect_mesh(dist.group.WORLD, TIMEOUT_S, num_streams=2, shared_memory=shared_memory)
    peers = [peer for peer in range(3) if peer != rank]
    buffers = {peer: torch.zeros(100_000, dtype=torch.uint8) for peer in peers}
    sent = torch.full((100_000,), rank, dtype=torch.uint8)
    mesh.wait(mesh.post(dict.fromkeys(peers, sent), buffers), TIMEOUT_S)
    assert all(bool((buffer == peer).all()) for peer, buffer in buffers.items())
    if rank == 1:
        if os.fork() == 0:
            # Like a worker of a DataLoader, which does not notice its parent's end.
            del mesh
            (folder / "child").write_text(str(os.getpid()))
            time.sleep(2 * TIMEOUT_S)
            os._exit(0)
        while not (folder / "child").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        mesh.wait(mesh.post({}, {1: buffers[1]}), TIMEOUT_S)
    except RuntimeError as error:
        (folder / f"rank{rank}").write_text(str(error))


@pytest.mark.fault("SIGKILL of a rank that has forked a child", "named all the same")
@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_killed_process_that_leaves_a_forked_child_is_named_by_the_others(
    shared_memory: bool, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="rank 1 ended with exit code -9"):
        run_ranks(3, _exchange_then_die, tmp_path, shared_memory)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    for rank in (0, 2):
        assert "rank 1 hung up" in (tmp_path / f"rank{rank}").read_text()


@pytest.fixture(scope="session")
def meter(tmp_path_factory: pytest.TempPathFactory) -> Meter:
    """Return a function that feeds stamps to a meter: the kernel takes its own from a clock that tests cannot set."""
    folder = tmp_path_factory.mktemp("meter")
    (folder / "meter.cpp").write_text("""
        #include <cstdio>
        #include <cstdlib>
        #include "arrivals.h"
        int main(int, char** argv) {
            cgx::ArrivalMeter meter(atoi(argv[1]));
            std::vector<cgx::Burst> bursts;
            double at;
            long num_bytes;
            int edges, settles;  // edges: 1 a message begins, 2 ends, 3 both
            while (scanf("%lf %ld %d %d", &at, &num_bytes, &edges, &settles) == 4) {
                meter.add(at, num_bytes, edges & 1, edges & 2);
                if (settles) meter.settle(bursts);
            }
            for (const cgx::Burst& burst : bursts) printf("%.3f\\n", burst.num_bytes / burst.seconds);
        }
    """)
    include = Path(__file__).resolve().parents[2] / "runtime_ext/csrc/net"
    program = str(folder / "meter")
    subprocess.run(["g++", "-std=c++20", f"-I{include}", f"{program}.cpp", "-o", program], check=True)

    def rates(peer: int, arrivals: list[tuple[float, int]], reads: list[tuple[int, bool]] | None = None) -> list[float]:
        """`reads`: by arrival, its edges, and True if all is read then; left out: one message, always read at once."""
        reads = reads or [(int(index == 0), True) for index in range(len(arrivals))]
        stamps = "\n".join(
            f"{at:.9f} {num_bytes} {edges} {settles:d}"
            for (at, num_bytes), (edges, settles) in zip(arrivals, reads, strict=True)
        )
        done = subprocess.run([program, str(peer)], input=stamps, check=True, capture_output=True, text=True)
        return [float(line) for line in done.stdout.split()]

    return rates


def test_rates_are_metered_again_after_the_clock_was_set_back(meter: Meter) -> None:
    rates = meter(0, [(start + 1e-3 * i, 65536) for start in (1000.0, 900.0) for i in range(200)])
    assert rates == pytest.approx([65.536e6] * len(rates))
    assert len(rates) >= 6, "3 before, 3 after"


@pytest.mark.parametrize("rate", [12.5e6, 62.5e6, 250e6])
def test_pauses_within_messages_do_not_hide_the_rate_at_which_all_of_them_come(meter: Meter, rate: float) -> None:
    """One message in trains of 1 MB, as from a TCP window smaller than the path, or from a sender that encodes."""
    arrivals = [
        (1000.0 + train * (1e6 / rate + 0.1) + num_bytes / rate, 1 << 14)
        for train in range(20)
        for num_bytes in range(1 << 14, 1_000_000, 1 << 14)
    ]
    found = meter(-1, arrivals)
    assert len(found) >= 3
    assert found == pytest.approx([rate] * len(found), rel=0.02)
    assert min(meter(0, arrivals)) < 0.7 * rate, "of one peer: in the pauses its neighbours had the link"


@pytest.mark.parametrize("pause_s", [0.0, 0.002, 0.01])
@pytest.mark.parametrize("late_s", [5e-4, 0.004, 0.01, 0.02])
def test_a_reader_that_is_late_makes_the_link_neither_faster_nor_slower(
    meter: Meter, pause_s: float, late_s: float
) -> None:
    """Messages of 16 MB with pauses between them, read every `late_s`."""
    at_s, due_s, arrivals, reads = 1000.0, 1000.0, [], []
    for _ in range(30):
        pieces = range(256)
        for piece in pieces:
            at_s += (1 << 16) / 125e6
            arrivals.append((at_s, 1 << 16))
            reads.append(((piece == 0) + 2 * (piece == pieces[-1]), at_s >= due_s))
            if at_s >= due_s:
                due_s = at_s + late_s
        at_s += pause_s
    found = sorted(meter(-1, arrivals, reads))
    assert len(found) >= 3
    assert found[-1] <= 125e6 * 1.01
    assert found[len(found) // 2] >= 125e6 * 0.97, found


def test_short_messages_on_an_idle_link_are_no_slow_link(meter: Meter) -> None:
    """Messages of 64 KiB with 0.7 ms between them take a fifth of a link that carries each in 0.05 ms."""
    arrivals = [(1000.0 + 0.75e-3 * (i // 4) + 1.25e-5 * (i % 4), 1 << 14) for i in range(4000)]
    reads = [((i % 4 == 0) + 2 * (i % 4 == 3), True) for i in range(4000)]
    assert meter(-1, arrivals, reads) == []


def test_a_sender_that_waits_within_messages_makes_the_link_no_slower(meter: Meter) -> None:
    """In messages of 4 MB every eighth piece comes 1.2 ms late, as its sender got no processor."""
    at_s, arrivals, reads = 1000.0, [], []
    for piece in range(64 * 20):
        at_s += (1 << 16) / 125e6 + (1.2e-3 if piece % 8 == 7 else 0)
        arrivals.append((at_s, 1 << 16))
        reads.append(((piece % 64 == 0) + 2 * (piece % 64 == 63), True))
    found = meter(-1, arrivals, reads)
    assert len(found) >= 3
    assert found == pytest.approx([125e6] * len(found), rel=0.02)


def test_a_time_stamp_that_is_3_ms_late_changes_a_burst_by_15_percent_at_most(meter: Meter) -> None:
    """At 1 Gbit/s every 40 pieces the first stamps are late, so that the next burst seems to begin late."""
    arrivals = []
    for piece in range(4000):
        due_s = 1000.0 + piece * (1 << 16) / 125e6
        late_s = max(0.0, 3e-3 - piece % 40 * (1 << 16) / 125e6)
        arrivals.append((due_s + late_s, 1 << 16))
    found = meter(-1, arrivals)
    assert len(found) >= 3
    assert max(found) <= 1.15 * 125e6, found
