"""Meshes of several ranks in one process, each in a thread of its own."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from cgx_ray.runtime_ext import ops
from cgx_ray.runtime_ext.mesh import SEALED_BYTES, TOKEN_BYTES, Mesh
from cgx_ray.runtime_ext.shm import Segment

TOKEN = bytes(range(TOKEN_BYTES))
# No rank shares memory; all do; some do, so that the messages of one ticket go both ways.
OVER = pytest.mark.parametrize("sharers", [(), (0, 1, 2, 3), (0, 2)], ids=["tcp", "rings", "mixed"])
TIMEOUT_S = 20.0


def in_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    """Run functions at the same time; return their results, or the texts of their errors."""
    results: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        try:
            results[index] = functions[index]()
        except RuntimeError as error:
            results[index] = str(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * TIMEOUT_S)
        assert not thread.is_alive(), "a rank hangs"
    return results


def connect_meshes(world_size: int, num_streams: int = 1, sharers: Sequence[int] = ()) -> list[Mesh]:
    """Return connected meshes; those of `sharers` share memory with each other."""
    meshes = [Mesh(rank, world_size, num_streams, "127.0.0.1", TOKEN, far_s=0) for rank in range(world_size)]
    addresses = [(mesh.address, mesh.port) for mesh in meshes]
    segments: list[Segment | None] = [None] * world_size
    if sharers:
        made = Segment(len(sharers))
        for rank in sharers:
            segments[rank] = Segment(len(sharers), made.name, made.nonce)
        made.unlink()
    connects = [
        lambda m=mesh, s=segment: m.connect(addresses, TIMEOUT_S, s, sharers)
        for mesh, segment in zip(meshes, segments, strict=True)
    ]
    assert in_threads(connects) == [None] * world_size
    return meshes


def close_all(meshes: list[Mesh]) -> None:
    for mesh in meshes:
        mesh.close()


def make_message(sender: int, receiver: int, number: int, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * sender + 100 * receiver + number)
    return torch.randint(0, 256, (numel,), dtype=torch.uint8, generator=generator)


def seal(message: torch.Tensor) -> None:
    """Write the checksum that a mesh writes."""
    checksum = ops.crc32c(message[SEALED_BYTES:], seed=ops.crc32c(message[: SEALED_BYTES - 4]))
    message[SEALED_BYTES - 4 : SEALED_BYTES] = torch.tensor([*struct.pack("<I", checksum)])
