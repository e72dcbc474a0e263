"""SRA, direct: scatter-reduce, then allgather, compressed both ways (CGX, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.parcel import Parcel, Step, chunk_bounds, cut
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport import Handle, Transport


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
        pieces = cut(codec, chunks or chunk_bounds(numel, transport.world_size, codec.granule), transport)
        self._pieces = [_Piece(index, len(pieces), bounds, codec, transport) for index, bounds in enumerate(pieces)]
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

        `step.memory` gets `num_debtors` times what the encoding drops.
        """
        self._transport.begin_round()
        for piece in self._pieces:
            piece.share(step, num_debtors)
        self._gather(step)

    def _gather(self, step: Step) -> None:
        for piece in self._pieces:
            piece.gather(step)


class _Piece:
    """The same piece of every chunk, from its first message to its last. Its methods are called in their order here."""

    def __init__(
        self, index: int, num_pieces: int, bounds: Sequence[tuple[int, int]], codec: Codec, transport: Transport
    ) -> None:
        """`bounds`: of this piece of each chunk, in the gradient."""
        rank, num_peers = transport.rank, len(transport.peers)
        numels = [stop - start for start, stop in bounds]
        self._index, self._num_pieces = index, num_pieces
        self._bounds = bounds
        self._transport = transport
        # By chunk: what this rank sends of it in the first phase and receives of it in the second; of its own the sum.
        self._of_chunk = [Parcel(codec, numel) for numel in numels]
        # By peer: what it sends of the chunk that this rank owns.
        self._of_own = {peer: Parcel(codec, numels[rank]) for peer in transport.peers}
        self._coming: dict[int, Handle] = {}
        self._going: dict[int, Handle] = {}
        own_bytes = self._of_chunk[rank].num_bytes
        self.sent_bytes = sum(parcel.num_bytes for parcel in self._of_chunk) - own_bytes + num_peers * own_bytes

    def own(self, step: Step) -> Tensor:
        """The part of the gradient that this rank sums."""
        return step.run_of(self._bounds[self._transport.rank])

    def expect(self) -> None:
        """Begin to receive what the others send of the own chunk."""
        for peer, parcel in self._of_own.items():
            self._coming[peer] = self._transport.start({}, {peer: parcel.parts})

    def scatter(self, step: Step) -> None:
        """Send the others what they own, each as soon as it is encoded."""
        for peer in self._transport.peers:
            parcel, bounds = self._of_chunk[peer], self._bounds[peer]
            run_N = step.run_of(bounds)
            parcel.borrow(run_N)
            parcel.encode(run_N, step.stamp, self._key(step, peer), step.memory_of(bounds))
            step.phases.lap("encode")
            if not self._going:
                step.phases.begin_round()
            self._going[peer] = self._transport.start({peer: parcel.parts}, {})
            step.phases.lap("exchange")

    def reduce(self, step: Step) -> None:
        """Add what the others sent to the own part."""
        own_N = self.own(step)
        # In rank order, whoever comes first: sums depend on it.
        for peer in sorted(self._transport.peers):
            self._receive(peer, step.phases)
            self._of_own[peer].decode(own_N, step.stamp, self._transport.ranks[peer], add=True)
            step.phases.lap("decode")

    def share(self, step: Step, num_debtors: float) -> None:
        """Send the own part to the others, and use what they get. `num_debtors` owe what that drops."""
        rank, peers, phases, second = self._transport.rank, self._transport.peers, step.phases, _second(step)
        own_N, average = self.own(step), self._of_chunk[rank]
        average.borrow(own_N)
        average.encode_share(own_N, second, self._key(step, rank), step.memory_of(self._bounds[rank]), num_debtors)
        phases.lap("encode")
        if peers:
            phases.begin_round()
        self._going[rank] = self._transport.start(dict.fromkeys(peers, average.parts), {})
        for peer in peers:
            # Not before it is sent: what comes overwrites it.
            self._transport.finish(self._going.pop(peer))
            self._coming[peer] = self._transport.start({}, {peer: self._of_chunk[peer].parts})
        phases.lap("exchange")
        average.use(own_N)
        phases.lap("decode")

    def gather(self, step: Step) -> None:
        """Take over the averages of the others' chunks."""
        for peer in self._transport.peers:
            self._receive(peer, step.phases)
            run_N = step.run_of(self._bounds[peer])
            self._of_chunk[peer].decode(run_N, _second(step), self._transport.ranks[peer], add=False)
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
        return step.key(self._transport.rank, chunk * self._num_pieces + self._index)


def _second(step: Step) -> Stamp:
    return replace(step.stamp, phase=1)
