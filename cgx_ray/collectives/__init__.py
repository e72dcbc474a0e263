"""Schemes: algorithms that average the encoded gradients of one group over ranks, with the same bits on all ranks.

Letters in the cost formulas of this package:

a, b  latency of the link in seconds, and its seconds per byte
N, n  ranks, and nodes
M, m  bytes of the dense gradient, and bytes of the encoded one with headers
log   base 2
"""

from __future__ import annotations

from cgx_ray.codecs.codec import Codec
from cgx_ray.codecs.powersgd import PowerSgd
from cgx_ray.collectives.allgather import Allgather
from cgx_ray.collectives.allreduce import Allreduce, PowerSgdAllreduce
from cgx_ray.collectives.artopk import ArTopk
from cgx_ray.collectives.broadcast import Broadcast
from cgx_ray.collectives.dense import Dense
from cgx_ray.collectives.exchange import Exchange
from cgx_ray.collectives.hierarchical import Hierarchical, has_inside
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.ring import Ring
from cgx_ray.collectives.sra import Sra
from cgx_ray.collectives.transport.transport import Transport
from cgx_ray.collectives.transport.transport_like import Handle, TransportLike
from cgx_ray.collectives.tree import Tree
from cgx_ray.plan import Intra, Scheme


def make_exchange(
    codec: Codec, scheme: Scheme, numel: int, item_bytes: int, transport: Transport, intra: Intra = Intra.FLAT
) -> Exchange:
    """Return the exchange for a group of `numel` elements of `item_bytes` each.

    It is flat, whatever `intra` says, if each node has one rank, and if all ranks are on one node and the scheme is
    dense: `Dense` then sums through shared memory as well.
    """
    if intra is not Intra.FLAT and has_inside(transport.nodes, scheme):
        return Hierarchical(
            codec, intra, numel, transport, lambda part, length, some: _flat(part, scheme, length, item_bytes, some)
        )
    return _flat(codec, scheme, numel, item_bytes, transport)


def _flat(codec: Codec, scheme: Scheme, numel: int, item_bytes: int, transport: TransportLike) -> Exchange:
    match scheme:
        case Scheme.DENSE:
            return Dense(numel * item_bytes, transport)
        case Scheme.ALLREDUCE if isinstance(codec, PowerSgd):
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
            return ArTopk(codec, numel, transport, scheme.choice, by_tree=scheme.by_tree)


__all__ = ["Exchange", "Handle", "Phases", "Transport", "make_exchange"]
