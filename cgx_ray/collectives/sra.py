"""SRA, direct: scatter-reduce, then allgather, compressed both ways (CGX, section 4)."""

from __future__ import annotations

import itertools
from dataclasses import replace

from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import HEADER_BYTES, Stamp, check, new_message, payload_of, seal
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport import Transport
from cgx_ray.runtime_ext import ops


def chunk_bounds(numel: int, num_chunks: int, granule: int) -> list[tuple[int, int]]:
    """Cut [0, numel) into `num_chunks` near-equal runs at multiples of `granule`. Later ones may be empty."""
    num_granules = -(-numel // granule)
    cuts = [min(numel, granule * (num_granules * i // num_chunks)) for i in range(num_chunks)] + [numel]
    return list(itertools.pairwise(cuts))


def encode_share(
    codec: Codec, average_N: Tensor, payload: Tensor, key: int, memory: Memory | None, world_size: int
) -> None:
    """Encode an average, or what some ranks' gradients are of it, together with what this rank owes.

    average_N  (N,) float32, a sum divided by `world_size`; changed in place
    memory     in units of the sum: what is owed goes in divided, and what the encoding drops comes out multiplied
    """
    if memory is None:
        codec.encode(average_N, payload, key)
        return
    assert memory.residual_N is not None
    average_N.add_(memory.residual_N, alpha=1 / world_size)
    codec.encode(average_N, payload, key, memory.without_debt())
    memory.next_N.mul_(world_size)


class Sra:
    """Cost 2a + 2(N-1)/N m b. Rank j owns chunk j: it sums what the others send of it and sends the sum back.

    The owner uses its own re-encoded chunk, as its peers do, so all ranks hold the same bits. With feedback a rank owes
    what its messages to the owners dropped and, of its own chunk, N times what encoding the average dropped: added to
    the next sum of N gradients, which is divided by N, that makes the average good.
    """

    def __init__(self, codec: Codec, numel: int, transport: Transport) -> None:
        self._codec = codec
        self._transport = transport
        self._bounds = chunk_bounds(numel, transport.world_size, codec.granule)
        sizes = [codec.payload_bytes(stop - start) for start, stop in self._bounds]
        # By chunk: what this rank sends of it in the first phase and receives of it in the second.
        self._of_chunk = [new_message(size) for size in sizes]
        # By peer: what it sends of the chunk that this rank owns. The entry of this rank holds the encoded sum.
        self._of_own = [new_message(sizes[transport.rank]) for _ in sizes]
        others = sum(sizes) - sizes[transport.rank]
        self.sent_bytes = others + (transport.world_size - 1) * (2 * HEADER_BYTES + sizes[transport.rank])

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """See `Exchange.run`."""
        rank, world_size = self._transport.rank, self._transport.world_size
        peers = [peer for peer in range(world_size) if peer != rank]
        chunks = [grad_N[start:stop] for start, stop in self._bounds]
        memories = [memory.part(start, stop) if memory is not None else None for start, stop in self._bounds]
        own, total = chunks[rank], self._of_own[rank]

        # A rank encodes each chunk once a step, its own in the second phase: the chunk tells random numbers apart.
        keys = [ops.message_key(seed, stamp.step, stamp.group, rank, chunk) for chunk in range(world_size)]
        for peer in peers:
            self._codec.encode(chunks[peer], payload_of(self._of_chunk[peer]), keys[peer], memories[peer])
            seal(self._of_chunk[peer], stamp, chunks[peer].numel())
        phases.lap("encode")
        self._transport.exchange(
            {peer: self._of_chunk[peer] for peer in peers}, {peer: self._of_own[peer] for peer in peers}
        )
        phases.lap("exchange")

        for peer in peers:
            check(self._of_own[peer], stamp, own.numel(), peer)
            self._codec.decode(payload_of(self._of_own[peer]), own, add=True)
        phases.lap("decode")
        second = replace(stamp, phase=1)
        encode_share(self._codec, own.div_(world_size), payload_of(total), keys[rank], memories[rank], world_size)
        seal(total, second, own.numel())
        phases.lap("encode")
        self._transport.exchange(dict.fromkeys(peers, total), {peer: self._of_chunk[peer] for peer in peers})
        phases.lap("exchange")

        self._codec.decode(payload_of(total), own, add=False)
        for peer in peers:
            check(self._of_chunk[peer], second, chunks[peer].numel(), peer)
            self._codec.decode(payload_of(self._of_chunk[peer]), chunks[peer], add=False)
        phases.lap("decode")
