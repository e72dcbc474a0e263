"""AR-Topk: one worker's top-k indices, everyone's values at them, summed (Flexible Communication, Alg. 1)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from cgx_ray.codecs.cast import Raw
from cgx_ray.codecs.codec import Codec, Memory, is_finite, poison
from cgx_ray.codecs.sparse import Selection, Sparse
from cgx_ray.codecs.wire import Stamp, check, new_message, payload_of, seal
from cgx_ray.collectives.dense import Dense
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport import Transport
from cgx_ray.collectives.tree import Tree
from cgx_ray.plan import NONE
from cgx_ray.runtime_ext import ops


class ArTopk:
    """Cost a log N + b log N m_i for the indices, and of `Tree` or the vendor's ring for m_v, the bytes of the values.

    The broadcasting worker goes round-robin by step (STAR) or, `by_norm`, is the one with the largest error-fed
    gradient (VAR), for which all send each other their norms: one latency more. Departure from Algorithm 1: only the
    broadcasting worker selects, as nobody uses the others' indices.
    """

    def __init__(self, codec: Codec, numel: int, transport: Transport, *, by_tree: bool, by_norm: bool) -> None:
        assert isinstance(codec, Sparse)
        self._codec = codec
        self._transport = transport
        num_kept = codec.spec.num_kept(numel)
        self._message = new_message(codec.spec.index_bytes(numel))
        self._selection = Selection(num_kept, torch.device("cpu"))
        self._values_K1 = torch.empty(num_kept + 1)
        self._average = Tree(Raw(NONE), num_kept + 1, transport) if by_tree else Dense(4 * (num_kept + 1), transport)
        self._norms = [new_message(4) for _ in range(transport.world_size)] if by_norm else []
        indices = math.log2(transport.world_size) * self._message.numel()
        norms = sum(norm.numel() for norm in self._norms[1:])
        self.sent_bytes = round(self._average.sent_bytes + indices + norms)

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """See `Exchange.run`."""
        assert memory is not None
        numel, selection, values_K1 = grad_N.numel(), self._selection, self._values_K1
        fed_N = self._codec.feed(grad_N, memory)
        root = self._largest(fed_N, stamp, phases) if self._norms else stamp.step % self._transport.world_size
        if root == self._transport.rank:
            self._codec.select(fed_N, selection, ops.message_key(seed, stamp.step, stamp.group, root, 0))
            selection.pack(numel, payload_of(self._message))
            seal(self._message, stamp, numel)
        phases.lap("encode")
        self._transport.broadcast(self._message, root)
        phases.lap("exchange")

        check(self._message, stamp, numel, self._transport.ranks[root])
        selection.unpack(numel, payload_of(self._message))
        # Behind the last index there are zeros: what is summed for these is not used.
        index_K = selection.index_K.long()
        torch.index_select(fed_N, 0, index_K, out=values_K1[:-1])
        # A worker's Inf may lie at an index that the broadcaster did not choose.
        values_K1[-1] = poison(fed_N)
        self._average.run(values_K1, None, replace(stamp, codec="none"), seed, phases)

        if is_finite(values_K1):
            self._codec.forget(selection, memory)
            grad_N.zero_()
            count = int(selection.count_1)
            grad_N.index_copy_(0, index_K[:count], values_K1[:count])
        else:
            grad_N.fill_(math.nan)
        phases.lap("decode")

    def _largest(self, fed_N: Tensor, stamp: Stamp, phases: Phases) -> int:
        """The rank with the largest gradient, the first one of equals. One that is not finite counts as larger."""
        rank, first = self._transport.rank, replace(stamp, phase=1)
        payload_of(self._norms[rank]).view(torch.float32).copy_(fed_N.norm())
        seal(self._norms[rank], first, fed_N.numel())
        phases.lap("encode")
        received = {peer: norm for peer, norm in enumerate(self._norms) if peer != rank}
        self._transport.exchange(dict.fromkeys(received, self._norms[rank]), received)
        phases.lap("exchange")
        for sender, norm in received.items():
            check(norm, first, fed_N.numel(), self._transport.ranks[sender])
        norms = torch.cat([payload_of(norm).view(torch.float32) for norm in self._norms])
        return int(torch.where(norms.isnan(), math.inf, norms).argmax())
