"""Tree: reduce-scatter by recursive halving, then allgather by recursive doubling (Rabenseifner 2004), compressed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import HEADER_BYTES, Stamp, check, payload_of, seal
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.sra import chunk_bounds, encode_share
from cgx_ray.collectives.transport import Transport
from cgx_ray.runtime_ext import ops

# Payloads are viewed as numbers of up to 4 bytes, in a buffer that they share.
_ALIGNMENT = 4


@dataclass(frozen=True, slots=True)
class _Halving:
    """One exchange of the way down: chunks [start, stop) that go to `peer`, and those that come and stay."""

    peer: int
    given: tuple[int, int]
    kept: tuple[int, int]


def _num_places(world_size: int) -> int:
    """The largest power of two that is not above `world_size`: so many ranks halve, the others are their guests."""
    return 1 << (world_size.bit_length() - 1)


def _rank_at(place: int, world_size: int) -> int:
    """Of the first ranks every second one is a guest of the next, so that a guest is next to its host."""
    num_guests = world_size - _num_places(world_size)
    return 2 * place + 1 if place < num_guests else place + num_guests


def _halvings(place: int, world_size: int) -> list[_Halving]:
    start, stop = 0, _num_places(world_size)
    halvings = []
    while stop - start > 1:
        distance = (stop - start) // 2
        lower, upper = (start, start + distance), (start + distance, stop)
        given, kept = (lower, upper) if place & distance else (upper, lower)
        halvings.append(_Halving(_rank_at(place ^ distance, world_size), given, kept))
        start, stop = kept
    return halvings


class Tree:
    """Cost 2a log N + 2(N-1)/N m b for N a power of two; else, P the next one below, 2a log P + 2(P-1)/P m b and the
    fold, 2a + 2 m b: N - P guests give their gradients to hosts first and get the average from them at the end.

    Each of P ranks owns one chunk of P. On the way down it exchanges halves of what it still has: it gives one away and
    adds what comes to the other, until only its chunk is left; on the way up the same peers give it everything back.
    Division, encodings and feedback are those of `Ring`: chunk by chunk, so that what `prefix` keeps of one is the same
    at each level.
    """

    def __init__(self, codec: Codec, numel: int, transport: Transport) -> None:
        self._codec = codec
        self._transport = transport
        rank, world_size = transport.rank, transport.world_size
        self._owners = ranks = [_rank_at(place, world_size) for place in range(_num_places(world_size))]
        # A guest has a host, the next rank, and no place of its own; a host may have a guest, the rank before.
        self._host = rank + 1 if rank not in ranks else None
        self._guest = rank - 1 if rank > 0 and rank - 1 not in ranks else None
        self._own = ranks.index(rank) if self._host is None else 0
        self._halvings = _halvings(self._own, world_size) if self._host is None else []
        self._bounds = chunk_bounds(numel, len(ranks), codec.granule)
        sizes = [HEADER_BYTES + codec.payload_bytes(stop - start) for start, stop in self._bounds]
        self._offsets = [0, *itertools.accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)]
        # One message a chunk, side by side, so that any run of them can be sent as it lies.
        self._messages = torch.zeros(self._offsets[-1], dtype=torch.uint8)
        self._of_chunk = [self._messages[at : at + size] for at, size in zip(self._offsets, sizes, strict=False)]
        exchanged = sum(self._run(*run).numel() for halving in self._halvings for run in (halving.given, halving.kept))
        folded = self._messages.numel() * ((self._host is not None) + (self._guest is not None))
        self.sent_bytes = exchanged + folded

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """See `Exchange.run`."""
        grad_N.div_(self._transport.world_size)
        second = replace(stamp, phase=1)
        if self._host is not None:
            self._encode((0, len(self._bounds)), grad_N, memory, stamp, seed)
            phases.lap("encode")
            self._transport.exchange({self._host: self._messages}, {})
            self._transport.exchange({}, {self._host: self._messages})
        else:
            self._reduce(grad_N, memory, stamp, seed, phases)
            self._encode((self._own, self._own + 1), grad_N, memory, second, seed)
            phases.lap("encode")
            for halving in reversed(self._halvings):
                self._transport.exchange(
                    {halving.peer: self._run(*halving.kept)}, {halving.peer: self._run(*halving.given)}
                )
            if self._guest is not None:
                self._transport.exchange({self._guest: self._messages}, {})
        phases.lap("exchange")
        for chunk, owner in enumerate(self._owners):
            self._decode((chunk, chunk + 1), grad_N, second, owner, add=False)
        phases.lap("decode")

    def _reduce(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """Add to the own chunk of `grad_N` what all others have of it."""
        if self._guest is not None:
            self._transport.exchange({}, {self._guest: self._messages})
            phases.lap("exchange")
            self._decode((0, len(self._bounds)), grad_N, stamp, self._guest, add=True)
            phases.lap("decode")
        for halving in self._halvings:
            self._encode(halving.given, grad_N, memory, stamp, seed)
            phases.lap("encode")
            self._transport.exchange(
                {halving.peer: self._run(*halving.given)}, {halving.peer: self._run(*halving.kept)}
            )
            phases.lap("exchange")
            self._decode(halving.kept, grad_N, stamp, halving.peer, add=True)
            phases.lap("decode")

    def _run(self, start: int, stop: int) -> Tensor:
        """The messages of chunks [start, stop)."""
        return self._messages[self._offsets[start] : self._offsets[stop]]

    def _encode(self, run: tuple[int, int], grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int) -> None:
        rank, world_size = self._transport.rank, self._transport.world_size
        for chunk in range(*run):
            start, stop = self._bounds[chunk]
            # A rank encodes each chunk once a step: the chunk tells random numbers apart.
            key = ops.message_key(seed, stamp.step, stamp.group, rank, chunk)
            part = memory.part(start, stop) if memory is not None else None
            encode_share(self._codec, grad_N[start:stop], payload_of(self._of_chunk[chunk]), key, part, world_size)
            seal(self._of_chunk[chunk], stamp, stop - start)

    def _decode(self, run: tuple[int, int], grad_N: Tensor, stamp: Stamp, sender: int, *, add: bool) -> None:
        for chunk in range(*run):
            start, stop = self._bounds[chunk]
            check(self._of_chunk[chunk], stamp, stop - start, self._transport.ranks[sender])
            self._codec.decode(payload_of(self._of_chunk[chunk]), grad_N[start:stop], add=add)
