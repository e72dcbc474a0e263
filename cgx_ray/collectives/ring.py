"""Ring: reduce-scatter, then all-gather, neighbour to neighbour (Patarasuk and Yuan 2009), compressed at every hop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import Room, Stamp
from cgx_ray.collectives.exchange import Exchange
from cgx_ray.collectives.parcel import Parcel, Step
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.pieces import Piece, chunk_bounds, cut, take_turns
from cgx_ray.collectives.transport.transport_like import Handle, TransportLike


class Ring(Exchange):
    """Cost 2(N-1) a + 2(N-1)/N m b.

    1. Chunk j starts at rank j + 1. Every rank decodes it, adds its own part, encodes the sum and sends it to the next
       rank, until rank j has the sum of all.
    2. Rank j encodes the sum once more. This message travels around the ring unchanged and rank j uses it too, so all
       ranks hold the same bits.

    Gradients are divided by N before they are summed, since sums of fp16 would overflow first. Every rank encodes every
    chunk once per step. With feedback it keeps N times what its own encodings dropped, because they are parts of an
    average. Pieces of long chunks overlap.
    """

    def __init__(self, codec: Codec, numel: int, transport: TransportLike) -> None:
        super().__init__(transport)
        pieces = cut(codec, chunk_bounds(numel, transport.world_size, codec.granule), transport)
        self._lanes = [_RingLane(piece, codec, transport) for piece in pieces]
        self.sent_bytes = sum(lane.sent_bytes for lane in self._lanes)

    def turns(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> Iterator[Handle]:
        """See `Exchange.turns`."""
        step = Step(grad_N=grad_N, memory=memory, stamp=stamp, seed=seed, phases=phases)
        return take_turns([lane.hops(step) for lane in self._lanes], phases)


class _RingLane:
    """One piece of every chunk, on its way around the ring."""

    def __init__(self, piece: Piece, codec: Codec, transport: TransportLike) -> None:
        self._piece = piece
        self._transport = transport
        numels = [stop - start for start, stop in piece.bounds]
        # By chunk: the sum so far, encoded by this rank, then the owner's message with the whole sum.
        self._of_chunk = [Parcel(codec, numel) for numel in numels]
        sizes = [parcel.num_bytes for parcel in self._of_chunk]
        room = Room(max(sizes), codec.device)
        self._coming = [Parcel(codec, numel, room) for numel in numels]
        rank, world_size = transport.rank, transport.world_size
        self.sent_bytes = 2 * sum(sizes) - sizes[rank] - sizes[(rank + 1) % world_size]

    def hops(self, step: Step) -> Iterator[Handle]:
        """Take the piece through both phases; yield the handles to wait for."""
        rank, world_size, phases = self._transport.rank, self._transport.world_size, step.phases
        before, second = (rank - 1) % world_size, replace(step.stamp, phase=1)
        runs = [step.run_of(bounds) for bounds in self._piece.bounds]
        for run_N, parcel in zip(runs, self._of_chunk, strict=True):
            run_N.div_(world_size)
            parcel.borrow(run_N)

        for hop in range(world_size - 1):
            received = (rank - 2 - hop) % world_size
            sent = self._encoded((rank - 1 - hop) % world_size, step, step.stamp)
            yield self._pass_on(sent, self._coming[received])
            self._coming[received].decode(runs[received], step.stamp, self._transport.ranks[before], add=True)
            phases.lap("decode")

        self._encoded(rank, step, second).use(runs[rank])
        for hop in range(world_size - 1):
            received = (rank - 1 - hop) % world_size
            yield self._pass_on(self._of_chunk[(rank - hop) % world_size], self._of_chunk[received])
            self._of_chunk[received].decode(runs[received], second, self._transport.ranks[received], add=False)
            phases.lap("decode")

    def _encoded(self, chunk: int, step: Step, stamp: Stamp) -> Parcel:
        """Encode this rank's sum of `chunk`."""
        bounds, parcel = self._piece.bounds[chunk], self._of_chunk[chunk]
        key = step.key(self._transport.rank, self._piece.number(chunk))
        parcel.encode_share(step.run_of(bounds), stamp, key, step.memory_of(bounds), self._transport.world_size)
        step.phases.lap("encode")
        return parcel

    def _pass_on(self, sent: Parcel, received: Parcel) -> Handle:
        """Begin to send to the next rank and to receive from the one before."""
        rank, world_size = self._transport.rank, self._transport.world_size
        return self._transport.start({(rank + 1) % world_size: sent.parts}, {(rank - 1) % world_size: received.parts})
