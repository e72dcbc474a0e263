"""Schemes: how the encoded gradients of one group become one average that all ranks hold, bit for bit the same."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.allgather import Allgather
from cgx_ray.collectives.allreduce import Allreduce, PowerSgdAllreduce
from cgx_ray.collectives.artopk import ArTopk
from cgx_ray.collectives.broadcast import Broadcast
from cgx_ray.collectives.dense import Dense
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.ring import Ring
from cgx_ray.collectives.sra import Sra
from cgx_ray.collectives.transport import Transport
from cgx_ray.collectives.tree import Tree
from cgx_ray.plan import Scheme


class Exchange(Protocol):
    """One scheme for one group, with its buffers. Every rank must call `run` for the same groups in the same order.

    sent_bytes  what this rank sends a step, headers included
    """

    sent_bytes: int

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """Replace `grad_N` by its average over ranks.

        grad_N  (N,) this rank's gradient; changed in place
        memory  what the codec keeps of this group, None for codecs that keep nothing. `memory.next` gets what it will
                keep; the caller commits it

        Raises WireError on a message that is broken or of another plan, TransportError if a peer is gone.
        """


def make_exchange(codec: Codec, scheme: Scheme, numel: int, item_bytes: int, transport: Transport) -> Exchange:
    """The exchange for a group of `numel` elements of `item_bytes` each."""
    match scheme:
        case Scheme.DENSE:
            return Dense(numel * item_bytes, transport)
        case Scheme.ALLREDUCE if codec.spec.name == "powersgd":
            return PowerSgdAllreduce(codec, numel, transport)
        case Scheme.ALLREDUCE:
            return Allreduce(codec, numel, transport)
        case Scheme.ALLGATHER:
            return Allgather(codec, numel, transport)
        case Scheme.SRA:
            return Sra(codec, numel, transport)
        case Scheme.RING:
            return Ring(codec, numel, transport)
        case Scheme.TREE:
            return Tree(codec, numel, transport)
        case Scheme.BROADCAST:
            return Broadcast(codec, numel, transport)
        case _:
            assert scheme.is_artopk
            choice = scheme.removeprefix("artopk_").partition("_")[2] or "star"
            return ArTopk(codec, numel, transport, choice, by_tree=scheme.startswith("artopk_tree"))


__all__ = ["Exchange", "Phases", "Transport", "make_exchange"]
