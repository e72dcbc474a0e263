"""AR-Topk: one worker's top-k indices, everyone's values at them, summed by a ring (Flexible Communication, Alg. 1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory, is_finite, poison
from cgx_ray.codecs.sparse import Selection, Sparse
from cgx_ray.codecs.wire import Stamp, check, new_message, payload_of, seal
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport import Transport
from cgx_ray.runtime_ext import ops


class ArTopkRing:
    """Cost a[2(N-1) + log N] + b[2(N-1)/N m_v + log N m_i], m_v bytes of values and m_i of packed indices.

    STAR: the broadcasting worker goes round-robin by step. Departure from Algorithm 1: only the broadcasting worker
    selects, as nobody uses the others' indices.
    """

    def __init__(self, codec: Codec, numel: int, transport: Transport) -> None:
        assert isinstance(codec, Sparse)
        self._codec = codec
        self._transport = transport
        num_kept = codec.spec.num_kept(numel)
        self._message = new_message(codec.spec.index_bytes(numel))
        self._selection = Selection(num_kept, torch.device("cpu"))
        self._values_K1 = torch.empty(num_kept + 1)
        ring = 2 * (transport.world_size - 1) / transport.world_size * self._values_K1.numel() * 4
        tree = math.log2(transport.world_size) * self._message.numel()
        self.sent_bytes = round(ring + tree)

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """See `Exchange.run`."""
        assert memory is not None
        numel, selection, values_K1 = grad_N.numel(), self._selection, self._values_K1
        fed_N = self._codec.feed(grad_N, memory)
        root = stamp.step % self._transport.world_size
        if root == self._transport.rank:
            self._codec.select(fed_N, selection, ops.message_key(seed, stamp.step, stamp.group, root, 0))
            selection.pack(numel, payload_of(self._message))
            seal(self._message, stamp, numel)
        phases.lap("encode")
        self._transport.broadcast(self._message, root)
        phases.lap("exchange")

        check(self._message, stamp, numel, root)
        selection.unpack(numel, payload_of(self._message))
        # Behind the last index there are zeros: what is summed for these is not used.
        index_K = selection.index_K.long()
        torch.index_select(fed_N, 0, index_K, out=values_K1[:-1])
        # A worker's Inf may lie at an index that the broadcaster did not choose.
        values_K1[-1] = poison(fed_N)
        values_K1.div_(self._transport.world_size)
        phases.lap("encode")
        self._transport.all_reduce(values_K1)
        phases.lap("exchange")

        if is_finite(values_K1):
            self._codec.forget(selection, memory)
            grad_N.zero_()
            count = int(selection.count_1)
            grad_N.index_copy_(0, index_K[:count], values_K1[:count])
        else:
            grad_N.fill_(math.nan)
        phases.lap("decode")
