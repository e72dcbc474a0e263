"""Broadcast: one rank collects all encoded gradients and sends out the encoded average (a parameter server)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.exchange import Exchange
from cgx_ray.collectives.parcel import Parcel, Step
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.pieces import Piece, cut, take_turns
from cgx_ray.collectives.transport.transport_like import Handle, TransportLike


class Broadcast(Exchange):
    """Cost 2a + 2(N-1) m b at the root's link; every other rank sends m and receives m.

    Groups take turns: group g has root g mod N. The root uses the encoded average too, so all ranks hold the same bits.
    With feedback the root keeps N times what encoding the average dropped, as the owner of a chunk in `Sra`; the others
    keep what their messages to it dropped. Pieces of long gradients overlap.
    """

    def __init__(self, codec: Codec, numel: int, transport: TransportLike) -> None:
        super().__init__(transport)
        self._lanes = [_BroadcastLane(piece, codec, transport) for piece in cut(codec, [(0, numel)], transport)]
        # Known in `turns`: it depends on the group whether this rank is the root.
        self.sent_bytes = 0

    def turns(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> Iterator[Handle]:
        """See `Exchange.turns`."""
        transport = self._transport
        step = Step(grad_N=grad_N, memory=memory, stamp=stamp, seed=seed, phases=phases)
        root = stamp.group % transport.world_size
        is_root = root == transport.rank
        num_receivers = len(transport.peers) if is_root else 1
        self.sent_bytes = num_receivers * sum(lane.num_bytes for lane in self._lanes)
        lanes = [lane.collect(step) if is_root else lane.hand_in(step, root) for lane in self._lanes]
        return take_turns(lanes, phases)


class _BroadcastLane:
    """One piece of the gradient, on its way to the root and back."""

    def __init__(self, piece: Piece, codec: Codec, transport: TransportLike) -> None:
        self._piece = piece
        (self._bounds,) = piece.bounds
        self._transport = transport
        numel = self._bounds[1] - self._bounds[0]
        # Sent by this rank; on ranks other than the root, the average is received into it as well.
        self._own = Parcel(codec, numel)
        # Only the root uses them. Memory that is never touched takes no pages.
        self._of_peer = {peer: Parcel(codec, numel) for peer in sorted(transport.peers)}
        self.num_bytes = self._own.num_bytes

    def collect(self, step: Step) -> Iterator[Handle]:
        """On the root: average the gradients and send the average out; yield the handles to wait for."""
        rank, world_size, phases = self._transport.rank, self._transport.world_size, step.phases
        run_N, second = step.run_of(self._bounds), replace(step.stamp, phase=1)
        self._own.borrow(run_N)
        coming = {peer: self._transport.start({}, {peer: parcel.parts}) for peer, parcel in self._of_peer.items()}
        for peer, parcel in self._of_peer.items():
            yield coming[peer]
            parcel.decode(run_N, step.stamp, self._transport.ranks[peer], add=True)
            phases.lap("decode")
        # Each rank encodes once per step, the root the average.
        key, memory = step.key(rank, self._piece.index), step.memory_of(self._bounds)
        self._own.encode_share(run_N.div_(world_size), second, key, memory, world_size)
        phases.lap("encode")
        yield self._transport.start(dict.fromkeys(self._of_peer, self._own.parts), {})
        self._own.use(run_N)
        phases.lap("decode")

    def hand_in(self, step: Step, root: int) -> Iterator[Handle]:
        """On the other ranks: send the gradient to `root`, take over the average; yield the handles to wait for."""
        run_N, phases = step.run_of(self._bounds), step.phases
        self._own.borrow(run_N)
        key, memory = step.key(self._transport.rank, self._piece.index), step.memory_of(self._bounds)
        self._own.encode(run_N, step.stamp, key, memory)
        phases.lap("encode")
        yield self._transport.start({root: self._own.parts}, {})
        yield self._transport.start({}, {root: self._own.parts})
        self._own.decode(run_N, replace(step.stamp, phase=1), self._transport.ranks[root], add=False)
        phases.lap("decode")
