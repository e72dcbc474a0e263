"""Ring: reduce-scatter, then allgather, neighbour to neighbour (Patarasuk and Yuan 2009), compressed at every hop."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import HEADER_BYTES, Stamp, check, new_message, payload_of, seal
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.sra import chunk_bounds, encode_share
from cgx_ray.collectives.transport import Transport
from cgx_ray.runtime_ext import ops


class Ring:
    """Cost 2(N-1) a + 2(N-1)/N m b. Chunk j starts at rank j + 1, and every rank adds its part, until rank j has all.

    Gradients are divided before they are summed: fp16 would overflow first. The last encoding, the owner's, travels on
    unchanged and the owner uses it too, so all ranks hold the same bits. Every rank encodes every chunk once a step;
    with feedback it owes what its own encodings dropped, N times because it is an average that they are part of.
    """

    def __init__(self, codec: Codec, numel: int, transport: Transport) -> None:
        self._codec = codec
        self._transport = transport
        rank, world_size = transport.rank, transport.world_size
        self._bounds = chunk_bounds(numel, world_size, codec.granule)
        sizes = [codec.payload_bytes(stop - start) for start, stop in self._bounds]
        # A chunk comes in, is encoded again with this rank's part and goes out, then comes once more, from its owner.
        self._of_chunk = [new_message(size) for size in sizes]
        unsent = sizes[rank] + sizes[(rank + 1) % world_size]
        self.sent_bytes = 2 * sum(sizes) - unsent + 2 * (world_size - 1) * HEADER_BYTES

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """See `Exchange.run`."""
        rank, world_size = self._transport.rank, self._transport.world_size
        before = (rank - 1) % world_size
        grad_N.div_(world_size)
        chunks = [grad_N[start:stop] for start, stop in self._bounds]
        memories = [memory.part(start, stop) if memory is not None else None for start, stop in self._bounds]

        def encode(chunk: int, stamp: Stamp) -> None:
            key = ops.message_key(seed, stamp.step, stamp.group, rank, chunk)
            payload = payload_of(self._of_chunk[chunk])
            encode_share(self._codec, chunks[chunk], payload, key, memories[chunk], world_size)
            seal(self._of_chunk[chunk], stamp, chunks[chunk].numel())
            phases.lap("encode")

        for hop in range(world_size - 1):
            sent, received = (rank - 1 - hop) % world_size, (rank - 2 - hop) % world_size
            encode(sent, stamp)
            self._pass_on(sent, received)
            phases.lap("exchange")
            check(self._of_chunk[received], stamp, chunks[received].numel(), self._transport.ranks[before])
            self._codec.decode(payload_of(self._of_chunk[received]), chunks[received], add=True)
            phases.lap("decode")

        second = replace(stamp, phase=1)
        encode(rank, second)
        for hop in range(world_size - 1):
            self._pass_on((rank - hop) % world_size, (rank - 1 - hop) % world_size)
        phases.lap("exchange")
        for owner, (message, chunk_N) in enumerate(zip(self._of_chunk, chunks, strict=True)):
            check(message, second, chunk_N.numel(), self._transport.ranks[owner])
            self._codec.decode(payload_of(message), chunk_N, add=False)
        phases.lap("decode")

    def _pass_on(self, sent: int, received: int) -> None:
        """Send one chunk's message to the next rank while another's comes from the one before."""
        rank, world_size = self._transport.rank, self._transport.world_size
        self._transport.exchange(
            {(rank + 1) % world_size: self._of_chunk[sent]}, {(rank - 1) % world_size: self._of_chunk[received]}
        )
