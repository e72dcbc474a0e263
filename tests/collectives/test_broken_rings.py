"""A rank that writes nonsense into the positions of a ring of shared memory."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.meshes import TIMEOUT_S, TOKEN, close_all, in_threads, make_message

from cgx_ray.runtime_ext.mesh import Mesh
from cgx_ray.runtime_ext.shm import Segment

FRAME_BYTES = 16
NUM_BYTES = 1000
RING_BYTES = 1 << 18
# Time enough for a message, and for the ranks that get none.
WAIT_S = 1.0


@contextmanager
def two_meshes_and_their_memory() -> Iterator[tuple[list[Mesh], mmap.mmap]]:
    """Connect two ranks of this process by rings, and map their segment once more."""
    made = Segment(2)
    meshes = [Mesh(rank, 2, 1, "127.0.0.1", TOKEN) for rank in range(2)]
    addresses = [(mesh.address, mesh.port) for mesh in meshes]
    segments = [Segment(2, made.name, made.nonce) for _ in meshes]
    with Path("/dev/shm", made.name.lstrip("/")).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        made.unlink()
        connects = [
            lambda m=mesh, s=segment: m.connect(addresses, TIMEOUT_S, s, [0, 1])
            for mesh, segment in zip(meshes, segments, strict=True)
        ]
        assert in_threads(connects) == [None, None]
        yield meshes, memory
        close_all(meshes)


def exchange(meshes: list[Mesh], number: int, timeout_s: float) -> list[object]:
    """Send a message from rank 0 to rank 1. Return what `wait` gave on each rank, or the text of its error."""
    sent = make_message(0, 1, number, NUM_BYTES)
    received = sent.clone().zero_()
    tickets = meshes[0].post({1: sent}, {}), meshes[1].post({}, {0: received})
    waits = [lambda m=mesh, t=ticket: m.wait(t, timeout_s) for mesh, ticket in zip(meshes, tickets, strict=True)]
    return in_threads(waits)


def positions(memory: mmap.mmap) -> list[int]:
    """Return where the segment holds the two positions of the ring that one message went through."""
    page = memory[: mmap.PAGESIZE]
    cells = struct.unpack(f"<{len(page) // 8}Q", page)
    return [8 * index for index, cell in enumerate(cells) if cell == NUM_BYTES + FRAME_BYTES]


@pytest.mark.fault("positions without sense in a ring of shared memory", "one clean error")
@pytest.mark.parametrize("value", [0, RING_BYTES + NUM_BYTES + FRAME_BYTES + 1, 1 << 40, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("which", ["written", "read"])
def test_a_position_without_sense_is_one_clean_error(which: str, value: int) -> None:
    with two_meshes_and_their_memory() as (meshes, memory):
        assert all(isinstance(result, list) for result in exchange(meshes, 0, TIMEOUT_S))
        found = positions(memory)
        assert len(found) == 2, found
        struct.pack_into("<Q", memory, found[which == "read"], value)
        results = exchange(meshes, 1, WAIT_S)
    errors = [result for result in results if isinstance(result, str)]
    # A number of bytes that the ring could hold leads to frames without sense.
    clean = ("broke the ring of shared memory: its positions cannot be", "sent another message than the one of")
    assert any(one in error for one in clean for error in errors), errors
