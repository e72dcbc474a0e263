"""`Subset`: some ranks of a transport; `MessageGroup`: uncompressed sums and gathers among ranks, by messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from cgx_ray.collectives.transport.transport_like import Handle, TransportLike, send_and_receive
from cgx_ray.runtime_ext.mesh import Parts


class Subset:
    """A `TransportLike` of the given ranks of `whole`, renumbered from 0 in their order.

    Errors name ranks by their numbers in `whole`. Sums and broadcasts are made of messages, in two latencies and log N:
    torch.distributed would need a process group for every subset.
    """

    def __init__(self, whole: TransportLike, ranks: Sequence[int]) -> None:
        self._whole = whole
        self.ranks = ranks
        self.takes_many = whole.takes_many
        self.seals = whole.seals
        self.rank = ranks.index(whole.rank)
        self.world_size = len(ranks)
        self.peers = [(self.rank + distance) % self.world_size for distance in range(1, self.world_size)]
        self._group = MessageGroup(self)

    def start(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> Handle:
        """See `TransportLike.start`."""
        return self._whole.start(self._of_whole(sends), self._of_whole(receives))

    def start_sealed(self, sends: Mapping[int, Parts], receives: Mapping[int, Parts]) -> Handle:
        """See `TransportLike.start_sealed`."""
        return self._whole.start_sealed(self._of_whole(sends), self._of_whole(receives))

    def _of_whole(self, messages: Mapping[int, Parts]) -> dict[int, Parts]:
        return {self.ranks[peer]: parts for peer, parts in messages.items()}

    def finish(self, handle: Handle, waited_s: float = 0.0) -> None:
        """See `TransportLike.finish`."""
        self._whole.finish(handle, waited_s)

    def all_reduce(self, values_N: Tensor) -> Iterator[Handle]:
        """See `TransportLike.all_reduce`. Cost 2a + 2(N-1)/N M b."""
        return self._group.all_reduce(values_N)

    def broadcast(self, message: Tensor, root: int) -> Iterator[Handle]:
        """See `TransportLike.broadcast`; by a binomial tree: the number of ranks that have it doubles each round."""
        place = (self.rank - root) % self.world_size
        reach = 1
        while reach < self.world_size:
            # The first `reach` places have it.
            if place < reach and place + reach < self.world_size:
                yield from send_and_receive(self, {(self.rank + reach) % self.world_size: message}, {})
            elif reach <= place < 2 * reach:
                yield from send_and_receive(self, {}, {(self.rank - reach) % self.world_size: message})
            reach *= 2


class MessageGroup:
    """The operations of `runtime_ext.shm.LocalGroup` for ranks that share no memory: direct, by uncoded messages.

    They are iterators that yield each handle to wait for.
    """

    def __init__(self, transport: TransportLike) -> None:
        self.rank = transport.rank
        self.size = transport.world_size
        self._transport = transport
        self._room: Tensor | None = None

    def reduce_scatter(self, values_N: Tensor, bounds: Sequence[tuple[int, int]]) -> Iterator[Handle]:
        """Replace this rank's part of `values_N` by its sum over ranks. Cost a + (N-1)/N M b.

        values_N  flat and contiguous; the other parts stay as they are
        bounds    by rank, elements [start, stop), the same on all ranks; may be empty
        """
        own_N = _part(values_N, bounds[self.rank])
        received = self._received_like(own_N) if own_N.numel() else {}
        yield from send_and_receive(self._transport, self._parts_of_peers(values_N, bounds), received)
        # In rank order, whichever comes first, and 16-bit numbers are rounded once, at the end.
        sum_N = own_N.float() if own_N.element_size() == 2 else own_N
        for peer in sorted(received):
            sum_N.add_(received[peer])
        own_N.copy_(sum_N)

    def all_gather(self, values_N: Tensor, bounds: Sequence[tuple[int, int]]) -> Iterator[Handle]:
        """Replace the others' parts of `values_N` by theirs, bit for bit. Cost and arguments of `reduce_scatter`."""
        own_N = _part(values_N, bounds[self.rank])
        sends = dict.fromkeys(self._transport.peers, own_N) if own_N.numel() else {}
        yield from send_and_receive(self._transport, sends, self._parts_of_peers(values_N, bounds))

    def all_reduce(self, values_N: Tensor) -> Iterator[Handle]:
        """Replace `values_N` by its sum over ranks."""
        cuts = [values_N.numel() * rank // self.size for rank in range(self.size + 1)]
        bounds = list(itertools.pairwise(cuts))
        yield from self.reduce_scatter(values_N, bounds)
        yield from self.all_gather(values_N, bounds)

    def _received_like(self, own_N: Tensor) -> dict[int, Tensor]:
        """Return, by peer, memory for its part of `own_N`: the same memory at every call."""
        if self._room is None or self._room.dtype != own_N.dtype or self._room.shape[1:] != own_N.shape:
            self._room = own_N.new_empty(self.size - 1, own_N.numel())
        return dict(zip(self._transport.peers, self._room, strict=True))

    def _parts_of_peers(self, values_N: Tensor, bounds: Sequence[tuple[int, int]]) -> dict[int, Tensor]:
        """Return, by peer, its part of `values_N`, unless that is empty: Gloo sends no empty message."""
        parts = {peer: _part(values_N, bounds[peer]) for peer in self._transport.peers}
        return {peer: part_N for peer, part_N in parts.items() if part_N.numel()}


def _part(values_N: Tensor, bounds: tuple[int, int]) -> Tensor:
    return values_N[slice(*bounds)]
