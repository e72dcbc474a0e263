"""Collectives of sharded training (FSDP2): the two halves of `collectives.direct`, each by itself.

R ranks, S elements of a shard
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.direct import DirectLane
from cgx_ray.collectives.parcel import Step
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.pieces import cut
from cgx_ray.collectives.transport.transport import Transport
from cgx_ray.collectives.transport.transport_like import Handle, finish_all


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Some layers that a collective moves. Several `Rows` travel in one round.

    rows_RS  (R, S) float32, contiguous; row j is the shard of rank j
    memory   of all rows, one after the other; None for a codec that keeps nothing
    """

    codec: Codec
    rows_RS: Tensor  # noqa: N815 - tensors end in their dimensions
    stamp: Stamp
    memory: Memory | None = None


def reduce_scatter(parts: Sequence[Rows], transport: Transport, seed: int, phases: Phases) -> int:
    """Add the other ranks' parts of this rank's row to it; the other rows stay. Return the bytes sent.

    Cost a + (N-1)/N m b. With memory, the errors of the messages become residuals.

    Raises WireError on a message that is broken or of another step, TransportError if a peer is gone.
    """
    lanes = _lanes(parts, transport, seed, phases)
    finish_all(_reduce_scatter(lanes, transport), transport, phases.resume)
    return sum(lane.scattered_bytes for lane, _ in lanes)


def _reduce_scatter(lanes: Sequence[tuple[DirectLane, Step]], transport: Transport) -> Iterator[Handle]:
    # Receives first: early messages then go straight to their memory.
    for lane, step in lanes:
        transport.group_index = step.stamp.group
        lane.expect_parts()
    for lane, step in lanes:
        transport.group_index = step.stamp.group
        yield from lane.send_parts(step)
    for lane, step in lanes:
        yield from lane.add_parts(step)
    for lane, _ in lanes:
        yield from lane.finish_sends()


def all_gather(parts: Sequence[Rows], transport: Transport, seed: int, phases: Phases) -> int:
    """Replace every row by the decoded message of its rank, this rank's own too. Return the bytes sent.

    Cost a + (N-1) m b, m the bytes of one encoded row. All ranks decode the same messages, so they hold the same bits.

    Raises as `reduce_scatter` does.
    """
    lanes = _lanes(parts, transport, seed, phases)
    finish_all(_all_gather(lanes, transport), transport, phases.resume)
    return sum(lane.gathered_bytes for lane, _ in lanes)


def _all_gather(lanes: Sequence[tuple[DirectLane, Step]], transport: Transport) -> Iterator[Handle]:
    for lane, step in lanes:
        transport.group_index = step.stamp.group
        yield from lane.expect_chunks()
    for lane, step in lanes:
        transport.group_index = step.stamp.group
        yield from lane.send_own(step, residual_scale=1)
        lane.use_own(step)
    for lane, step in lanes:
        yield from lane.take_chunks(step)
    for lane, _ in lanes:
        yield from lane.finish_sends()


def _lanes(parts: Sequence[Rows], transport: Transport, seed: int, phases: Phases) -> list[tuple[DirectLane, Step]]:
    """Cut long rows into pieces and let messages with codec none lie in the rows. Each row is one chunk.

    The channel of each part is its stamp's group: messages with and without a checksum by the mesh do not mix.
    """
    lanes = []
    for rows in parts:
        num_rows, width = rows.rows_RS.shape
        step = Step(grad_N=rows.rows_RS.view(-1), memory=rows.memory, stamp=rows.stamp, seed=seed, phases=phases)
        chunks = [(row * width, (row + 1) * width) for row in range(num_rows)]
        for piece in cut(rows.codec, chunks, transport):
            numbers = [piece.index * num_rows + row for row in range(num_rows)]
            lane = DirectLane(piece.bounds, numbers, rows.codec, transport)
            lane.begin(step)
            lanes.append((lane, step))
    return lanes
