"""The part of a transport that schemes use, so that they run among all ranks or among some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from cgx_ray.runtime_ext.mesh import Parts

# A ticket of the mesh, or the works of torch.distributed.
Handle = int | list[dist.Work | None]


class TransportLike(Protocol):
    """Messages, sums and broadcasts between ranks numbered from 0. `Transport` has all ranks, `Subset` some of them.

    takes_many  True if many messages between two ranks may be under way at once
    peers       the other ranks, the next one first, so that every rank starts with another
    ranks       by rank, its number in error messages
    """

    rank: int
    world_size: int
    takes_many: bool
    peers: list[int]
    ranks: Sequence[int]

    def begin_round(self) -> None:
        """Begin a round of messages: a simulated link charges one latency per round."""

    def start(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> Handle:
        """Begin to send and receive, by rank, in that order, and return at once; pass the result to `finish`.

        The n-th receive from a rank takes its n-th send. Until `finish` returns, do not change a tensor that is sent
        and do not read one that is received.

        Raises TransportError if a peer is gone.
        """

    def finish(self, handle: Handle) -> None:
        """Wait for all messages of `handle`. Call it once per handle.

        Raises TransportError if a peer is gone or does not answer within the time-out.
        """

    def all_reduce(self, values_N: Tensor) -> None:
        """Sum over ranks, in place."""

    def broadcast(self, message: Tensor, root: int) -> None:
        """Overwrite `message` on all ranks with that of `root`."""


def send_and_receive(transport: TransportLike, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> None:
    """Send and receive, by rank, in one round, and wait until all of it is done. Raises as `TransportLike.finish`."""
    transport.begin_round()
    transport.finish(transport.start(sends, receives))
