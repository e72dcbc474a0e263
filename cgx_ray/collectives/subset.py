"""Some ranks of a transport among themselves, and sums of what is not encoded by messages between them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch import Tensor

from cgx_ray.collectives.transport import Handle, Transport
from cgx_ray.runtime_ext.mesh import Parts


class Subset(Transport):
    """What schemes need of a transport, for the given ranks of it, renumbered from 0 in their order.

    Errors name ranks as the whole does. Sums and broadcasts are made of messages: torch.distributed would need a group
    for every subset.
    """

    def __init__(self, whole: Transport, ranks: Sequence[int]) -> None:  # no group, link or time-out of its own
        self._whole = whole
        self.ranks = ranks
        self.takes_many = whole.takes_many
        self.rank = ranks.index(whole.rank)
        self.world_size = len(ranks)
        self.peers = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        self._direct = Direct(self)

    def begin_round(self) -> None:
        self._whole.begin_round()

    def start(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> Handle:
        sent, received = ({self.ranks[peer]: m for peer, m in messages.items()} for messages in (sends, receives))
        return self._whole.start(sent, received)

    def finish(self, handle: Handle) -> None:
        self._whole.finish(handle)

    def all_reduce(self, values_N: Tensor) -> None:
        """Sum over ranks, in place; two latencies."""
        self._direct.all_reduce(values_N)

    def broadcast(self, message: Tensor, root: int) -> None:
        """Give everyone the message of `root`, by a binomial tree."""
        place = (self.rank - root) % self.world_size
        reach = 1
        while reach < self.world_size:
            # The first `reach` places have it.
            if place < reach and place + reach < self.world_size:
                self.exchange({(self.rank + reach) % self.world_size: message}, {})
            elif reach <= place < 2 * reach:
                self.exchange({}, {(self.rank - reach) % self.world_size: message})
            reach *= 2


class Direct:
    """The operations of `runtime_ext.shm.LocalGroup` by messages, all pairs at once: for ranks that share no memory."""

    def __init__(self, transport: Transport) -> None:
        self.rank = transport.rank
        self.size = transport.world_size
        self._transport = transport
        self._room: Tensor | None = None

    def reduce_scatter(self, values_N: Tensor, bounds: Sequence[tuple[int, int]]) -> None:
        """Replace this rank's part of `values_N` by its sum over ranks. Cost a + (L-1)/L M b.

        values_N  (N,) contiguous; the rest of it stays as it is
        bounds    (start, stop) by rank, the same on all ranks; may be empty
        """
        own_N = _part(values_N, bounds[self.rank])
        received = self._received_like(own_N) if own_N.numel() else {}
        self._transport.exchange(self._parts_of_peers(values_N, bounds), received)
        # In rank order, whoever comes first, and 16-bit numbers are rounded once.
        sum_N = own_N.float() if own_N.element_size() == 2 else own_N
        for peer in sorted(received):
            sum_N.add_(received[peer])
        own_N.copy_(sum_N)

    def all_gather(self, values_N: Tensor, bounds: Sequence[tuple[int, int]]) -> None:
        """Give everyone every rank's part of `values_N`, bit for bit. Cost and arguments as of `reduce_scatter`."""
        own_N = _part(values_N, bounds[self.rank])
        sends = dict.fromkeys(self._transport.peers, own_N) if own_N.numel() else {}
        self._transport.exchange(sends, self._parts_of_peers(values_N, bounds))

    def all_reduce(self, values_N: Tensor) -> None:
        """Replace `values_N` by its sum over ranks."""
        cuts = [values_N.numel() * rank // self.size for rank in range(self.size + 1)]
        bounds = list(itertools.pairwise(cuts))
        self.reduce_scatter(values_N, bounds)
        self.all_gather(values_N, bounds)

    def _received_like(self, own_N: Tensor) -> dict[int, Tensor]:
        """By peer, where what it sends of `own_N` goes: the same memory at every call."""
        if self._room is None or self._room.dtype != own_N.dtype or self._room.shape[1:] != own_N.shape:
            self._room = own_N.new_empty(self.size - 1, own_N.numel())
        return dict(zip(self._transport.peers, self._room, strict=True))

    def _parts_of_peers(self, values_N: Tensor, bounds: Sequence[tuple[int, int]]) -> dict[int, Tensor]:
        """By peer, its part of `values_N`, if it has one: Gloo sends nothing that is empty."""
        parts = {peer: _part(values_N, bounds[peer]) for peer in self._transport.peers}
        return {peer: part_N for peer, part_N in parts.items() if part_N.numel()}


def _part(values_N: Tensor, bounds: tuple[int, int]) -> Tensor:
    return values_N[slice(*bounds)]
