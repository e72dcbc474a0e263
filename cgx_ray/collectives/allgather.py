"""Allgather, direct: every rank sends its encoded gradient to every other and all decode the same N messages."""

from __future__ import annotations

from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import HEADER_BYTES, Stamp, check, new_message, payload_of, seal
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport import Transport
from cgx_ray.runtime_ext import ops


class Allgather:
    """Cost a + (N-1) m b. All ranks add the messages in rank order, so the sums agree bit for bit."""

    def __init__(self, codec: Codec, numel: int, transport: Transport) -> None:
        self._codec = codec
        self._transport = transport
        payload_bytes = codec.payload_bytes(numel)
        self._messages = [new_message(payload_bytes) for _ in range(transport.world_size)]
        self.sent_bytes = (transport.world_size - 1) * (HEADER_BYTES + payload_bytes)

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """See `Exchange.run`."""
        transport = self._transport
        rank, world_size = transport.rank, transport.world_size
        own = self._messages[rank]
        keys = [
            ops.message_key(seed, stamp.step, stamp.group, 0 if self._codec.shares_key else sender, 0)
            for sender in range(world_size)
        ]
        # Posted before anything comes, so that it goes straight to where it belongs.
        transport.begin_round()
        incoming = {peer: transport.start({}, {peer: self._messages[peer]}) for peer in transport.peers}
        self._codec.encode(grad_N, payload_of(own), keys[rank], memory)
        seal(own, stamp, grad_N.numel())
        phases.lap("encode")
        phases.begin_round()
        outgoing = transport.start(dict.fromkeys(transport.peers, own), {})

        # In rank order, whoever comes first: sums depend on it.
        for sender in range(world_size):
            if sender != rank:
                transport.finish(incoming.pop(sender))
                phases.lap("exchange")
                if not incoming:
                    phases.end_round()
            check(self._messages[sender], stamp, grad_N.numel(), transport.ranks[sender])
            self._codec.decode(payload_of(self._messages[sender]), grad_N, add=sender > 0, key=keys[sender])
            phases.lap("decode")
        transport.finish(outgoing)
        phases.lap("exchange")
        grad_N.div_(world_size)
        phases.lap("decode")
