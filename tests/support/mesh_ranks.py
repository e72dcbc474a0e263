"""A transport over a mesh alone, for ranks that are threads of one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from cgx_ray.collectives.subset import MessageGroup
from cgx_ray.collectives.transport.transport_like import Handle
from cgx_ray.runtime_ext.mesh import Mesh, Parts
from support.meshes import TIMEOUT_S, close_all, connect_meshes


@contextmanager
def mesh_transports(*sizes: int) -> Iterator[Mapping[int, list[MeshTransport]]]:
    """Connect the ranks of worlds of these sizes; yield their transports, by size of the world."""
    meshes = {size: connect_meshes(size) for size in sizes}
    yield {size: [MeshTransport(mesh, rank, size) for rank, mesh in enumerate(meshes[size])] for size in meshes}
    for of_size in meshes.values():
        close_all(of_size)


class MeshTransport:
    """The `TransportLike` of one rank. Sums are made of messages."""

    takes_many = seals = True

    def __init__(self, mesh: Mesh, rank: int, world_size: int) -> None:
        self._mesh = mesh
        self.rank = rank
        self.world_size = world_size
        self.ranks = range(world_size)
        self.peers = [(rank + distance) % world_size for distance in range(1, world_size)]
        self.nodes = list(self.ranks)
        self.step = 0

    def start(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> Handle:
        return self._mesh.post(sends, receives, channel=0)

    def start_sealed(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> Handle:
        return self._mesh.post(sends, receives, channel=0, is_sealed=True)

    def finish(self, handle: Handle, waited_s: float = 0.0) -> None:
        assert isinstance(handle, int)
        self._mesh.wait(handle, TIMEOUT_S, waited_s)

    def all_reduce(self, values_N: Tensor) -> Iterator[Handle]:
        return MessageGroup(self).all_reduce(values_N)

    def broadcast(self, message: Tensor, root: int) -> Iterator[Handle]:
        raise AssertionError("not used by these schemes")
