"""The part of a transport that schemes use, so that they run among all ranks or among some of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from cgx_ray.runtime_ext.mesh import Parts
from cgx_ray.runtime_ext.streams import Mark


class VendorCall(NamedTuple):
    """A collective of torch.distributed that is under way; `name` is for error messages. `ended` is set at its end."""

    name: str
    work: dist.Work
    ended: threading.Event


@dataclass(slots=True, eq=False)
class Held:
    """Work that a simulated link holds back until `due_s`, by `time.perf_counter`. Then `handle` is `post`'s result."""

    due_s: float
    post: Callable[[], Handle]
    handle: Handle | None = None


# A ticket of the mesh; works of torch.distributed, none if all is done; one of the above; or a point in a stream.
Handle = int | list[dist.Work | None] | VendorCall | Held | Mark


def ranks_of_nodes(nodes: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each node, ascending. `nodes`: by rank, the index of its node."""
    return [[rank for rank, node in enumerate(nodes) if node == wanted] for wanted in sorted(set(nodes))]


class TransportLike(Protocol):
    """Messages, sums and broadcasts between ranks numbered from 0. `Transport` has all ranks, `Subset` some of them.

    takes_many  True if many messages between two ranks may be under way at once
    seals       True if there is `start_sealed`
    peers       the other ranks, the next one first, so that every rank starts with another
    ranks       by rank, its number in error messages
    """

    rank: int
    world_size: int
    takes_many: bool
    seals: bool
    peers: list[int]
    ranks: Sequence[int]

    def start(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> Handle:
        """Begin to send and receive, by rank, in that order, and return at once; pass the result to `finish`.

        The n-th receive from a rank takes its n-th send of the same group. Until `finish` returns, do not change a
        tensor that is sent and do not read one that is received.

        Raises TransportError if a peer is gone.
        """

    def start_sealed(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> Handle:
        """As `start`, with checksums that another thread writes and checks, see `is_sealed` of `Mesh.post`."""

    def finish(self, handle: Handle, waited_s: float = 0.0) -> None:
        """Wait for all messages of `handle`, or for the device to come to it. Call it once per handle.

        waited_s  seconds of the time-out that have passed

        Raises TransportError if a peer is gone or does not answer within the time-out.
        """

    def all_reduce(self, values_N: Tensor) -> Iterator[Handle]:
        """Sum over ranks, in place; yield each handle to wait for."""

    def broadcast(self, message: Tensor, root: int) -> Iterator[Handle]:
        """Overwrite `message` on all ranks with that of `root`; yield each handle to wait for."""


def ring_bytes(num_bytes: int, world_size: int) -> int:
    """Return the bytes that a rank sends for the sum of `num_bytes` over ranks by the vendor's ring."""
    return 2 * (world_size - 1) * num_bytes // world_size


def binomial_children(rank: int, root: int, world_size: int) -> list[int]:
    """Return the ranks that `rank` passes a broadcast of `root` on to, in order, in a binomial tree as Gloo's."""
    place = (rank - root) % world_size
    reaches = (1 << level for level in range(world_size.bit_length()))
    return [(rank + reach) % world_size for reach in reaches if place < reach and place + reach < world_size]


def send_and_receive(
    transport: TransportLike, sends: Mapping[int, Parts], receives: Mapping[int, Parts]
) -> Iterator[Handle]:
    """Send and receive, by rank, in one round; yield the handle to wait for."""
    yield transport.start(sends, receives)


def wait_for(mark: Mark, transport: TransportLike) -> None:
    """Wait until the device has come to `mark`, unless it has already. Raises TransportError as `finish` does."""
    if not mark.is_done:
        transport.finish(mark)


def finish_all(handles: Iterable[Handle], transport: TransportLike, resume: Callable[[], None]) -> None:
    """Wait for each of `handles` before taking the next one. Calls `resume` after each."""
    for handle in handles:
        transport.finish(handle)
        resume()
