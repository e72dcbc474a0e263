"""Allgather, direct: every rank sends its encoded gradient to all others, and all decode the same N messages."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.float32_room import float32_room
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.exchange import Exchange
from cgx_ray.collectives.parcel import Parcel, Step, batches_of, copied_out, seals_by_mesh
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.pieces import Piece, cut, take_turns
from cgx_ray.collectives.transport.transport_like import Handle, TransportLike
from cgx_ray.runtime_ext import ops


class Allgather(Exchange):
    """Cost a + (N-1) m b. All ranks add the messages in rank order, so the sums agree bit for bit.

    Early messages are decoded while late ones are still coming. Long gradients are cut into pieces if the codec may
    encode parts of a gradient by themselves. With 16-bit gradients all messages of a piece come before its sum.
    """

    takes_16_bit = True

    def __init__(self, codec: Codec, numel: int, transport: TransportLike) -> None:
        super().__init__(transport)
        self._can_cut = codec.record.is_reencoded
        whole = Piece(index=0, num_pieces=1, bounds=((0, numel),))
        pieces = cut(codec, [(0, numel)], transport) if self._can_cut else [whole]
        self._lanes = [_AllgatherLane(piece, codec, transport) for piece in pieces]
        self.sent_bytes = sum(lane.sent_bytes for lane in self._lanes)

    def turns(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> Iterator[Handle]:
        """See `Exchange.turns`."""
        step = Step(grad_N=grad_N, memory=memory, stamp=stamp, seed=seed, phases=phases)
        # Only codecs that see the whole gradient remember more than residuals.
        memories = [step.memory_of(lane.bounds) if self._can_cut else memory for lane in self._lanes]
        lanes = [lane.gather(step, own) for lane, own in zip(self._lanes, memories, strict=True)]
        return take_turns(lanes, phases)


class _AllgatherLane:
    """One piece of every rank's gradient."""

    def __init__(self, piece: Piece, codec: Codec, transport: TransportLike) -> None:
        (self.bounds,) = piece.bounds
        self._index = piece.index
        self._codec = codec
        self._transport = transport
        start, stop = self.bounds
        is_sealed = seals_by_mesh(codec, transport)
        self._start = transport.start_sealed if is_sealed else transport.start
        self._parcels = [Parcel(codec, stop - start, is_sealed_by_mesh=is_sealed) for _ in range(transport.world_size)]
        self.sent_bytes = sum(parcel.num_bytes for parcel in self._parcels[1:])
        # In rank order, as they are added.
        peers = sorted(transport.peers)
        self._batches = batches_of(peers, [self._parcels[peer].num_bytes for peer in peers])

    def gather(self, step: Step, memory: Memory | None) -> Iterator[Handle]:
        """Average the piece; yield the handles to wait for."""
        transport, phases = self._transport, step.phases
        rank, world_size = transport.rank, transport.world_size
        run_N, own = step.run_of(self.bounds), self._parcels[rank]
        keys = [step.key(0 if self._codec.record.shares_key else sender, self._index) for sender in range(world_size)]
        # Receives first: early messages then go straight to their memory. A batch's lowest rank is waited for first.
        coming = {
            batch[0]: self._start({}, {peer: self._parcels[peer].parts for peer in batch}) for batch in self._batches
        }
        self._codec.encode(run_N, own.payload, keys[rank], memory)
        yield from copied_out(own.room, phases)
        own.seal(step.stamp)
        phases.lap("encode")
        going = self._start(dict.fromkeys(transport.peers, own.parts), {})
        sum_N = run_N
        if run_N.dtype != torch.float32:
            # Everybody on this thread uses the same room, so nothing may be waited for while the sum is in it.
            for peer in list(coming):
                yield coming.pop(peer)
            sum_N = float32_room(run_N.numel())
        # In rank order, whichever comes first: the bits of the sum depend on the order.
        for sender, parcel in enumerate(self._parcels):
            if sender == rank:
                parcel.use(sum_N, add=sender > 0, key=keys[rank])
            else:
                if sender in coming:
                    yield coming.pop(sender)
                parcel.decode(sum_N, step.stamp, transport.ranks[sender], add=sender > 0, key=keys[sender])
            phases.lap("decode")
        ops.divide(sum_N, world_size)
        if sum_N is not run_N:
            run_N.copy_(sum_N)
        phases.lap("decode")
        yield going
        for parcel in self._parcels:
            parcel.release()
