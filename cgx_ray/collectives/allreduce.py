"""All-reduce of encoded gradients that can be summed without decoding, by the vendor's ring."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from cgx_ray.codecs.codec import POWERSGD_Q, Codec, Memory
from cgx_ray.codecs.powersgd import PowerSgd
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.exchange import Exchange
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport.transport_like import Handle, TransportLike, ring_bytes
from cgx_ray.runtime_ext import ops


class _SumOfPayloads(Exchange):
    """An exchange by vendor's sums of the payload, whose memory is taken when it is first used."""

    def __init__(self, codec: Codec, numel: int, transport: TransportLike) -> None:
        super().__init__(transport)
        self._codec = codec
        self._payload_bytes = codec.payload_bytes(numel)
        self.sent_bytes = ring_bytes(self._payload_bytes, transport.world_size)

    @cached_property
    def _payload(self) -> Tensor:
        return torch.empty(self._payload_bytes, dtype=torch.uint8, device=self._codec.device)


class Allreduce(_SumOfPayloads):
    """Cost 2(N-1) a + 2(N-1)/N m b. Divides before it sums, as DDP does, since sums of fp16 would overflow first."""

    takes_16_bit = True

    def turns(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> Iterator[Handle]:
        """See `Exchange.turns`."""
        # The same key on all ranks: it selects randomk's elements.
        key = ops.message_key(seed, stamp.step, stamp.group, 0, 0)
        self._codec.encode(grad_N, self._payload, key, memory)
        values = self._payload.view(self._codec.wire_dtype)
        values.div_(self._transport.world_size)
        phases.lap("encode")
        with phases.round():
            yield from self._transport.all_reduce(values)
        self._codec.decode(self._payload, grad_N, add=False, key=key)
        phases.lap("decode")


class PowerSgdAllreduce(_SumOfPayloads):
    """PowerSGD as in its paper (Vogels et al. 2019, Algorithms 1 and 2): average P, then Q.

    Cost 4(N-1) a + 2(N-1)/N m b: two all-reduces. A rank's residual is its gradient minus P times its own Q. Scheme
    allgather leaves different Q on the ranks; after one step here all ranks have the same.
    """

    _codec: PowerSgd

    def __init__(self, codec: Codec, numel: int, transport: TransportLike) -> None:
        assert isinstance(codec, PowerSgd)
        super().__init__(codec, numel, transport)

    def turns(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> Iterator[Handle]:
        """See `Exchange.turns`."""
        assert memory is not None
        self.keeps_order = True
        codec, world_size = self._codec, self._transport.world_size
        p_M, q_M = codec.split(self._payload, grad_N.numel())
        fed_N, start_M = codec.begin(grad_N, memory)
        codec.project(fed_N, start_M, p_M)
        p_M.div_(world_size)
        phases.lap("encode")
        with phases.round():
            yield from self._transport.all_reduce(p_M)

        codec.orthogonalize(grad_N.numel(), p_M)
        codec.project_back(fed_N, p_M, q_M)
        codec.expand(p_M, q_M, memory.next_N, sign=-1)
        q_M.div_(world_size)
        phases.lap("encode")
        self.keeps_order = False
        with phases.round():
            yield from self._transport.all_reduce(q_M)

        memory.next[POWERSGD_Q].copy_(q_M)
        codec.decode(self._payload, grad_N, add=False)
        phases.lap("decode")
