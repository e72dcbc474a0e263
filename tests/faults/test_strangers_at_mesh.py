"""Strangers at the port of a rank that waits for the others, and frames without sense from one who knows the token."""

from __future__ import annotations

import os
import random
import resource
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from support.meshes import TIMEOUT_S, TOKEN, close_all, in_threads, make_message
from support.strangers import HOST, is_hung_up, strangers

from cgx_ray.runtime_ext.mesh import TOKEN_BYTES, Mesh

HELLO = b"cgx3" + struct.pack("<3I", 1, 0, 1)  # rank, connection, number of connections; then the token


def two_meshes() -> tuple[list[Mesh], list[tuple[str, int]]]:
    meshes = [Mesh(rank, 2, 1, HOST, TOKEN) for rank in range(2)]
    return meshes, [(mesh.address, mesh.port) for mesh in meshes]


def connect_all(meshes: list[Mesh], addresses: list[tuple[str, int]], timeout_s: float = TIMEOUT_S) -> list[Any]:
    return in_threads([lambda m=mesh: m.connect(addresses, timeout_s) for mesh in meshes])


def exchange(meshes: list[Mesh]) -> None:
    sent, received = make_message(0, 1, 0, 1000), torch.zeros(1000, dtype=torch.uint8)
    tickets = meshes[0].post({1: sent}, {}), meshes[1].post({}, {0: received})
    for mesh, ticket in zip(meshes, tickets, strict=True):
        mesh.wait(ticket, TIMEOUT_S)
    assert torch.equal(received, sent)


@pytest.mark.fault("1,000 silent connections where ranks exchange gradients", "the ranks connect all the same")
@pytest.mark.parametrize("says", [b"", b"cgx3", HELLO + TOKEN[: TOKEN_BYTES // 2 - 1]])
def test_a_thousand_strangers_before_the_ranks_do_not_stop_them(says: bytes) -> None:
    meshes, addresses = two_meshes()
    with strangers(meshes[0].port, 1000, says) as others:
        assert connect_all(meshes, addresses) == [None, None]
        exchange(meshes)
        assert all(is_hung_up(one) for one in others)
    close_all(meshes)


def test_silent_strangers_are_hung_up_on_while_a_rank_is_missing() -> None:
    meshes, addresses = two_meshes()
    with strangers(meshes[0].port, 1000) as others:

        def come_last() -> None:
            assert all(is_hung_up(one) for one in others)
            meshes[1].connect(addresses, TIMEOUT_S)

        assert in_threads([lambda: meshes[0].connect(addresses, 2 * TIMEOUT_S), come_last]) == [None, None]
        exchange(meshes)
    close_all(meshes)


@contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Leave this process `count` file descriptors that it may still open."""
    with ExitStack() as stack:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        top = max(map(int, os.listdir("/proc/self/fd")))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (top + count + 2, hard))
        filled = []
        try:
            while True:
                filled.append(os.dup(0))
        except OSError:
            for fd in filled[:count]:
                os.close(fd)
        for fd in filled[count:]:
            stack.callback(os.close, fd)
        yield


@pytest.mark.fault("no file descriptors are left while ranks connect", "an error that names the limit to raise")
def test_a_rank_without_file_descriptors_says_so_at_once() -> None:
    meshes, addresses = two_meshes()
    with rank_1(addresses) as other:
        with free_descriptors(0):
            (said,) = in_threads([lambda: meshes[0].connect(addresses, TIMEOUT_S)])
        assert said.startswith("cannot accept another rank's connection: Too many open files; this process may have ")
        assert said.endswith(" files open: raise that limit with ulimit -n")
        assert is_hung_up(other), "the other rank would wait for its time-out"
    close_all(meshes)


@contextmanager
def rank_1(addresses: list[tuple[str, int]]) -> Iterator[socket.socket]:
    """Connect to rank 0 as rank 1 does."""
    with socket.create_connection(addresses[0], timeout=TIMEOUT_S) as sock:
        sock.sendall(HELLO + TOKEN[: TOKEN_BYTES // 2])
        yield sock


def test_a_rank_that_cannot_dial_for_want_of_file_descriptors_says_so() -> None:
    meshes, addresses = two_meshes()
    with free_descriptors(0):
        said = in_threads([lambda: meshes[1].connect(addresses, TIMEOUT_S)])
    close_all(meshes)
    assert said[0].startswith("cannot make a socket: Too many open files; this process may have ")


def test_strangers_give_back_the_file_descriptors_that_a_rank_needs() -> None:
    meshes, addresses = two_meshes()
    with strangers(meshes[0].port, 20) as others, rank_1(addresses) as other:
        with free_descriptors(2):
            assert in_threads([lambda: meshes[0].connect(addresses, TIMEOUT_S)]) == [None]
        assert other.recv(TOKEN_BYTES // 2, socket.MSG_WAITALL) == TOKEN[TOKEN_BYTES // 2 :]
        assert all(is_hung_up(one) for one in others)
    close_all(meshes)


def impostor(mesh: Mesh, addresses: list[tuple[str, int]], sends: Callable[[socket.socket], None]) -> str:
    """Connect to rank 0 as rank 1, with the token, and send; return the error that rank 0 raises."""

    has_posted = threading.Event()

    def speak() -> None:
        with rank_1(addresses) as sock:
            assert sock.recv(TOKEN_BYTES // 2, socket.MSG_WAITALL) == TOKEN[TOKEN_BYTES // 2 :]
            assert has_posted.wait(TIMEOUT_S)
            try:
                sends(sock)
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
            except OSError:
                return  # rank 0 has hung up

    def receive() -> None:
        try:
            mesh.connect(addresses, TIMEOUT_S)
            channels = (0, 1, 7)
            buffers = [torch.zeros(size, dtype=torch.uint8) for size in (0, 10, 100_000)]
            tickets = [mesh.post({}, {1: one}, channel) for one, channel in zip(buffers, channels, strict=True)]
            has_posted.set()
            for ticket in tickets:
                mesh.wait(ticket, TIMEOUT_S)
        finally:
            mesh.close()

    said = in_threads([receive, speak])
    assert said[1] is None
    return str(said[0])


CLEAN = (
    "rank 1 hung up",
    "rank 1 sent another message than the one of ",
    "rank 1 sent a message on channel ",
)


@pytest.mark.fault("random frames of one who knows the token", "one clean error")
@pytest.mark.parametrize("seed", range(40))
def test_random_bytes_of_a_token_holder_are_one_clean_error(seed: int) -> None:
    chance = random.Random(seed)

    def frame() -> bytes:
        channel = chance.choice([0, 1, 7, chance.getrandbits(32)])
        number = chance.choice([0, 1, chance.getrandbits(32)])
        size = chance.choice([0, 10, 11, 100_000, chance.getrandbits(20), chance.getrandbits(63), (1 << 64) - 1])
        return struct.pack("<2IQ", channel, number, size) + chance.randbytes(min(size, chance.randrange(200_000)))

    def speak(sock: socket.socket) -> None:
        if seed % 2 == 0:
            sock.sendall(chance.randbytes(chance.randrange(1, 100_000)))
            return
        for _ in range(chance.randrange(1, 20)):
            sock.sendall(frame())

    mesh, _ = (meshes := two_meshes())[0]
    assert impostor(mesh, meshes[1], speak).startswith(CLEAN)


@pytest.mark.parametrize(
    ("sends", "said"),
    [
        (struct.pack("<2IQ", 1, 0, 11), "rank 1 sent another message than the one of 10 bytes that was due"),
        (struct.pack("<2IQ", 1, 1, 10), "rank 1 sent another message than the one of 10 bytes that was due"),
        (struct.pack("<2IQ", 5, 3, 10), "rank 1 sent a message on channel 5 that is not the next one"),
        (
            struct.pack("<2IQ", 5, 0, 1 << 62),
            f"rank 1 sent a message on channel 5 early; there is no memory for its {1 << 62} bytes",
        ),
        (struct.pack("<2IQ", 1, 0, 10)[:9], "rank 1 hung up"),
        (struct.pack("<2IQ", 1, 0, 10) + bytes(3), "rank 1 hung up"),
    ],
)
def test_a_wrong_frame_of_a_token_holder_is_named(sends: bytes, said: str) -> None:
    mesh, _ = (meshes := two_meshes())[0]
    assert impostor(mesh, meshes[1], lambda sock: sock.sendall(sends)) == said
