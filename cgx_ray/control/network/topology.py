"""Near and far ranks, slow links and silent nodes, from round trips and rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from statistics import median
from typing import TypeVar

from cgx_ray.control.network.changes import LINK_CHANGE
from cgx_ray.control.network.estimate import FEW, OBVIOUS

K = TypeVar("K", bound=Hashable)


def clusters(round_trip_s: Mapping[tuple[int, int], float]) -> list[list[int]]:
    """Return clusters of near ranks: single linkage on the logarithm of their round trips.

    round_trip_s  by pair (a, b), each pair once, in either order

    Pairs are joined by ascending round trip, until the next round trip is OBVIOUS or more times the longest one joined
    so far: it is of another level, such as host, switch or site. Without such a gap all ranks are in one cluster.
    Clusters and their ranks ascend.
    """
    cluster_of = {rank: {rank} for pair in round_trip_s for rank in pair}
    reach: float | None = None
    for (a, b), seconds in sorted(round_trip_s.items(), key=lambda entry: entry[1]):
        if cluster_of[a] is cluster_of[b]:
            continue
        if reach is not None and seconds >= OBVIOUS * reach:
            break
        reach = seconds
        cluster_of[a] |= cluster_of[b]
        for rank in cluster_of[b]:
            cluster_of[rank] = cluster_of[a]
    return sorted({id(cluster): sorted(cluster) for cluster in cluster_of.values()}.values())


def slow_links(rate: Mapping[K, float]) -> dict[K, float]:
    """Return the links that are slower than the median by a LINK_CHANGE; none if there are fewer than FEW.

    rate  by rank, or by another key per link
    """
    if len(rate) < FEW:
        return {}
    usual = median(rate.values())
    return {key: value for key, value in rate.items() if LINK_CHANGE * value < usual}


class SilentNodes:
    """Nodes that answered other nodes before and answer none now, so they are cut off.

    known  all nodes that have ever answered
    """

    def __init__(self) -> None:
        self.known: frozenset[str] = frozenset()
        self._answers: dict[str, frozenset[str]] = {}
        # By node, the number of nodes that it answers; and the nodes that answer none any more.
        self._num_asking: Counter[str] = Counter()
        self._silent: frozenset[str] = frozenset()

    def add_answers(self, node_id: str, answering: Collection[str]) -> None:
        """Add the nodes that answered the latest probes of `node_id`."""
        before, now = self._answers.get(node_id, frozenset()), frozenset(answering)
        if now == before:
            return
        self._answers[node_id] = now
        self._num_asking.update(now - before)
        self._num_asking.subtract(before - now)
        self.known |= now
        self._silent = (self._silent | {node for node in before - now if not self._num_asking[node]}) - now

    @property
    def node_ids(self) -> frozenset[str]:
        """The silent nodes. Empty if more than half of all seem silent: then the reporting node itself is cut off."""
        return self._silent if 2 * len(self._silent) <= len(self.known) else frozenset()
