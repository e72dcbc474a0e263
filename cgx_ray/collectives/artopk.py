"""AR-Topk: one worker's top-k indices, everyone's values at them, summed by a ring (Flexible Communication, Alg. 1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cgx_ray.codecs.topk import check_indices, split
from cgx_ray.codecs.wire import HEADER_BYTES, Stamp, check, new_message, payload_of, seal
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport import Transport
from cgx_ray.plan import CodecSpec
from cgx_ray.runtime_ext import ops


class ArTopkRing:
    """Cost a[2(N-1) + log N] + Mcb[2(N-1)/N + log N], with STAR: the broadcasting worker goes round-robin by step.

    Departure from Algorithm 1: only the broadcasting worker selects, as nobody uses the others' indices.
    """

    def __init__(self, codec: CodecSpec, numel: int, transport: Transport) -> None:
        self._transport = transport
        num_kept = codec.num_kept(numel)
        self._message = new_message(4 * num_kept)
        # Room for indices and values, the selection kernel's layout; the others only ever see the indices.
        self._selected = torch.empty(codec.payload_bytes(numel), dtype=torch.uint8)
        self._values_K1 = torch.empty(num_kept + 1)
        ring = 2 * (transport.world_size - 1) / transport.world_size * self._values_K1.numel() * 4
        tree = math.log2(transport.world_size) * (HEADER_BYTES + 4 * num_kept)
        self.sent_bytes = round(ring + tree)

    def run(self, grad_N: Tensor, residual_N: Tensor | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """See `Exchange.run`."""
        assert residual_N is not None
        root = stamp.step % self._transport.world_size
        if root == self._transport.rank:
            index_K, value_K = split(self._selected)
            ops.topk_select(grad_N, index_K, value_K)
            payload_of(self._message).view(torch.int32).copy_(index_K)
            seal(self._message, stamp, grad_N.numel())
        phases.lap("encode")
        self._transport.broadcast(self._message, root)
        phases.lap("exchange")

        check(self._message, stamp, grad_N.numel(), root)
        index_K = payload_of(self._message).view(torch.int32)
        check_indices(index_K, grad_N.numel())
        index_K = index_K.long()
        values_K1 = self._values_K1
        torch.index_select(grad_N, 0, index_K, out=values_K1[:-1])
        values_K1[-1] = poison(grad_N)
        values_K1.div_(self._transport.world_size)
        phases.lap("encode")
        self._transport.all_reduce(values_K1)
        phases.lap("exchange")

        if bool(torch.isfinite(values_K1).all()):
            residual_N.copy_(grad_N)
            residual_N.index_fill_(0, index_K, 0.0)
            grad_N.zero_()
            grad_N.index_copy_(0, index_K, values_K1[:-1])
        else:
            grad_N.fill_(math.nan)
        phases.lap("decode")


def poison(grad_N: Tensor) -> Tensor:
    """0 if `grad_N` is finite, else NaN: a worker's Inf may lie at an index that the broadcaster did not choose."""
    if grad_N.numel() == 0:
        return grad_N.new_zeros(())
    low, high = torch.aminmax(grad_N)
    return low * 0 + high * 0
