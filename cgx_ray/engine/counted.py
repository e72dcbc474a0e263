"""Ranks that report rates, lags and errors: the controller's work must not grow with the square of the ranks.

Each rank is in 16 of the pairs whose rates count. In large runs one rank per node reports rates, of four others, as the
other ranks receive over the same link, and some of its bursts. A lag counts if its first rank is such a rank on one of
four nodes: the estimates are quantiles over all. Only the first ranks report errors by layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cgx_ray.monitors.sample import Burst, counted_offsets

# Most ranks that all report rates.
MAX_REPORTING = 512
# Above MAX_REPORTING ranks: every 4th distance and every 4th node reports; at most 4 bursts per rank and step.
FEWER = 4
MAX_BURSTS = 4
# Ranks that measure errors by layer. Each reports two numbers per layer, and more ranks hardly change the mean.
MAX_MEASURING = 16


def reports_rates(rank: int, nodes: Sequence[int]) -> bool:
    """Return whether `rank` reports the rates of its link. `nodes`: by rank, the index of its node."""
    return len(nodes) <= MAX_REPORTING or nodes.index(nodes[rank]) == rank


def counted_peers(rank: int, nodes: Sequence[int], step: int) -> list[int]:
    """Return the ranks whose messages' rates `rank` reports in `step`."""
    if not reports_rates(rank, nodes):
        return []
    # Ranks of a node are usually in a row: then these peers report rates as well.
    stride = nodes.count(nodes[rank]) if len(nodes) > MAX_REPORTING else 1
    offsets = counted_offsets(step, len(nodes) // stride)[:: FEWER if len(nodes) > MAX_REPORTING else 1]
    found = ((rank + sign * stride * offset) % len(nodes) for offset in offsets for sign in (1, -1))
    return [peer for peer in dict.fromkeys(found) if peer != rank]


def counted_lags(rank: int, nodes: Sequence[int], lag_s: Mapping[int, float]) -> dict[int, float]:
    """Return the lags, by other rank, that `rank` reports. The other rank of each such pair reports its lag too."""
    return {peer: seconds for peer, seconds in lag_s.items() if _reports_lags(_first(rank, peer, len(nodes)), nodes)}


def _reports_lags(rank: int, nodes: Sequence[int]) -> bool:
    return len(nodes) <= MAX_REPORTING or (nodes[rank] % FEWER == 0 and reports_rates(rank, nodes))


def counted_bursts(bursts: Sequence[Burst], rank: int, nodes: Sequence[int]) -> tuple[Burst, ...]:
    """Return the part of a step's `bursts` that `rank` reports."""
    if not reports_rates(rank, nodes):
        return ()
    return tuple(bursts[:: -(-len(bursts) // MAX_BURSTS) or 1] if len(nodes) > MAX_REPORTING else bursts)


def _first(a: int, b: int, num_ranks: int) -> int:
    """Return the rank from which the other is the nearer one, counted upwards."""
    return a if ((b - a) % num_ranks, a) < ((a - b) % num_ranks, b) else b
