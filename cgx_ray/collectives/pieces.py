"""Chunks of a gradient, their pieces, and how the exchanges of several pieces overlap.

Schemes cut a gradient into chunks, one per rank. Chunks of more than `PIECE_BYTES` encoded are cut once more, into
pieces with one message and one header each: while one piece is encoded or decoded, messages of the others travel. On a
device a piece costs the host as much as it does on a CPU, but it is encoded in microseconds: pieces are longer there.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cgx_ray.codecs.codec import HOST, Codec
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport.transport_like import Handle, TransportLike
from cgx_ray.plan import DEVICE_PIECE_BYTES, PIECE_BYTES
from cgx_ray.runtime_ext.streams import Mark


def chunk_bounds(numel: int, num_chunks: int, granule: int) -> list[tuple[int, int]]:
    """Cut [0, numel) into `num_chunks` near-equal runs at multiples of `granule`. Later ones may be empty."""
    num_granules = -(-numel // granule)
    cuts = [min(numel, granule * (num_granules * i // num_chunks)) for i in range(num_chunks)] + [numel]
    return list(itertools.pairwise(cuts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The same piece of every chunk.

    bounds  by chunk, the elements [start, stop) of the gradient that belong to the piece
    """

    index: int
    num_pieces: int
    bounds: tuple[tuple[int, int], ...]

    def number(self, chunk: int) -> int:
        """Number of this piece of `chunk` among all pieces of all chunks, for `Step.key`."""
        return chunk * self.num_pieces + self.index


def cut(codec: Codec, chunks: Sequence[tuple[int, int]], transport: TransportLike) -> list[Piece]:
    """Cut every chunk into the same number of pieces, each of about `PIECE_BYTES` or `DEVICE_PIECE_BYTES` encoded.

    chunks  by chunk, its elements [start, stop) of the gradient

    A transport on which few messages may be under way gets one piece.
    """
    longest_bytes = max(codec.payload_bytes(stop - start) for start, stop in chunks)
    piece_bytes = PIECE_BYTES if codec.device == HOST else DEVICE_PIECE_BYTES
    num_pieces = max(1, -(-longest_bytes // piece_bytes)) if transport.takes_many else 1
    of_chunk = [
        [(start + first, start + last) for first, last in chunk_bounds(stop - start, num_pieces, codec.granule)]
        for start, stop in chunks
    ]
    return [
        Piece(index=index, num_pieces=num_pieces, bounds=bounds)
        for index, bounds in enumerate(zip(*of_chunk, strict=True))
    ]


def take_turns(lanes: Iterable[Iterator[Handle]], phases: Phases) -> Iterator[Handle]:
    """Run the exchanges of all pieces in turns, so that one is coded while messages of the others are under way.

    Yields each handle to wait for.

    lanes  by piece, its exchange: a generator that yields each handle it waits for, and is resumed when that is done

    Lanes take turns in a fixed order. So between two ranks the first messages of all lanes go before their second
    messages, and the n-th receive meets the n-th send.
    """
    waiting: deque[tuple[Iterator[Handle], Handle]] = deque()

    def resume(lane: Iterator[Handle]) -> None:
        handle = next(lane, None)
        if handle is not None:
            if not isinstance(handle, Mark):
                phases.begin_round()
            waiting.append((lane, handle))

    for lane in lanes:
        resume(lane)
    while waiting:
        lane, handle = waiting.popleft()
        yield handle
        if not isinstance(handle, Mark):
            phases.end_round()
        resume(lane)
