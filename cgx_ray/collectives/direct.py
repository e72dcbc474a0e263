"""Direct reduce-scatter and all-gather, compressed: every rank sends its messages to all others at once.

The gradient has one chunk per rank, and each rank owns one chunk.

1. Reduce-scatter, a + (N-1)/N m b: every rank encodes the chunks of the others and sends each to its owner. The owner
   adds them to its own chunk.
2. All-gather, a + (N-1)/N m b: every rank encodes its own chunk and sends it to all others. All ranks decode the same
   messages, the sender its own too, so they hold the same bits.

Sums are made in rank order, the owner's own chunk first, whichever message comes first.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from cgx_ray.codecs.codec import Codec
from cgx_ray.codecs.float32_room import in_float32
from cgx_ray.collectives.parcel import Parcel, Step
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport.transport_like import Handle, TransportLike


class DirectLane:
    """One piece of every chunk, from its first message to its last.

    Reduce-scatter is `begin`, `expect_parts`, `send_parts`, `add_parts`. All-gather is `begin` unless it follows a
    reduce-scatter, `send_own`, `use_own`, `take_chunks`, with `expect_chunks` before or after `send_own`.
    `finish_sends` ends either. Methods that wait are iterators that yield each handle to wait for.

    scattered_bytes, gathered_bytes  sent by this rank in either half, headers included
    """

    def __init__(
        self, bounds: Sequence[tuple[int, int]], numbers: Sequence[int], codec: Codec, transport: TransportLike
    ) -> None:
        """Both by chunk.

        bounds   elements [start, stop) of the gradient
        numbers  for `Step.key`: a rank encodes each chunk of this lane once per step
        """
        self._bounds = bounds
        self._numbers = numbers
        self._codec = codec
        self._transport = transport
        # By chunk: the part of it that this rank sends to the owner, then the owner's message with the sum.
        self._of_chunk = [Parcel(codec, stop - start) for start, stop in bounds]
        self._coming: dict[int, Handle] = {}
        self._going: dict[int, Handle] = {}
        own_bytes = self._of_chunk[transport.rank].num_bytes
        self.scattered_bytes = sum(parcel.num_bytes for parcel in self._of_chunk) - own_bytes
        self.gathered_bytes = len(transport.peers) * own_bytes

    @cached_property
    def _of_own(self) -> dict[int, Parcel]:
        """Return, by peer, its message with its part of the own chunk."""
        start, stop = self._bounds[self._transport.rank]
        return {peer: Parcel(self._codec, stop - start) for peer in self._transport.peers}

    def begin(self, step: Step) -> None:
        """With codec none, let messages lie in the gradient."""
        for bounds, parcel in zip(self._bounds, self._of_chunk, strict=True):
            parcel.borrow(step.run_of(bounds))

    def own(self, step: Step) -> Tensor:
        """Return the part of the gradient that this rank owns."""
        return step.run_of(self._bounds[self._transport.rank])

    def expect_parts(self) -> None:
        """Begin to receive the others' parts of the own chunk."""
        for peer, parcel in self._of_own.items():
            self._coming[peer] = self._transport.start({}, {peer: parcel.parts})

    def send_parts(self, step: Step) -> None:
        """Send the others their chunks, each as soon as it is encoded."""
        rank = self._transport.rank
        for peer in self._transport.peers:
            parcel, bounds = self._of_chunk[peer], self._bounds[peer]
            key = step.key(rank, self._numbers[peer])
            parcel.encode(step.run_of(bounds), step.stamp, key, step.memory_of(bounds))
            step.phases.lap("encode")
            if not self._going:
                step.phases.begin_round()
            self._going[peer] = self._transport.start({peer: parcel.parts}, {})
            step.phases.resume()

    def add_parts(self, step: Step) -> Generator[Handle, None, Tensor]:
        """Add the others' parts to the own chunk; return the sum, float32.

        It is in the gradient or, if that has 16 bits, in `float32_room`. Then use it before waiting for anything.
        """
        peers = sorted(self._transport.peers)
        is_wide = step.grad_N.dtype == torch.float32
        if not is_wide:
            # Everybody on this thread uses the same room, so nothing may be waited for while the sum is in it.
            for peer in peers:
                yield from self._receive(peer, step.phases)
        sum_N = in_float32(self.own(step))
        # In rank order, whichever comes first: the bits of the sum depend on the order.
        for peer in peers:
            if is_wide:
                yield from self._receive(peer, step.phases)
            self._of_own[peer].decode(sum_N, step.stamp, self._transport.ranks[peer], add=True)
            step.phases.lap("decode")
        return sum_N

    def expect_chunks(self) -> Iterator[Handle]:
        """Begin to receive the others' chunks."""
        for peer in self._transport.peers:
            # A received chunk overwrites the message that was sent to its owner, so that one must be gone first.
            if peer in self._going:
                yield self._going.pop(peer)
            self._coming[peer] = self._transport.start({}, {peer: self._of_chunk[peer].parts})

    def send_own(self, step: Step, share_N: Tensor, residual_scale: float) -> None:
        """Encode `share_N`, the own chunk or its average, and send it to all others. See `Parcel.encode_share`."""
        rank, peers, phases = self._transport.rank, self._transport.peers, step.phases
        key, memory = step.key(rank, self._numbers[rank]), step.memory_of(self._bounds[rank])
        self._of_chunk[rank].encode_share(share_N, step.stamp, key, memory, residual_scale)
        phases.lap("encode")
        if peers:
            phases.begin_round()
        self._going[rank] = self._transport.start(dict.fromkeys(peers, self._of_chunk[rank].parts), {})

    def use_own(self, step: Step) -> None:
        """Replace the own chunk by the decoded message that the others get."""
        step.phases.resume()
        self._of_chunk[self._transport.rank].use(self.own(step))
        step.phases.lap("decode")

    def take_chunks(self, step: Step) -> Iterator[Handle]:
        """Replace the others' chunks by their owners' messages."""
        for peer in self._transport.peers:
            yield from self._receive(peer, step.phases)
            run_N = step.run_of(self._bounds[peer])
            self._of_chunk[peer].decode(run_N, step.stamp, self._transport.ranks[peer], add=False)
            step.phases.lap("decode")

    def finish_sends(self) -> Iterator[Handle]:
        """Wait until every message has left, so that its memory may change."""
        yield from self._going.values()
        self._going.clear()

    def _receive(self, peer: int, phases: Phases) -> Iterator[Handle]:
        yield self._coming.pop(peer)
        if not self._coming:
            phases.end_round()
