"""Direct reduce-scatter and all-gather, compressed: every rank sends its messages to all others at once.

The gradient has one chunk per rank, and each rank owns one chunk.

1. Reduce-scatter, a + (N-1)/N m b: every rank encodes the chunks of the others and sends each to its owner. The owner
   adds them to its own chunk.
2. All-gather, a + (N-1)/N m b: every rank encodes its own chunk and sends it to all others. All ranks decode the same
   messages, the sender its own too, so they hold the same bits.

Sums are made in rank order, the owner's own chunk first, whichever message comes first.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from cgx_ray.codecs.codec import HOST, Codec, PayloadRow
from cgx_ray.codecs.float32_room import in_float32
from cgx_ray.collectives.parcel import Parcel, Step, batches_of, copied_out, padded_bytes, seals_by_mesh, side_by_side
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport.transport_like import Handle, TransportLike


class DirectLane:
    """One piece of every chunk, from its first message to its last.

    Reduce-scatter is `begin`, `expect_parts`, `send_parts`, `add_parts`. All-gather is `begin` unless it follows a
    reduce-scatter, `send_own`, `use_own`, `take_chunks`, with `expect_chunks` before or after `send_own`.
    `send_average` is `add_parts`, a division and `send_own`. `finish_sends` ends either. Methods that wait are
    iterators that yield each handle to wait for.

    A codec of the host encodes and decodes long messages one by one, so that none waits for another. Elsewhere each
    call is a launch, so all messages are encoded, copied to the host and decoded together.

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
        self._is_on_host = codec.device == HOST
        self._is_sealed_by_mesh = seals_by_mesh(codec, transport)
        self._start = transport.start_sealed if self._is_sealed_by_mesh else transport.start
        rank, peers = transport.rank, transport.peers
        numels = {chunk: bounds[chunk][1] - bounds[chunk][0] for chunk in (*peers, rank)}
        # By chunk: the part of it that this rank sends to the owner, then the owner's message with the sum.
        room, parcels = side_by_side(codec, list(numels.values()), is_sealed_by_mesh=self._is_sealed_by_mesh)
        self._of_chunk = dict(zip(numels, parcels, strict=True))
        self._of_others = room.part(0, sum(padded_bytes(codec, numels[peer]) for peer in peers))
        self._room = room
        # By the peers whose messages were posted together.
        self._coming: dict[tuple[int, ...], Handle] = {}
        self._going: dict[tuple[int, ...], Handle] = {}
        self.scattered_bytes = sum(self._of_chunk[peer].num_bytes for peer in peers)
        self.gathered_bytes = len(peers) * self._of_chunk[rank].num_bytes
        self._batches = batches_of(peers, [self._of_chunk[peer].num_bytes for peer in peers])
        # In rank order, as they are added.
        self._batches_of_own = batches_of(sorted(peers), [self._of_chunk[rank].num_bytes] * len(peers))

    @cached_property
    def _of_own(self) -> dict[int, Parcel]:
        """Return, by peer, its message with its part of the own chunk. They lie in rank order, as they are added."""
        peers = sorted(self._transport.peers)
        start, stop = self._bounds[self._transport.rank]
        numels = [stop - start] * len(peers)
        _, parcels = side_by_side(self._codec, numels, is_sealed_by_mesh=self._is_sealed_by_mesh)
        return dict(zip(peers, parcels, strict=True))

    def begin(self, step: Step) -> None:
        """With codec none, let messages lie in the gradient."""
        for chunk, parcel in self._of_chunk.items():
            parcel.borrow(step.run_of(self._bounds[chunk]))

    def own(self, step: Step) -> Tensor:
        """Return the part of the gradient that this rank owns."""
        return step.run_of(self._bounds[self._transport.rank])

    def expect_parts(self) -> None:
        """Begin to receive the others' parts of the own chunk."""
        for batch in self._batches_of_own:
            self._coming[batch] = self._start({}, {peer: self._of_own[peer].parts for peer in batch})

    def send_parts(self, step: Step) -> Iterator[Handle]:
        """Send the others their chunks."""
        for batches in self._coded_together():
            peers = itertools.chain(*batches)
            self._codec.encode_rows([self._row(peer, step, step.run_of(self._bounds[peer])) for peer in peers])
            yield from copied_out(self._of_others, step.phases)
            for batch in batches:
                for peer in batch:
                    self._of_chunk[peer].seal(step.stamp)
                step.phases.lap("encode")
                if not self._going:
                    step.phases.begin_round()
                self._going[batch] = self._start({peer: self._of_chunk[peer].parts for peer in batch}, {})
                step.phases.resume()

    def add_parts(self, step: Step) -> Generator[Handle, None, Tensor]:
        """Add the others' parts to the own chunk; return the sum, float32.

        It is in the gradient or, if that has 16 bits, in `float32_room`. Then use it before waiting for anything.
        """
        is_wide = step.grad_N.dtype == torch.float32
        if not is_wide:
            # Everybody on this thread uses the same room, so nothing may be waited for while the sum is in it.
            for batch in self._batches_of_own:
                yield from self._receive(batch, step.phases)
        sum_N = in_float32(self.own(step))
        # In rank order, whichever comes first: the bits of the sum depend on the order.
        for batch in self._batches_of_own:
            if is_wide:
                yield from self._receive(batch, step.phases)
            for peer in batch:
                self._of_own[peer].decode(sum_N, step.stamp, self._transport.ranks[peer], add=True)
            step.phases.lap("decode")
        return sum_N

    def _take_parts(self, step: Step) -> Generator[Handle, None, list[Tensor]]:
        """Return the payloads of the others' parts of the own chunk, in rank order."""
        for batch in self._batches_of_own:
            yield from self._receive_checked(batch, self._of_own, step)
            step.phases.lap("decode")
        return [self._of_own[peer].payload for peer in sorted(self._transport.peers)]

    def expect_chunks(self) -> Iterator[Handle]:
        """Begin to receive the others' chunks."""
        for batch in self._batches:
            # A received chunk overwrites the message that was sent to its owner, so that one must be gone first.
            if batch in self._going:
                yield self._going.pop(batch)
            self._coming[batch] = self._start({}, {peer: self._of_chunk[peer].parts for peer in batch})

    def send_average(self, first: Step, second: Step) -> Iterator[Handle]:
        """Send all others the average of the own chunk over ranks. `first` is the step of its parts."""
        payloads: list[Tensor] = []
        if self._is_on_host:
            sum_N = yield from self.add_parts(first)
        else:
            payloads = yield from self._take_parts(first)
            sum_N = self.own(first)
        own = self._row(self._transport.rank, second, sum_N)
        self._codec.sum_rows(own, payloads, self._transport.world_size)
        yield from self._send_encoded(second)

    def send_own(self, step: Step, residual_scale: float) -> Iterator[Handle]:
        """Send the own chunk to all others. It is float32; see `Codec.encode_share`."""
        self._codec.encode_share(self._row(self._transport.rank, step, self.own(step)), residual_scale)
        yield from self._send_encoded(step)

    def _send_encoded(self, step: Step) -> Iterator[Handle]:
        """Send the own chunk, once it is encoded, to all others."""
        own, peers = self._of_chunk[self._transport.rank], self._transport.peers
        yield from copied_out(own.room, step.phases)
        own.seal(step.stamp)
        step.phases.lap("encode")
        if peers:
            step.phases.begin_round()
        self._going[self._transport.rank,] = self._start(dict.fromkeys(peers, own.parts), {})

    def use_own(self, step: Step) -> None:
        """Replace the own chunk by the decoded message that the others get. Elsewhere `take_chunks` does so."""
        step.phases.resume()
        if self._is_on_host:
            self._of_chunk[self._transport.rank].use(self.own(step))
            step.phases.lap("decode")

    def take_chunks(self, step: Step) -> Iterator[Handle]:
        """Replace the others' chunks by their owners' messages."""
        for batches in self._coded_together():
            for batch in batches:
                yield from self._receive_checked(batch, self._of_chunk, step)
            chunks = itertools.chain(*batches) if self._is_on_host else self._of_chunk
            rows = [PayloadRow(step.run_of(self._bounds[chunk]), self._of_chunk[chunk].payload) for chunk in chunks]
            self._codec.decode_rows(rows)
            step.phases.lap("decode")

    def finish_sends(self) -> Iterator[Handle]:
        """Wait until every message has left, so that its memory may change. The lane is done with it."""
        yield from self._going.values()
        self._going.clear()
        if not self._is_on_host:
            for parcel in self._of_chunk.values():
                parcel.release()
            self._room.release()
            self._of_others.release()
            self.__dict__.pop("_of_own", None)

    def _coded_together(self) -> Sequence[Sequence[tuple[int, ...]]]:
        """Return the batches, those together that one call encodes or decodes."""
        return [[batch] for batch in self._batches] if self._is_on_host else [self._batches]

    def _row(self, chunk: int, step: Step, part_N: Tensor) -> PayloadRow:
        """Return what is encoded of `chunk`, for its message."""
        key = step.key(self._transport.rank, self._numbers[chunk])
        return PayloadRow(part_N, self._of_chunk[chunk].payload, key, step.memory_of(self._bounds[chunk]))

    def _receive_checked(self, batch: tuple[int, ...], parcels: Mapping[int, Parcel], step: Step) -> Iterator[Handle]:
        yield from self._receive(batch, step.phases)
        for peer in batch:
            parcels[peer].check(step.stamp, self._transport.ranks[peer])

    def _receive(self, batch: tuple[int, ...], phases: Phases) -> Iterator[Handle]:
        yield self._coming.pop(batch)
        if not self._coming:
            phases.end_round()
