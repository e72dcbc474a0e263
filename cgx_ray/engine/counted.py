"""Ranks whose rates, lags and errors are told: the controller's work must not grow with the square of the ranks.

Each rank is in 16 of the pairs whose rates count. In large runs one rank per node tells rates, of four others, as the
other ranks receive over the same link, and some of its bursts. Of the lags those count whose first rank is such a rank
on one of four nodes: the estimates are quantiles over all. Errors by layer are told by the first ranks alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cgx_ray.monitors.sample import Burst, counted_offsets

# Most ranks that all tell rates.
MAX_TELLING = 512
# Above MAX_TELLING ranks: every 4th distance and every 4th node reports; at most 4 bursts per rank and step.
FEWER = 4
MAX_BURSTS = 4
# Ranks that measure errors by layer. Each tells two numbers per layer, and the mean over more ranks says little more.
MAX_MEASURING = 16


def tells_rates(rank: int, nodes: Sequence[int]) -> bool:
    """Return whether `rank` tells the rates of its link. `nodes`: by rank, the index of its node."""
    return len(nodes) <= MAX_TELLING or nodes.index(nodes[rank]) == rank


def counted_peers(rank: int, nodes: Sequence[int], step: int) -> list[int]:
    """Return the ranks of which `rank` tells in `step` how fast their messages came."""
    if not tells_rates(rank, nodes):
        return []
    # Ranks of a node are usually in a row: then these peers tell rates as well.
    stride = nodes.count(nodes[rank]) if len(nodes) > MAX_TELLING else 1
    offsets = counted_offsets(step, len(nodes) // stride)[:: FEWER if len(nodes) > MAX_TELLING else 1]
    found = ((rank + sign * stride * offset) % len(nodes) for offset in offsets for sign in (1, -1))
    return [peer for peer in dict.fromkeys(found) if peer != rank]


def counted_lags(rank: int, nodes: Sequence[int], lag_s: Mapping[int, float]) -> dict[int, float]:
    """Return the part of `lag_s`, by other rank, that `rank` tells. The other rank tells its lag of each such pair."""
    return {peer: seconds for peer, seconds in lag_s.items() if _tells_lags(_first(rank, peer, len(nodes)), nodes)}


def _tells_lags(rank: int, nodes: Sequence[int]) -> bool:
    return len(nodes) <= MAX_TELLING or (nodes[rank] % FEWER == 0 and tells_rates(rank, nodes))


def counted_bursts(bursts: Sequence[Burst], rank: int, nodes: Sequence[int]) -> tuple[Burst, ...]:
    """Return those of a step's `bursts` that `rank` tells."""
    if not tells_rates(rank, nodes):
        return ()
    return tuple(bursts[:: -(-len(bursts) // MAX_BURSTS) or 1] if len(nodes) > MAX_TELLING else bursts)


def _first(a: int, b: int, num_ranks: int) -> int:
    """Return the rank from which the other is the nearer one, counted upwards."""
    return a if ((b - a) % num_ranks, a) < ((a - b) % num_ranks, b) else b
