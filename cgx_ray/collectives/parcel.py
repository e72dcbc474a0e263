"""A run of a gradient as a message, and many of them under way: what the schemes with chunks are made of."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cgx_ray.codecs.cast import Raw
from cgx_ray.codecs.codec import HOST, Codec, Memory
from cgx_ray.codecs.wire import HEADER_BYTES, Message, Stamp
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport import Handle, Transport
from cgx_ray.errors import PlanError
from cgx_ray.plan import MAX_PAYLOAD_BYTES, PIECE_BYTES
from cgx_ray.runtime_ext import ops


def chunk_bounds(numel: int, num_chunks: int, granule: int) -> list[tuple[int, int]]:
    """Cut [0, numel) into `num_chunks` near-equal runs at multiples of `granule`. Later ones may be empty."""
    num_granules = -(-numel // granule)
    cuts = [min(numel, granule * (num_granules * i // num_chunks)) for i in range(num_chunks)] + [numel]
    return list(itertools.pairwise(cuts))


def cut(codec: Codec, chunks: Sequence[tuple[int, int]], transport: Transport) -> list[tuple[tuple[int, int], ...]]:
    """Cut all `chunks` into as many pieces, of about `PIECE_BYTES` encoded; by piece, its bounds in every chunk.

    One piece only where few messages may be under way.
    """
    longest_bytes = max(codec.payload_bytes(stop - start) for start, stop in chunks)
    num_pieces = max(1, -(-longest_bytes // PIECE_BYTES)) if transport.takes_many else 1
    of_chunk = [
        [(start + first, start + last) for first, last in chunk_bounds(stop - start, num_pieces, codec.granule)]
        for start, stop in chunks
    ]
    return list(zip(*of_chunk, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What `Exchange.run` gets."""

    grad_N: Tensor  # noqa: N815 - tensors end in their dimensions
    memory: Memory | None
    stamp: Stamp
    seed: int
    phases: Phases

    def run_of(self, bounds: tuple[int, int]) -> Tensor:
        return self.grad_N[bounds[0] : bounds[1]]

    def memory_of(self, bounds: tuple[int, int]) -> Memory | None:
        return self.memory.part(*bounds) if self.memory is not None else None

    def key(self, rank: int, which: int) -> int:
        """Of the random numbers of the encoding number `which` that `rank` does in this step."""
        return ops.message_key(self.seed, self.stamp.step, self.stamp.group, rank, which)


class Parcel:
    """A message of `numel` elements: 32 bytes of header, then what `codec` makes of them.

    parts  what to send, or to receive into

    With codec none a parcel may borrow memory of the gradient: then it is sent from there and received into it, and
    nothing is copied. Raises PlanError if the header cannot say how long the payload is.
    """

    def __init__(self, codec: Codec, numel: int, room: Tensor | None = None) -> None:
        """`room`: bytes on the host to lie in, `num_bytes` or more, if not its own. Not both borrowed and with room."""
        payload_bytes = codec.payload_bytes(numel)
        if payload_bytes > MAX_PAYLOAD_BYTES:
            raise PlanError(
                f"{numel} elements make a message of {payload_bytes} bytes with codec {codec.spec}; at most "
                f"{MAX_PAYLOAD_BYTES} fit into one, so give smaller groups (group_bytes)"
            )
        self.num_bytes = HEADER_BYTES + payload_bytes
        self._codec = codec
        self._message = Message(payload_bytes, codec.device, room)
        # Two messages, on both ends, although only one of them may have borrowed. Gloo sends nothing that is empty.
        is_two = isinstance(codec, Raw) and numel > 0
        self._can_borrow = is_two and codec.device == HOST
        self._is_borrowed = False
        self.parts: tuple[Tensor, ...] = (self._message.wire,)
        if is_two:
            self.parts = (self._message.header, self._message.body)

    def borrow(self, run_N: Tensor) -> None:
        """Codec none: have the payload in `run_N` itself from now on. Other codecs need memory of their own."""
        if self._can_borrow:
            self._message.borrow(run_N.view(torch.uint8))
            self._is_borrowed = True
            self.parts = (self._message.header, self._message.body)

    def encode(self, run_N: Tensor, stamp: Stamp, key: int, memory: Memory | None) -> None:
        """Fill in `run_N`, and what is owed of it."""
        if not self._is_borrowed:
            self._codec.encode(run_N, self._message.payload, key, memory)
        self._message.seal(stamp, run_N.numel())

    def encode_share(self, share_N: Tensor, stamp: Stamp, key: int, memory: Memory | None, num_debtors: float) -> None:
        """Fill in an average, or what some ranks' gradients are of it, together with what this rank owes.

        share_N  (N,) float32, a sum divided by `num_debtors`; changed in place
        memory   in units of the sum: what is owed goes in divided, and what the encoding drops comes out multiplied
        """
        if memory is None:
            self.encode(share_N, stamp, key, None)
            return
        if memory.residual_N is not None:
            share_N.add_(memory.residual_N, alpha=1 / num_debtors)
        self.encode(share_N, stamp, key, memory.without_debt())
        memory.next_N.mul_(num_debtors)

    def decode(self, run_N: Tensor, stamp: Stamp, sender: int, *, add: bool, key: int = 0) -> None:
        """Write what came to `run_N`, or add it. Raises WireError if it is broken or of another plan."""
        self._message.check(stamp, run_N.numel(), sender)
        self.use(run_N, add=add, key=key)

    def use(self, run_N: Tensor, *, add: bool = False, key: int = 0) -> None:
        """As `decode`, of what this rank encoded itself."""
        if not self._is_borrowed:
            self._codec.decode(self._message.payload, run_N, add=add, key=key)


def parts_of(parcels: Iterable[Parcel]) -> tuple[Tensor, ...]:
    """What to send, or to receive into, for all of `parcels`."""
    return tuple(part for parcel in parcels for part in parcel.parts)


def run_lanes(lanes: Iterable[Iterator[Handle]], transport: Transport, phases: Phases) -> None:
    """Run what each piece of a gradient goes through, so that one is coded while messages of the others are under way.

    A lane gives out what it waits for, and goes on when that is done. They take turns, so between two ranks the first
    messages of all lanes go before the second ones, as each receive needs.
    """
    waiting: deque[tuple[Iterator[Handle], Handle]] = deque()

    def go_on(lane: Iterator[Handle]) -> None:
        handle = next(lane, None)
        if handle is not None:
            phases.lap("exchange")
            phases.begin_round()
            waiting.append((lane, handle))

    for lane in lanes:
        go_on(lane)
    while waiting:
        lane, handle = waiting.popleft()
        transport.finish(handle)
        phases.lap("exchange")
        phases.end_round()
        go_on(lane)
