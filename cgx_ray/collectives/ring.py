"""Ring: reduce-scatter, then allgather, neighbour to neighbour (Patarasuk and Yuan 2009), compressed at every hop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.parcel import Parcel, Step, chunk_bounds, cut, run_lanes
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport import Handle, Transport


class Ring:
    """Cost 2(N-1) a + 2(N-1)/N m b. Chunk j starts at rank j + 1, and every rank adds its part, until rank j has all.

    Gradients are divided before they are summed: fp16 would overflow first. The last encoding, the owner's, travels on
    unchanged and the owner uses it too, so all ranks hold the same bits. Every rank encodes every chunk once a step;
    with feedback it owes what its own encodings dropped, N times because it is an average that they are part of.
    Long chunks go in pieces, as in `Sra`: while one is coded the others travel.
    """

    def __init__(self, codec: Codec, numel: int, transport: Transport) -> None:
        self._transport = transport
        pieces = cut(codec, chunk_bounds(numel, transport.world_size, codec.granule), transport)
        self._lanes = [_Lane(index, len(pieces), bounds, codec, transport) for index, bounds in enumerate(pieces)]
        self.sent_bytes = sum(lane.sent_bytes for lane in self._lanes)

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """See `Exchange.run`."""
        step = Step(grad_N=grad_N, memory=memory, stamp=stamp, seed=seed, phases=phases)
        run_lanes([lane.hops(step) for lane in self._lanes], self._transport, phases)


class _Lane:
    """The same piece of every chunk, on its way around the ring."""

    def __init__(
        self, index: int, num_pieces: int, bounds: Sequence[tuple[int, int]], codec: Codec, transport: Transport
    ) -> None:
        self._index, self._num_pieces = index, num_pieces
        self._bounds = bounds
        self._transport = transport
        numels = [stop - start for start, stop in bounds]
        # By chunk: with this rank's part on its way out, and then from its owner.
        self._of_chunk = [Parcel(codec, numel) for numel in numels]
        sizes = [parcel.num_bytes for parcel in self._of_chunk]
        room = torch.empty(max(sizes), dtype=torch.uint8)
        self._coming = [Parcel(codec, numel, room) for numel in numels]
        rank, world_size = transport.rank, transport.world_size
        self.sent_bytes = 2 * sum(sizes) - sizes[rank] - sizes[(rank + 1) % world_size]

    def hops(self, step: Step) -> Iterator[Handle]:
        """Take the piece through both phases; gives out what it waits for."""
        rank, world_size, phases = self._transport.rank, self._transport.world_size, step.phases
        before, second = (rank - 1) % world_size, replace(step.stamp, phase=1)
        runs = [step.run_of(bounds) for bounds in self._bounds]
        for run_N, parcel in zip(runs, self._of_chunk, strict=True):
            run_N.div_(world_size)
            parcel.borrow(run_N)

        def encode(chunk: int, stamp: Stamp) -> Parcel:
            key, memory = step.key(rank, chunk * self._num_pieces + self._index), step.memory_of(self._bounds[chunk])
            self._of_chunk[chunk].encode_share(runs[chunk], stamp, key, memory, world_size)
            phases.lap("encode")
            return self._of_chunk[chunk]

        for hop in range(world_size - 1):
            received = (rank - 2 - hop) % world_size
            yield self._pass_on(encode((rank - 1 - hop) % world_size, step.stamp), self._coming[received])
            self._coming[received].decode(runs[received], step.stamp, self._transport.ranks[before], add=True)
            phases.lap("decode")

        encode(rank, second).use(runs[rank])
        for hop in range(world_size - 1):
            received = (rank - 1 - hop) % world_size
            yield self._pass_on(self._of_chunk[(rank - hop) % world_size], self._of_chunk[received])
            self._of_chunk[received].decode(runs[received], second, self._transport.ranks[received], add=False)
            phases.lap("decode")

    def _pass_on(self, sent: Parcel, received: Parcel) -> Handle:
        """Send one to the next rank while another comes from the one before."""
        rank, world_size = self._transport.rank, self._transport.world_size
        if self._index == 0:
            self._transport.begin_round()
        return self._transport.start({(rank + 1) % world_size: sent.parts}, {(rank - 1) % world_size: received.parts})
