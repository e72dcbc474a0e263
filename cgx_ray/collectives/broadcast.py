"""Broadcast: one rank collects everyone's encoded gradient and sends out the encoded average (parameter server)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.parcel import Parcel, Step, cut, run_lanes
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport import Handle, Transport


class Broadcast:
    """Cost 2a + 2(N-1) m b, at the root's link; the others send m and receive m. Groups take turns: group g has root
    g mod N.

    The root owes N times what encoding the average dropped, as the owner of a chunk in `Sra`, the others what their
    messages to it dropped. The root uses the encoded average too, so all ranks hold the same bits. Long gradients go
    in pieces, as in `Sra`: while one is coded the others travel.
    """

    def __init__(self, codec: Codec, numel: int, transport: Transport) -> None:
        self._transport = transport
        pieces = cut(codec, [(0, numel)], transport)
        self._lanes = [_Lane(index, bounds, codec, transport) for index, (bounds,) in enumerate(pieces)]
        # Of a root or not: `run` is told which group this is.
        self.sent_bytes = 0

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """See `Exchange.run`."""
        transport = self._transport
        step = Step(grad_N=grad_N, memory=memory, stamp=stamp, seed=seed, phases=phases)
        root = stamp.group % transport.world_size
        is_root = root == transport.rank
        run_lanes(
            [lane.collect(step) if is_root else lane.hand_in(step, root) for lane in self._lanes], transport, phases
        )
        num_receivers = len(transport.peers) if is_root else 1
        self.sent_bytes = num_receivers * sum(lane.num_bytes for lane in self._lanes)


class _Lane:
    """A piece of the gradient, on its way to the root and back."""

    def __init__(self, index: int, bounds: tuple[int, int], codec: Codec, transport: Transport) -> None:
        self._index = index
        self._bounds = bounds
        self._transport = transport
        numel = bounds[1] - bounds[0]
        # What this rank sends; of the others but the root also what they get.
        self._own = Parcel(codec, numel)
        # Only the root needs them; memory that is never touched is never really allocated.
        self._of_peer = {peer: Parcel(codec, numel) for peer in sorted(transport.peers)}
        self.num_bytes = self._own.num_bytes

    def collect(self, step: Step) -> Iterator[Handle]:
        """Average what comes, and send it out; gives out what it waits for."""
        rank, world_size, phases = self._transport.rank, self._transport.world_size, step.phases
        run_N, second = step.run_of(self._bounds), replace(step.stamp, phase=1)
        self._own.borrow(run_N)
        self._begin_round()
        coming = {peer: self._transport.start({}, {peer: parcel.parts}) for peer, parcel in self._of_peer.items()}
        for peer, parcel in self._of_peer.items():
            yield coming[peer]
            parcel.decode(run_N, step.stamp, self._transport.ranks[peer], add=True)
            phases.lap("decode")
        # A rank encodes once a step, the root the average.
        key, memory = step.key(rank, self._index), step.memory_of(self._bounds)
        self._own.encode_share(run_N.div_(world_size), second, key, memory, world_size)
        phases.lap("encode")
        self._begin_round()
        yield self._transport.start(dict.fromkeys(self._of_peer, self._own.parts), {})
        self._own.use(run_N)
        phases.lap("decode")

    def hand_in(self, step: Step, root: int) -> Iterator[Handle]:
        """Send the gradient to the root and take over the average; gives out what it waits for."""
        run_N, phases = step.run_of(self._bounds), step.phases
        self._own.borrow(run_N)
        key, memory = step.key(self._transport.rank, self._index), step.memory_of(self._bounds)
        self._own.encode(run_N, step.stamp, key, memory)
        phases.lap("encode")
        self._begin_round()
        yield self._transport.start({root: self._own.parts}, {})
        yield self._transport.start({}, {root: self._own.parts})
        self._own.decode(run_N, replace(step.stamp, phase=1), self._transport.ranks[root], add=False)
        phases.lap("decode")

    def _begin_round(self) -> None:
        if self._index == 0:
            self._transport.begin_round()
