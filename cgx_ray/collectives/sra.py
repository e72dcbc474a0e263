"""SRA, direct: scatter-reduce, then allgather, compressed both ways (CGX, section 4)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import HEADER_BYTES, Stamp, check, new_message, payload_of, seal
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport import Handle, Transport
from cgx_ray.runtime_ext import ops

# Longer chunks are cut. LOG.md has what other sizes do.
PIECE_BYTES = 1 << 19


def chunk_bounds(numel: int, num_chunks: int, granule: int) -> list[tuple[int, int]]:
    """Cut [0, numel) into `num_chunks` near-equal runs at multiples of `granule`. Later ones may be empty."""
    num_granules = -(-numel // granule)
    cuts = [min(numel, granule * (num_granules * i // num_chunks)) for i in range(num_chunks)] + [numel]
    return list(itertools.pairwise(cuts))


def encode_share(
    codec: Codec, average_N: Tensor, payload: Tensor, key: int, memory: Memory | None, world_size: float
) -> None:
    """Encode an average, or what some ranks' gradients are of it, together with what this rank owes.

    average_N  (N,) float32, a sum divided by `world_size`; changed in place
    memory     in units of the sum: what is owed goes in divided, and what the encoding drops comes out multiplied
    """
    if memory is None:
        codec.encode(average_N, payload, key)
        return
    if memory.residual_N is not None:
        average_N.add_(memory.residual_N, alpha=1 / world_size)
    codec.encode(average_N, payload, key, memory.without_debt())
    memory.next_N.mul_(world_size)


class Sra:
    """Cost 2a + 2(N-1)/N m b. Rank j owns chunk j: it sums what the others send of it and sends the sum back.

    The owner uses its own re-encoded chunk, as its peers do, so all ranks hold the same bits. With feedback a rank owes
    what its messages to the owners dropped and, of its own chunk, N times what encoding the average dropped: added to
    the next sum of N gradients, which is divided by N, that makes the average good.

    Where many messages may be under way, long chunks are cut into pieces, one message each. The next piece is encoded
    while one is under way; what has come in is summed, encoded again and sent back while the rest is still coming.
    """

    def __init__(
        self, codec: Codec, numel: int, transport: Transport, chunks: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """`chunks`: by rank, what it owns, empty ones last; equal shares if left out."""
        self._transport = transport
        chunks = chunks or chunk_bounds(numel, transport.world_size, codec.granule)
        longest_bytes = max(codec.payload_bytes(stop - start) for start, stop in chunks)
        num_pieces = max(1, -(-longest_bytes // PIECE_BYTES)) if transport.takes_many else 1
        cuts = [
            [(start + first, start + last) for first, last in chunk_bounds(stop - start, num_pieces, codec.granule)]
            for start, stop in chunks
        ]
        self._pieces = [
            _Piece(index, num_pieces, bounds, codec, transport) for index, bounds in enumerate(zip(*cuts, strict=True))
        ]
        self.sent_bytes = sum(piece.sent_bytes for piece in self._pieces)

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """See `Exchange.run`."""
        step = Step(grad_N=grad_N, memory=memory, stamp=stamp, seed=seed, phases=phases)
        self.scatter(step)
        self._transport.begin_round()
        for piece in self._pieces:
            piece.reduce(step)
            piece.own(step).div_(self._transport.world_size)
            piece.share(step, self._transport.world_size)
        self._gather(step)

    def scatter(self, step: Step) -> None:
        """Send the others what they own of `step.grad_N`."""
        self._transport.begin_round()
        # Receives first: what comes early goes straight to where it belongs.
        for piece in self._pieces:
            piece.expect()
        for piece in self._pieces:
            piece.scatter(step)

    def reduce(self, step: Step) -> None:
        """After `scatter`: replace the own chunk by its sum over ranks."""
        for piece in self._pieces:
            piece.reduce(step)

    def share(self, step: Step, num_debtors: float) -> None:
        """After `reduce`: give the others the own chunk, encoded, and take over theirs.

        `step.memory` gets `num_debtors` times what the encoding drops. Nothing that is owed is added.
        """
        self._transport.begin_round()
        for piece in self._pieces:
            piece.share(step, num_debtors)
        self._gather(step)

    def _gather(self, step: Step) -> None:
        for piece in self._pieces:
            piece.gather(step)
        step.phases.lap("decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What `Exchange.run` gets."""

    grad_N: Tensor  # noqa: N815 - tensors end in their dimensions
    memory: Memory | None
    stamp: Stamp
    seed: int
    phases: Phases

    def memory_of(self, bounds: tuple[int, int]) -> Memory | None:
        return self.memory.part(*bounds) if self.memory is not None else None


class _Piece:
    """The same piece of every chunk, from its first message to its last. Its methods are called in their order here."""

    def __init__(
        self, index: int, num_pieces: int, bounds: Sequence[tuple[int, int]], codec: Codec, transport: Transport
    ) -> None:
        """`bounds`: of this piece of each chunk, in the gradient."""
        rank, world_size = transport.rank, transport.world_size
        sizes = [codec.payload_bytes(stop - start) for start, stop in bounds]
        self._index = index
        self._num_pieces = num_pieces
        self._bounds = bounds
        self._codec = codec
        self._transport = transport
        # By chunk: what this rank sends of it in the first phase and receives of it in the second.
        self._of_chunk = [new_message(size) for size in sizes]
        # By peer: what it sends of the chunk that this rank owns. The entry of this rank holds the encoded sum.
        self._of_own = [new_message(sizes[rank]) for _ in sizes]
        self._coming: dict[int, Handle] = {}
        self._going: dict[int, Handle] = {}
        self.sent_bytes = sum(sizes) - sizes[rank] + (world_size - 1) * (2 * HEADER_BYTES + sizes[rank])

    def own(self, step: Step) -> Tensor:
        """The part of the gradient that this rank sums."""
        return step.grad_N[slice(*self._bounds[self._transport.rank])]

    def expect(self) -> None:
        """Begin to receive what the others send of the own chunk."""
        for peer in self._transport.peers:
            self._coming[peer] = self._transport.start({}, {peer: self._of_own[peer]})

    def scatter(self, step: Step) -> None:
        """Send the others what they own, each as soon as it is encoded."""
        for peer in self._transport.peers:
            message, (start, stop) = self._of_chunk[peer], self._bounds[peer]
            self._codec.encode(
                step.grad_N[start:stop], payload_of(message), self._key(step, peer), step.memory_of((start, stop))
            )
            seal(message, step.stamp, stop - start)
            step.phases.lap("encode")
            if not self._going:
                step.phases.begin_round()
            self._going[peer] = self._transport.start({peer: message}, {})
            step.phases.lap("exchange")

    def reduce(self, step: Step) -> None:
        """Add what the others sent to the own part."""
        own, phases = self.own(step), step.phases
        # In rank order, whoever comes first: sums depend on it.
        for peer in sorted(self._transport.peers):
            self._receive(peer, phases)
            check(self._of_own[peer], step.stamp, own.numel(), self._transport.ranks[peer])
            self._codec.decode(payload_of(self._of_own[peer]), own, add=True)
            phases.lap("decode")

    def share(self, step: Step, num_debtors: float) -> None:
        """Send the own part to the others, and use what they get. `num_debtors` owe what that drops."""
        rank, phases = self._transport.rank, step.phases
        own, average = self.own(step), self._of_own[rank]
        key, memory = self._key(step, rank), step.memory_of(self._bounds[rank])
        encode_share(self._codec, own, payload_of(average), key, memory, num_debtors)
        seal(average, replace(step.stamp, phase=1), own.numel())
        phases.lap("encode")
        if self._transport.peers:
            phases.begin_round()
        self._going[rank] = self._transport.start(dict.fromkeys(self._transport.peers, average), {})
        for peer in self._transport.peers:
            # Not before it is sent: what comes overwrites it.
            self._transport.finish(self._going.pop(peer))
            self._coming[peer] = self._transport.start({}, {peer: self._of_chunk[peer]})
        phases.lap("exchange")
        self._codec.decode(payload_of(average), own, add=False)
        phases.lap("decode")

    def gather(self, step: Step) -> None:
        """Take over the averages of the others' chunks."""
        second = replace(step.stamp, phase=1)
        for peer in self._transport.peers:
            start, stop = self._bounds[peer]
            self._receive(peer, step.phases)
            check(self._of_chunk[peer], second, stop - start, self._transport.ranks[peer])
            self._codec.decode(payload_of(self._of_chunk[peer]), step.grad_N[start:stop], add=False)
            step.phases.lap("decode")
        self._transport.finish(self._going.pop(self._transport.rank))
        step.phases.lap("exchange")

    def _receive(self, peer: int, phases: Phases) -> None:
        self._transport.finish(self._coming.pop(peer))
        phases.lap("exchange")
        if not self._coming:
            phases.end_round()

    def _key(self, step: Step, chunk: int) -> int:
        """A rank encodes each piece once a step, its own in the second phase: the piece tells random numbers apart."""
        piece = chunk * self._num_pieces + self._index
        return ops.message_key(step.seed, step.stamp.step, step.stamp.group, self._transport.rank, piece)
