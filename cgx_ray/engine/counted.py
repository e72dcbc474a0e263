"""Ranks whose rates and lags are told in a step: the controller's work must not grow with the square of the ranks.

Each rank is in 16 of the pairs whose rates count. In large runs one rank per node tells rates, as the others receive
over the same link, and of the lags those between two ranks of which the first is such a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cgx_ray.monitors.sample import counted_offsets

# Most ranks that all tell rates.
MAX_TELLING = 512


def tells_rates(rank: int, nodes: Sequence[int]) -> bool:
    """Return whether `rank` tells the rates of its link. `nodes`: by rank, the index of its node."""
    return len(nodes) <= MAX_TELLING or nodes.index(nodes[rank]) == rank


def counted_peers(rank: int, nodes: Sequence[int], step: int) -> list[int]:
    """Return the ranks of which `rank` tells in `step` how fast their messages came."""
    if not tells_rates(rank, nodes):
        return []
    # Ranks of a node are usually in a row: then these peers tell rates as well.
    stride = nodes.count(nodes[rank]) if len(nodes) > MAX_TELLING else 1
    offsets = counted_offsets(step, len(nodes) // stride)
    found = ((rank + sign * stride * offset) % len(nodes) for offset in offsets for sign in (1, -1))
    return [peer for peer in dict.fromkeys(found) if peer != rank]


def counted_lags(rank: int, nodes: Sequence[int], lag_s: Mapping[int, float]) -> dict[int, float]:
    """Return the part of `lag_s`, by other rank, that `rank` tells. The other rank tells its lag of each such pair."""
    return {peer: seconds for peer, seconds in lag_s.items() if tells_rates(_first(rank, peer, len(nodes)), nodes)}


def _first(a: int, b: int, num_ranks: int) -> int:
    """Return the rank from which the other is the nearer one, counted upwards."""
    return a if ((b - a) % num_ranks, a) < ((a - b) % num_ranks, b) else b
