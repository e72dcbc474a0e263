"""One record per scheme: hops and bytes, codec work, what overlaps, and what crosses a node's network card.

All of the planner reads the cost of a scheme from here; docs/schemes.md has the formulas as a table. Letters: N ranks,
L ranks per node, n elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from cgx_ray.errors import ConfigError
from cgx_ray.plan import Scheme

# Hops and bytes that one rank's link carries one after the other: seconds = hops * alpha + bytes * beta.
Terms = tuple[float, float]


class Payload(NamedTuple):
    """Bytes of one rank's group.

    dense_bytes  M, uncompressed
    wire_bytes   m, encoded, with indices and scales
    index_bytes  the part of m that says which elements are sent
    """

    dense_bytes: float
    wire_bytes: float
    index_bytes: float = 0


class Work(NamedTuple):
    """Messages and elements that one rank encodes, and those that it decodes."""

    encode: tuple[float, float]
    decode: tuple[float, float]


class Overlap(Enum):
    """Work that hides behind the network within one exchange.

    NOTHING   encode, send and decode follow each other
    DECODING  a message is decoded while later ones arrive
    CODING    pieces of a chunk are encoded and decoded while others travel
    PIECES    a chunk is encoded again at each hop. Time: the longer of codec and network, plus one piece of the shorter
    """

    NOTHING = "nothing"
    DECODING = "decoding"
    CODING = "coding"
    PIECES = "pieces"

    def seconds(self, encode_s: float, network_s: float, decode_s: float) -> float:
        """Return the seconds of an exchange, without the time of its first piece.

        For PIECES nothing overlaps: the chunk counts as one piece.
        """
        if self is Overlap.CODING:
            return max(network_s, encode_s + decode_s)
        if self is Overlap.DECODING:
            return encode_s + max(network_s, decode_s)
        return encode_s + network_s + decode_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemeCost:
    """Costs of one scheme among N > 1 ranks; with one rank every scheme is free.

    terms           hops and bytes, by N and payload
    work            codec work of one rank, by N and n
    overlap         work that hides behind the network
    crossing        bytes on a node's card per byte of one rank, in a flat exchange; by N and ranks per node
    num_chunks      chunks that each rank cuts its encoded group into, by N
    row_calls       calls that encode a piece, and that decode it, where a call takes several messages; None if each
                    message has a call of its own everywhere
    num_raw         messages of plain values that the engine's thread adds up besides those it decodes, by N
    is_vendor_ring  the vendor's library sums. Between a part of the ranks we sum directly instead, in 2 hops
    """

    terms: Callable[[int, Payload], Terms]
    work: Callable[[int, float], Work]
    overlap: Overlap
    crossing: Callable[[int, int], float]
    num_chunks: Callable[[int], int] = lambda N: 1
    row_calls: tuple[float, float] | None = None
    num_raw: Callable[[int], float] = lambda N: 0.0
    is_vendor_ring: bool = False


def cost_of_scheme(scheme: Scheme) -> SchemeCost:
    """Return the record of `scheme`. Raises ConfigError if it has none."""
    if scheme not in _COSTS:
        raise ConfigError(f"no cost for scheme {scheme!r}; known: {', '.join(_COSTS)}")
    return _COSTS[scheme]


def _ring(N: int, num_bytes: float) -> Terms:
    """Reduce-scatter and allgather, from neighbour to neighbour."""
    return 2.0 * (N - 1), 2 * (N - 1) / N * num_bytes


def _direct(N: int, num_bytes: float) -> Terms:
    """Reduce-scatter and allgather between all pairs at once."""
    return 2.0, 2 * (N - 1) / N * num_bytes


def _tree(N: int, num_bytes: float) -> Terms:
    """Halving and doubling among P ranks, the largest power of two. The others hand in their group first and wait."""
    P = power_of_two(N)
    folds = 2 if P < N else 0
    return 2 * math.log2(P) + folds, (2 * (P - 1) / P + folds) * num_bytes


def power_of_two(N: int) -> int:
    """Return the largest power of two up to N."""
    return 1 << (N.bit_length() - 1)


def _one_message(N: int, n: float) -> Work:
    """Encode and decode one message. dense packs and unpacks; AR-Topk selects, and writes one sum like one decode."""
    return Work(encode=(1, n), decode=(1, n))


def _by_chunk(N: int, n: float) -> Work:
    """Encode N - 1 foreign chunks and the own sum; decode and add N - 1 chunks, then decode all N sums."""
    return Work(encode=(N, n), decode=(2 * N - 1, (N - 1) * n / N + n))


def _tree_work(N: int, n: float) -> Work:
    """Do the work of `_by_chunk` with P chunks. Before it, a rank beyond P encodes all its chunks for another rank."""
    P = power_of_two(N)
    folds = 1 if P < N else 0
    return Work(
        encode=((1 + folds) * P, (1 + folds) * n),
        decode=((2 + folds) * P - 1, (P - 1) * n / P + (1 + folds) * n),
    )


def _once(N: int, L: int) -> float:
    """A ring in order of ranks enters and leaves each node once."""
    return 1.0


def _from_root(N: int, L: int) -> float:
    """A root sends to the N - L ranks of the other nodes."""
    return (N - L) / (N - 1)


def _from_all(N: int, L: int) -> float:
    """Each of the L ranks sends to the other nodes. Trees count like this too, though they send more to near ranks."""
    return _from_root(N, L) * L


def _artopk(scheme: Scheme) -> SchemeCost:
    """Broadcast one rank's indices, then sum the values at them; `var` and `auto` compare norms before."""

    def terms(N: int, payload: Payload) -> Terms:
        log_N = math.log2(N)
        value_bytes = payload.wire_bytes - payload.index_bytes
        hops, num_bytes = _tree(N, value_bytes) if scheme.by_tree else _ring(N, value_bytes)
        # An upper limit for `auto`: it compares norms in some steps only.
        return hops + log_N + (scheme.choice != "star"), num_bytes + log_N * payload.index_bytes

    return SchemeCost(
        terms=terms,
        work=_one_message,
        overlap=Overlap.NOTHING,
        crossing=_from_all if scheme.by_tree else _once,
        num_raw=lambda N: _tree_work(N, 0).decode[0] * scheme.by_tree,
        is_vendor_ring=not scheme.by_tree,
    )


_COSTS: dict[Scheme, SchemeCost] = {
    Scheme.DENSE: SchemeCost(
        terms=lambda N, payload: _ring(N, payload.dense_bytes),
        work=_one_message,
        overlap=Overlap.NOTHING,
        crossing=_once,
        is_vendor_ring=True,
    ),
    Scheme.ALLREDUCE: SchemeCost(
        terms=lambda N, payload: _ring(N, payload.wire_bytes),
        work=_one_message,
        overlap=Overlap.NOTHING,
        crossing=_once,
        is_vendor_ring=True,
    ),
    Scheme.ALLGATHER: SchemeCost(
        terms=lambda N, payload: (1.0, (N - 1.0) * payload.wire_bytes),
        work=lambda N, n: Work(encode=(1, n), decode=(N, N * n)),
        overlap=Overlap.DECODING,
        crossing=_from_all,
    ),
    Scheme.SRA: SchemeCost(
        terms=lambda N, payload: _direct(N, payload.wire_bytes),
        work=_by_chunk,
        overlap=Overlap.CODING,
        crossing=_from_all,
        num_chunks=lambda N: N,
        # Foreign chunks, then the own sum; the others' parts of the own chunk, then all sums.
        row_calls=(2.0, 2.0),
    ),
    Scheme.RING: SchemeCost(
        terms=lambda N, payload: _ring(N, payload.wire_bytes),
        work=_by_chunk,
        overlap=Overlap.PIECES,
        crossing=_once,
        num_chunks=lambda N: N,
    ),
    Scheme.TREE: SchemeCost(
        terms=lambda N, payload: _tree(N, payload.wire_bytes),
        work=_tree_work,
        overlap=Overlap.PIECES,
        crossing=_from_all,
        num_chunks=power_of_two,
    ),
    # The root's link carries everything. All except the root encode; the root decodes and adds N - 1 messages and
    # encodes the average; all decode that.
    Scheme.BROADCAST: SchemeCost(
        terms=lambda N, payload: (2.0, 2.0 * (N - 1) * payload.wire_bytes),
        work=lambda N, n: Work(encode=(2, 2 * n), decode=(N, N * n)),
        overlap=Overlap.PIECES,
        crossing=_from_root,
    ),
    **{scheme: _artopk(scheme) for scheme in Scheme if scheme.is_artopk},
}
