"""Several exchanges under way on one mesh: channels, messages that come early, and waiting for any of them."""

from __future__ import annotations

import math
import os
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.meshes import TIMEOUT_S, TOKEN, close_all, connect_meshes, in_threads, make_message
from support.ranks import run_ranks
from support.shared_memory import connect
from torch import Tensor

from cgx_ray.collectives import Transport
from cgx_ray.runtime_ext.mesh import NUM_CHANNELS, Mesh

SIZES = [0, 1, 4097, 1 << 20]
# Number of connections to each rank, and the ranks that share memory.
OVER = pytest.mark.parametrize(
    ("num_streams", "sharers"), [(1, ()), (4, ()), (1, (0, 1))], ids=["tcp", "4 streams", "rings"]
)


def _zeros(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def _finish_all(mesh: Mesh, tickets: set[int]) -> None:
    """Wait for tickets as they come to an end."""
    while tickets:
        over = mesh.wait_any(sorted(tickets), TIMEOUT_S)
        assert over is not None, f"{len(tickets)} messages did not come"
        mesh.wait(over, TIMEOUT_S)
        tickets.remove(over)


@settings(max_examples=40, deadline=None)
@given(
    world_size=st.integers(2, 4),
    num_streams=st.sampled_from([1, 4]),
    messages=st.lists(
        st.tuples(st.sampled_from([0, 1, 2, 3, 4, NUM_CHANNELS - 1]), st.sampled_from([*SIZES, 70_001, 600_001])),
        min_size=1,
        max_size=16,
    ),
    shares=st.lists(st.booleans(), min_size=4, max_size=4),
    seed=st.integers(0, 1 << 32),
)
def test_whatever_the_order_on_each_rank_every_message_meets_its_receive(
    world_size: int, num_streams: int, messages: list[tuple[int, int]], shares: list[bool], seed: int
) -> None:
    sharers = [rank for rank in range(world_size) if shares[rank]]
    meshes = connect_meshes(world_size, num_streams, sharers if len(sharers) > 1 else ())

    def exchange_all(rank: int) -> list[tuple[int, int]]:
        drawn, mesh = random.Random(seed + rank), meshes[rank]
        peers = [peer for peer in range(world_size) if peer != rank]
        received = {(peer, n): _zeros(size) for peer in peers for n, (_, size) in enumerate(messages)}
        # A shuffle of lanes, not of messages: within a channel and a direction the order is the same everywhere.
        lanes = [(peer, channel, is_send) for peer in peers for channel, _ in messages for is_send in (True, False)]
        drawn.shuffle(lanes)
        num_posted: Counter[tuple[int, int, bool]] = Counter()
        tickets: set[int] = set()
        for peer, channel, is_send in lanes:
            of_channel = [n for n, (other, _) in enumerate(messages) if other == channel]
            n = of_channel[num_posted[peer, channel, is_send]]
            num_posted[peer, channel, is_send] += 1
            sends = {peer: make_message(rank, peer, n, messages[n][1])} if is_send else {}
            tickets.add(mesh.post(sends, {} if is_send else {peer: received[peer, n]}, channel))
            if drawn.random() < 0.3 and (over := mesh.wait_any(sorted(tickets), 0.01)) is not None:
                mesh.wait(over, TIMEOUT_S)
                tickets.remove(over)
        _finish_all(mesh, tickets)
        return [k for k, got in received.items() if not torch.equal(got, make_message(k[0], rank, k[1], len(got)))]

    results = in_threads([lambda r=rank: exchange_all(r) for rank in range(world_size)])
    close_all(meshes)
    assert results == [[]] * world_size, f"(sender, number) of wrong messages by rank: {results}"


@OVER
@pytest.mark.parametrize("num_bytes", [*SIZES, 5_000_001])
def test_a_message_that_comes_before_its_receive_is_kept(
    num_streams: int, sharers: Sequence[int], num_bytes: int
) -> None:
    meshes = connect_meshes(2, num_streams, sharers)
    early = [make_message(0, 1, n, num_bytes) for n in range(3)]
    # One connection alone would bring this last; on each of several goes a part of it.
    last, received = make_message(0, 1, 3, 4 << 20), _zeros(4 << 20)
    sent = {meshes[0].post({1: message}, {}, channel) for message, channel in zip(early, (5, 6, 5), strict=True)}
    sent.add(meshes[0].post({1: last}, {}, 7))
    ticket = meshes[1].post({}, {0: received}, 7)
    in_threads([lambda: _finish_all(meshes[0], sent), lambda: meshes[1].wait(ticket, TIMEOUT_S)])
    assert torch.equal(received, last)
    kept = [_zeros(num_bytes) for _ in early]
    tickets = {meshes[1].post({}, {0: kept[n]}, channel) for n, channel in ((1, 6), (0, 5), (2, 5))}
    _finish_all(meshes[1], tickets)
    close_all(meshes)
    assert [torch.equal(*pair) for pair in zip(kept, early, strict=True)] == [True] * 3


@OVER
@pytest.mark.parametrize("channels", [(0, 0), (3, 3), (3, 4)])
def test_two_ranks_that_both_send_first_what_no_buffer_holds_do_not_block_each_other(
    num_streams: int, sharers: Sequence[int], channels: tuple[int, int]
) -> None:
    meshes = connect_meshes(2, num_streams, sharers)
    received = [_zeros(20_000_000) for _ in range(2)]

    def send_then_receive(rank: int) -> None:
        mesh, peer = meshes[rank], 1 - rank
        mesh.wait(mesh.post({peer: make_message(rank, peer, 0, 20_000_000)}, {}, channels[rank]), TIMEOUT_S)
        mesh.wait(mesh.post({}, {peer: received[rank]}, channels[peer]), TIMEOUT_S)

    assert in_threads([lambda r=rank: send_then_receive(r) for rank in range(2)]) == [None, None]
    close_all(meshes)
    assert [torch.equal(received[rank], make_message(1 - rank, rank, 0, 20_000_000)) for rank in range(2)] == [True] * 2


REFUSAL = "rank 1 sent another message than the one of 10 bytes that was due"


@pytest.mark.parametrize("sharers", [(), (0, 1)], ids=["tcp", "rings"])
@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("num_bytes", [0, 9, 11])
def test_a_message_of_another_size_is_refused_on_its_channel(
    num_bytes: int, is_early: bool, sharers: Sequence[int]
) -> None:
    meshes = connect_meshes(2, 1, sharers)
    if is_early:
        meshes[1].post({0: _zeros(num_bytes)}, {}, 4)
    meshes[1].post({0: _zeros(10)}, {}, 5)
    meshes[0].wait(meshes[0].post({}, {1: _zeros(10)}, 5), TIMEOUT_S)
    ticket = meshes[0].post({}, {1: _zeros(10)}, 4)
    if not is_early:
        meshes[1].post({0: _zeros(num_bytes)}, {}, 4)
    assert meshes[0].wait_any([ticket], TIMEOUT_S) == ticket
    with pytest.raises(RuntimeError, match=REFUSAL):
        meshes[0].wait(ticket, TIMEOUT_S)
    close_all(meshes)


@OVER
def test_what_came_early_is_good_even_if_the_peer_has_hung_up(num_streams: int, sharers: Sequence[int]) -> None:
    meshes = connect_meshes(2, num_streams, sharers)
    sent, last = make_message(0, 1, 0, 1 << 20), make_message(0, 1, 1, 1 << 20)
    received = [_zeros(1 << 20) for _ in range(2)]
    # Nothing comes for the second receive, so that all connections are read to their end.
    tickets = [meshes[1].post({}, {0: received[1]}, channel) for channel in (2, 3)]
    in_threads([lambda: _finish_all(meshes[0], {meshes[0].post({1: sent}, {}, 1), meshes[0].post({1: last}, {}, 2)})])
    assert meshes[1].wait_any(tickets, TIMEOUT_S) == tickets[0]
    meshes[1].wait(tickets[0], TIMEOUT_S)
    assert torch.equal(received[1], last)
    meshes[0].close()
    assert meshes[1].wait_any(tickets[1:], TIMEOUT_S) == tickets[1]
    meshes[1].wait(meshes[1].post({}, {0: received[0]}, 1), TIMEOUT_S)
    assert torch.equal(received[0], sent)
    with pytest.raises(RuntimeError, match="rank 0 hung up"):
        meshes[1].wait(tickets[1], TIMEOUT_S)
    close_all(meshes)


@contextmanager
def _mesh_and_socket() -> Iterator[tuple[Mesh, socket.socket]]:
    """Yield rank 0, and a socket that speaks to it as rank 1."""
    mesh = Mesh(0, 2, 1, "127.0.0.1", TOKEN)
    with socket.create_connection((mesh.address, mesh.port)) as peer:
        half = len(TOKEN) // 2
        peer.sendall(b"cgx3" + struct.pack("<3I", 1, 0, 1) + TOKEN[:half])
        mesh.connect([(mesh.address, mesh.port)] * 2, TIMEOUT_S)
        assert peer.recv(half, socket.MSG_WAITALL) == TOKEN[half:]
        yield mesh, peer
    mesh.close()


def _frame(channel: int, number: int, num_bytes: int) -> bytes:
    return struct.pack("<IIQ", channel, number, num_bytes)


def test_a_message_whose_receive_is_posted_while_it_comes_early_arrives_whole() -> None:
    with _mesh_and_socket() as (mesh, peer):
        sent, received = make_message(1, 0, 0, 60_000_000), torch.zeros(60_000_000, dtype=torch.uint8)
        first = mesh.post({}, {1: _zeros(1)}, 1)
        peer.sendall(_frame(2, 0, sent.numel()))
        # Buffers hold far less, so most of this has been read when it is sent.
        peer.sendall(sent[:40_000_000].numpy())
        ticket = mesh.post({}, {1: received}, 2)
        peer.sendall(sent[40_000_000:].numpy())
        mesh.wait(ticket, TIMEOUT_S)
        assert torch.equal(received, sent)
        assert not mesh.is_over(first)
        for byte in _frame(1, 0, 1) + b"x":
            peer.sendall(bytes([byte]))
        mesh.wait(first, TIMEOUT_S)


def test_a_receive_of_another_size_is_refused_while_the_message_comes_early() -> None:
    with _mesh_and_socket() as (mesh, peer):
        first = mesh.post({}, {1: _zeros(1)}, 1)
        peer.sendall(_frame(2, 0, 60_000_000) + bytes(40_000_000))
        ticket = mesh.post({}, {1: _zeros(10)}, 2)
        assert mesh.wait_any([first, ticket], TIMEOUT_S) == first
        with pytest.raises(RuntimeError, match=REFUSAL):
            mesh.wait(ticket, TIMEOUT_S)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (_frame(2, 1, 0), "rank 1 sent a message on channel 2 that is not the next one"),
        (_frame(2, 0, 1 << 62), f"channel 2 early; there is no memory for its {1 << 62} bytes"),
        (_frame(1, 1, 10), REFUSAL),
    ],
)
def test_frames_that_make_no_sense_are_refused(frame: bytes, said: str) -> None:
    with _mesh_and_socket() as (mesh, peer):
        peer.sendall(frame)
        with pytest.raises(RuntimeError, match=said):
            mesh.wait(mesh.post({}, {1: _zeros(10)}, 1), TIMEOUT_S)


def test_nothing_is_read_before_it_is_asked_for() -> None:
    with _mesh_and_socket() as (_, peer):
        peer.setblocking(False)
        num_sent, data = 0, _frame(2, 0, 1 << 30) + bytes(1 << 20)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and num_sent < 1 << 27:
            try:
                num_sent += peer.send(data)
                data = bytes(1 << 20)
            except BlockingIOError:
                time.sleep(0.01)
        assert num_sent < 1 << 27, "bytes were read without a receive"


def test_bytes_that_come_early_are_metered() -> None:
    with _mesh_and_socket() as (mesh, peer):
        ticket = mesh.post({}, {1: _zeros(1)}, 1)
        peer.sendall(_frame(2, 0, 64 << 16))
        for _ in range(64):
            peer.sendall(bytes(1 << 16))
            time.sleep(0.003)
        peer.sendall(_frame(1, 0, 1) + b"x")
        mesh.wait(ticket, TIMEOUT_S)
        bursts = mesh.take_bursts()
    metered = {peer: sum(num_bytes for of, num_bytes, _ in bursts if of == peer) for peer in (1, -1)}
    # A busy machine makes pauses, after which bytes are skipped.
    assert all(1 << 18 < num_bytes <= 64 << 16 for num_bytes in metered.values()), metered


@pytest.mark.parametrize("channel", [-1, NUM_CHANNELS])
def test_a_channel_out_of_range_is_refused(channel: int) -> None:
    mesh = Mesh(0, 1, 1, "127.0.0.1", TOKEN)
    with pytest.raises(ValueError, match=f"channel {channel} is not allowed; give 0 to 4294967295"):
        mesh.post({}, {}, channel)


@OVER
def test_wait_any_returns_the_first_that_is_over_and_settles_none(num_streams: int, sharers: Sequence[int]) -> None:
    meshes = connect_meshes(2, num_streams, sharers)
    tickets = [meshes[0].post({}, {1: _zeros(10)}, channel) for channel in range(4)]
    assert meshes[0].wait_any(tickets, 0) is None
    assert not any(map(meshes[0].is_over, tickets))
    for channel in (3, 1):
        meshes[1].wait(meshes[1].post({0: _zeros(10)}, {}, channel), TIMEOUT_S)
        assert meshes[0].wait_any([tickets[channel]], TIMEOUT_S) == tickets[channel]
    assert [meshes[0].is_over(ticket) for ticket in tickets] == [False, True, False, True]
    for _ in range(2):
        assert meshes[0].wait_any(tickets, TIMEOUT_S) == tickets[1]
        assert meshes[0].wait_any(tickets[::-1], TIMEOUT_S) == tickets[3]
    meshes[0].wait(tickets[1], TIMEOUT_S)
    for ask in (lambda: meshes[0].wait_any(tickets, TIMEOUT_S), lambda: meshes[0].is_over(tickets[1])):
        with pytest.raises(RuntimeError, match=f"ticket {tickets[1]} is not known"):
            ask()
    assert meshes[0].wait_any([tickets[0], tickets[3]], TIMEOUT_S) == tickets[3]
    close_all(meshes)


@pytest.mark.parametrize("sharers", [(), (0, 1)], ids=["tcp", "rings"])
@pytest.mark.parametrize("has_ticket", [False, True])
def test_wake_ends_a_wait_that_is_under_way_or_comes_next(has_ticket: bool, sharers: Sequence[int]) -> None:
    meshes = connect_meshes(2, 1, sharers)
    tickets = [meshes[0].post({}, {1: _zeros(10)}, 1)] if has_ticket else []
    meshes[0].wake()
    meshes[0].wake()
    assert meshes[0].wait_any(tickets, math.inf) is None
    for _ in range(50):
        waker = threading.Thread(target=meshes[0].wake)
        waker.start()
        assert meshes[0].wait_any(tickets, math.inf) is None
        waker.join()
    assert meshes[0].wait_any(tickets, 0.01) is None, "no wake-up was left"
    close_all(meshes)


@pytest.mark.parametrize("sharers", [(), (0, 1)], ids=["tcp", "rings"])
def test_a_ticket_that_is_over_uses_up_no_wake_up(sharers: Sequence[int]) -> None:
    meshes = connect_meshes(2, 1, sharers)
    ticket, late = (meshes[0].post({}, {1: _zeros(10)}, channel) for channel in (1, 2))
    meshes[1].post({0: _zeros(10)}, {}, 1)
    meshes[0].wait_any([ticket], TIMEOUT_S)
    meshes[0].wake()
    assert meshes[0].wait_any([ticket], TIMEOUT_S) == ticket
    assert meshes[0].wait_any([late], math.inf) is None
    close_all(meshes)


@pytest.mark.parametrize("sharers", [(), (0, 1)], ids=["tcp", "rings"])
def test_closing_ends_a_wait(sharers: Sequence[int]) -> None:
    for has_ticket in (False, True):
        meshes = connect_meshes(2, 1, sharers)
        tickets = [meshes[0].post({}, {1: _zeros(10)}, 1)] if has_ticket else []
        closer = threading.Timer(0.05, meshes[0].close)
        closer.start()
        # A ticket fails a moment before or after the thread is woken.
        over = meshes[0].wait_any(tickets, math.inf)
        closer.join()
        assert over in (None, *tickets)
        if has_ticket:
            assert meshes[0].wait_any(tickets, 0) == tickets[0]
            with pytest.raises(RuntimeError, match="the connections are closed"):
                meshes[0].wait(tickets[0], TIMEOUT_S)
        close_all(meshes)


def _fork_and_exchange(rank: int) -> int:
    """Return the exit code of a child that tries to use the mesh of its parent."""
    mesh = connect()
    pid = os.fork()
    if pid == 0:
        mesh.wake()
        try:
            mesh.wait_any([], 0)
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    _, status = os.waitpid(pid, 0)
    received = _zeros(100)
    mesh.wait(mesh.post({1 - rank: torch.full_like(received, rank)}, {1 - rank: received}, 9), TIMEOUT_S)
    assert mesh.wait_any([], 0.01) is None
    dist.barrier()
    mesh.close()
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_is_refused_and_wakes_nobody() -> None:
    assert run_ranks(2, _fork_and_exchange) == [0, 0]


def _run_groups_in_other_orders(rank: int, shared_memory: bool) -> bool:
    """Begin messages of two groups and a minimum; ranks begin them in different orders."""
    assert dist.group.WORLD is not None
    transport = Transport(dist.group.WORLD, mesh=connect(shared_memory=shared_memory), timeout_s=TIMEOUT_S)
    received = {group: torch.zeros(1000) for group in (0, 1)}
    handles, minimum, peer = [], None, 1 - rank
    for what in (0, "minimum", 1) if rank == 0 else (1, 0, "minimum"):
        if isinstance(what, str):
            minimum = transport.start_minimum(torch.tensor([rank, 1 - rank]))
            continue
        transport.group_index = what
        handles.append(transport.start({peer: torch.full((1000,), 10.0 * what + rank)}, {peer: received[what]}))
    for handle in handles:
        transport.finish(handle)
    assert minimum is not None
    is_right = minimum().tolist() == [0, 0]
    dist.barrier()
    transport.close()
    return is_right and all(bool((got == 10.0 * group + peer).all()) for group, got in received.items())


@pytest.mark.parametrize("shared_memory", [False, True])
def test_groups_and_the_agreement_may_begin_in_different_orders(shared_memory: bool) -> None:
    assert run_ranks(2, _run_groups_in_other_orders, shared_memory) == [True, True]
