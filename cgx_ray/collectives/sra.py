"""SRA: scatter-reduce, then all-gather, direct and compressed both ways (CGX, section 4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.direct import DirectLane
from cgx_ray.collectives.exchange import Exchange
from cgx_ray.collectives.parcel import Step
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.pieces import chunk_bounds, cut
from cgx_ray.collectives.transport.transport_like import Handle, TransportLike


class Sra(Exchange):
    """Both halves of `collectives.direct`, with the division by N in between. Cost 2a + 2(N-1)/N m b.

    With feedback a rank keeps what its messages to the owners dropped and, for its own chunk, N times what encoding the
    average dropped: the residual goes into the next sum of N gradients, which is divided by N.

    Pieces overlap: the next one is encoded while one is under way, and those that have come in are summed, encoded
    again and sent back while the others are still coming.
    """

    takes_16_bit = True

    def __init__(
        self, codec: Codec, numel: int, transport: TransportLike, chunks: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """`chunks`: by rank, the elements [start, stop) that it owns, empty ones last; left out, equal shares."""
        super().__init__(transport)
        chunks = chunks or chunk_bounds(numel, transport.world_size, codec.granule)
        self._lanes = [
            DirectLane(piece.bounds, [piece.number(chunk) for chunk in range(len(chunks))], codec, transport)
            for piece in cut(codec, chunks, transport)
        ]
        self.sent_bytes = sum(lane.scattered_bytes + lane.gathered_bytes for lane in self._lanes)

    def turns(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> Iterator[Handle]:
        """See `Exchange.turns`."""
        first = Step(grad_N=grad_N, memory=memory, stamp=stamp, seed=seed, phases=phases)
        second = _second(first)
        yield from self.scatter(first)
        for lane in self._lanes:
            yield from lane.send_average(first, second)
            yield from lane.expect_chunks()
            lane.use_own(second)
        yield from self._gather(second)

    def scatter(self, step: Step) -> Iterator[Handle]:
        """Send the others what they own of `step.grad_N`."""
        # Receives first: early messages then go straight to their memory.
        for lane in self._lanes:
            lane.begin(step)
            lane.expect_parts()
        for lane in self._lanes:
            yield from lane.send_parts(step)

    def reduce(self, step: Step) -> Iterator[Handle]:
        """After `scatter`: replace the own chunk, float32, by its sum over ranks."""
        for lane in self._lanes:
            yield from lane.add_parts(step)

    def share(self, step: Step, residual_scale: float) -> Iterator[Handle]:
        """After `reduce`: send the own chunk to the others, encoded, and take over theirs.

        `step.memory` gets `residual_scale` times what the encoding drops.
        """
        second = _second(step)
        for lane in self._lanes:
            yield from lane.send_own(second, residual_scale)
            yield from lane.expect_chunks()
            lane.use_own(second)
        yield from self._gather(second)

    def _gather(self, step: Step) -> Iterator[Handle]:
        for lane in self._lanes:
            yield from lane.take_chunks(step)
            yield from lane.finish_sends()


def _second(step: Step) -> Step:
    return replace(step, stamp=replace(step.stamp, phase=1))
