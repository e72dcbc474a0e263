"""Broadcast: one rank collects everyone's encoded gradient and sends out the encoded average (parameter server)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import Stamp, check, new_message, payload_of, seal
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.sra import encode_share
from cgx_ray.collectives.transport import Transport
from cgx_ray.runtime_ext import ops


class Broadcast:
    """Cost 2a + 2(N-1) m b, at the root's link; the others send m and receive m. Groups take turns: group g has root
    g mod N.

    The root owes N times what encoding the average dropped, as the owner of a chunk in `Sra`, the others what their
    messages to it dropped. The root uses the encoded average too, so all ranks hold the same bits.
    """

    def __init__(self, codec: Codec, numel: int, transport: Transport) -> None:
        self._codec = codec
        self._transport = transport
        # By rank: what it sends to the root, for the root the average. Only the root needs all of them; memory that is
        # never touched is never really allocated.
        self._messages = [new_message(codec.payload_bytes(numel)) for _ in range(transport.world_size)]
        # Of a root or not: `run` is told which group this is.
        self.sent_bytes = 0

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """See `Exchange.run`."""
        rank, world_size = self._transport.rank, self._transport.world_size
        root, numel, second = stamp.group % world_size, grad_N.numel(), replace(stamp, phase=1)
        peers = [peer for peer in range(world_size) if peer != root]
        own, average = self._messages[rank], self._messages[root]
        # A rank encodes once a step, the root the average.
        key = ops.message_key(seed, stamp.step, stamp.group, rank, 0)
        if rank == root:
            self._transport.exchange({}, {peer: self._messages[peer] for peer in peers})
            phases.lap("exchange")
            for peer in peers:
                check(self._messages[peer], stamp, numel, self._transport.ranks[peer])
                self._codec.decode(payload_of(self._messages[peer]), grad_N, add=True)
            phases.lap("decode")
            encode_share(self._codec, grad_N.div_(world_size), payload_of(average), key, memory, world_size)
            seal(average, second, numel)
            phases.lap("encode")
            self._transport.exchange(dict.fromkeys(peers, average), {})
        else:
            self._codec.encode(grad_N, payload_of(own), key, memory)
            seal(own, stamp, numel)
            phases.lap("encode")
            self._transport.exchange({root: own}, {})
            self._transport.exchange({}, {root: average})
        phases.lap("exchange")
        self.sent_bytes = own.numel() * (len(peers) if rank == root else 1)

        check(average, second, numel, self._transport.ranks[root])
        self._codec.decode(payload_of(average), grad_N, add=False)
        phases.lap("decode")
