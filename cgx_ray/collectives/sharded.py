"""Collectives of sharded training, direct and compressed: a reduce-scatter and an all-gather.

R ranks, S elements of a shard
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.parcel import Parcel, cut
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport import Handle, Transport
from cgx_ray.runtime_ext import ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What a collective moves of some layers. Several of them travel in one round.

    rows_RS  (R, S) float32, contiguous; row j is the shard of rank j
    memory   of all rows, one after the other; None for a codec that keeps nothing
    """

    codec: Codec
    rows_RS: Tensor  # noqa: N815 - tensors end in their dimensions
    stamp: Stamp
    memory: Memory | None = None


class _Piece:
    """The same piece of every row: one message a row."""

    def __init__(self, rows: Rows, index: int, bounds: tuple[int, int], seed: int, rank: int) -> None:
        self._rows = rows
        self._index = index
        self._bounds = bounds
        self._seed = seed
        self._rank = rank

    def new_message(self) -> Parcel:
        start, stop = self._bounds
        return Parcel(self._rows.codec, stop - start)

    def encoded(self, row: int) -> Parcel:
        """The message that holds this piece of `row`."""
        rows, (start, stop) = self._rows, self._bounds
        num_rows, numel = rows.rows_RS.shape
        # A rank encodes each piece of each row at most once a step, its own for the all-gather.
        key = ops.message_key(self._seed, rows.stamp.step, rows.stamp.group, self._rank, self._index * num_rows + row)
        memory = rows.memory.part(row * numel + start, row * numel + stop) if rows.memory is not None else None
        message = self.new_message()
        message.encode(rows.rows_RS[row, start:stop], rows.stamp, key, memory)
        return message

    def decode(self, message: Parcel, sender: int, row: int, *, add: bool) -> None:
        """Write what `sender` sent to this piece of `row`, or add it."""
        start, stop = self._bounds
        message.decode(self._rows.rows_RS[row, start:stop], self._rows.stamp, sender, add=add)


def _cut(parts: Sequence[Rows], transport: Transport, seed: int) -> list[_Piece]:
    """Long rows in pieces, as in `Sra`: the next one is encoded while one is under way."""
    return [
        _Piece(rows, index, bounds, seed, transport.rank)
        for rows in parts
        for index, (bounds,) in enumerate(cut(rows.codec, [(0, rows.rows_RS.shape[1])], transport))
    ]


class _Round:
    """Messages between all ranks that are under way together."""

    def __init__(self, pieces: Sequence[_Piece], transport: Transport, phases: Phases) -> None:
        self._transport = transport
        self._phases = phases
        self._going: list[Handle] = []
        self._sent_bytes = 0
        transport.begin_round()
        # Receives first: what comes early goes straight to where it belongs.
        self._coming = {
            (piece, peer): (message := piece.new_message(), transport.start({}, {peer: message.parts}))
            for piece in pieces
            for peer in transport.peers
        }

    def send(self, message: Parcel, peers: Sequence[int]) -> None:
        """Begin to send a message that has just been encoded."""
        self._phases.lap("encode")
        if not self._going:
            self._phases.begin_round()
        self._going.append(self._transport.start(dict.fromkeys(peers, message.parts), {}))
        self._sent_bytes += len(peers) * message.num_bytes
        self._phases.lap("exchange")

    def receive(self, piece: _Piece, peer: int) -> Parcel:
        message, handle = self._coming.pop((piece, peer))
        self._transport.finish(handle)
        self._phases.lap("exchange")
        if not self._coming:
            self._phases.end_round()
        return message

    def end(self) -> int:
        """Return the bytes sent, once they are."""
        for handle in self._going:
            self._transport.finish(handle)
        self._phases.lap("exchange")
        return self._sent_bytes


def reduce_scatter(parts: Sequence[Rows], transport: Transport, seed: int, phases: Phases) -> int:
    """Add to this rank's row what the other ranks have of it; their rows stay. Returns the bytes sent.

    Cost a + (N-1)/N m b, the first phase of `Sra`: every rank sends each peer the row that is the peer's, encoded. Sums
    are made in rank order, this rank's own first. With memory, what the messages drop will be owed.

    Raises WireError on a message that is broken or of another step, TransportError if a peer is gone.
    """
    pieces = _cut(parts, transport, seed)
    round_ = _Round(pieces, transport, phases)
    for piece in pieces:
        for peer in transport.peers:
            round_.send(piece.encoded(peer), [peer])
    for piece in pieces:
        for peer in sorted(transport.peers):
            piece.decode(round_.receive(piece, peer), peer, transport.rank, add=True)
            phases.lap("decode")
    return round_.end()


def all_gather(parts: Sequence[Rows], transport: Transport, seed: int, phases: Phases) -> int:
    """Replace every row by what its rank's message holds of it, this rank's own too. Returns the bytes sent.

    Cost a + (N-1) m b, m the encoded row. All ranks decode the same messages, so they hold the same bits.

    Raises as `reduce_scatter` does.
    """
    pieces = _cut(parts, transport, seed)
    round_ = _Round(pieces, transport, phases)
    for piece in pieces:
        message = piece.encoded(transport.rank)
        round_.send(message, transport.peers)
        piece.decode(message, transport.rank, transport.rank, add=False)
        phases.lap("decode")
    for piece in pieces:
        for peer in transport.peers:
            piece.decode(round_.receive(piece, peer), peer, peer, add=False)
            phases.lap("decode")
    return round_.end()
