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
        rank, world_size = self._transport.rank, self._transport.world_size
        own = self._messages[rank]
        keys = [
            ops.message_key(seed, stamp.step, stamp.group, 0 if self._codec.shares_key else sender, 0)
            for sender in range(world_size)
        ]
        self._codec.encode(grad_N, payload_of(own), keys[rank], memory)
        seal(own, stamp, grad_N.numel())
        phases.lap("encode")
        peers = [peer for peer in range(world_size) if peer != rank]
        self._transport.exchange(dict.fromkeys(peers, own), {peer: self._messages[peer] for peer in peers})
        phases.lap("exchange")

        for sender, message in enumerate(self._messages):
            check(message, stamp, grad_N.numel(), sender)
        for sender, message in enumerate(self._messages):
            self._codec.decode(payload_of(message), grad_N, add=sender > 0, key=keys[sender])
        grad_N.div_(world_size)
        phases.lap("decode")
