"""Allgather, direct: every rank sends its encoded gradient to every other and all decode the same N messages."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.parcel import Parcel, Step, cut, run_lanes
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport import Handle, Transport
from cgx_ray.plan import CODECS_OF_SCHEME, Scheme


class Allgather:
    """Cost a + (N-1) m b. All ranks add the messages in rank order, so the sums agree bit for bit.

    Where a codec may see a part of a gradient, long ones go in pieces: while one is coded the others travel.
    """

    def __init__(self, codec: Codec, numel: int, transport: Transport) -> None:
        self._transport = transport
        can_cut = codec.spec.name in CODECS_OF_SCHEME[Scheme.SRA]
        pieces = cut(codec, [(0, numel)], transport) if can_cut else [((0, numel),)]
        self._lanes = [_Lane(index, bounds, codec, transport) for index, (bounds,) in enumerate(pieces)]
        self._can_cut = can_cut
        self.sent_bytes = sum(lane.sent_bytes for lane in self._lanes)

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """See `Exchange.run`."""
        step = Step(grad_N=grad_N, memory=memory, stamp=stamp, seed=seed, phases=phases)
        self._transport.begin_round()
        # Only codecs that see the whole gradient remember more than residuals.
        memories = [step.memory_of(lane.bounds) if self._can_cut else memory for lane in self._lanes]
        lanes = [lane.gather(step, own) for lane, own in zip(self._lanes, memories, strict=True)]
        run_lanes(lanes, self._transport, phases)


class _Lane:
    """A piece of the gradient, of every rank."""

    def __init__(self, index: int, bounds: tuple[int, int], codec: Codec, transport: Transport) -> None:
        self.bounds = bounds
        self._index = index
        self._codec = codec
        self._transport = transport
        self._parcels = [Parcel(codec, bounds[1] - bounds[0]) for _ in range(transport.world_size)]
        self.sent_bytes = sum(parcel.num_bytes for parcel in self._parcels[1:])

    def gather(self, step: Step, memory: Memory | None) -> Iterator[Handle]:
        """Average the piece; gives out what it waits for."""
        transport, phases = self._transport, step.phases
        rank, world_size = transport.rank, transport.world_size
        run_N, own = step.run_of(self.bounds), self._parcels[rank]
        keys = [step.key(0 if self._codec.shares_key else sender, self._index) for sender in range(world_size)]
        # Posted before anything comes, so that it goes straight to where it belongs.
        coming = {peer: transport.start({}, {peer: self._parcels[peer].parts}) for peer in transport.peers}
        own.encode(run_N, step.stamp, keys[rank], memory)
        phases.lap("encode")
        going = transport.start(dict.fromkeys(transport.peers, own.parts), {})
        # In rank order, whoever comes first: sums depend on it.
        for sender, parcel in enumerate(self._parcels):
            if sender == rank:
                parcel.use(run_N, add=sender > 0, key=keys[rank])
            else:
                yield coming[sender]
                parcel.decode(run_N, step.stamp, transport.ranks[sender], add=sender > 0, key=keys[sender])
            phases.lap("decode")
        run_N.div_(world_size)
        phases.lap("decode")
        yield going
