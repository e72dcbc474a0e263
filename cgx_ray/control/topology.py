"""Who is near whom, and whose link is slow: from round trips and rates between ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from statistics import median
from typing import TypeVar

# Round trips within a host, a switch or a site differ by less than this, those between by more.
NEAR_FACTOR = 3.0
# A link under this share of the others' is slow.
SLOW_SHARE = 0.6

K = TypeVar("K", bound=Hashable)


def clusters(round_trip_s: Mapping[tuple[int, int], float], factor: float = NEAR_FACTOR) -> list[list[int]]:
    """Sort ranks into near groups: single linkage on the logarithm of their round trips.

    round_trip_s  of pairs (a, b), each once in whichever order

    Pairs are joined from the nearest on, until the next is `factor` or more farther than the farthest joined before.
    One group if there is no such gap. Groups and ranks ascend.
    """
    group_of = {rank: {rank} for pair in round_trip_s for rank in pair}
    reach: float | None = None
    for (a, b), seconds in sorted(round_trip_s.items(), key=lambda entry: entry[1]):
        if group_of[a] is group_of[b]:
            continue
        if reach is not None and math.log(seconds / reach) >= math.log(factor):
            break
        reach = seconds
        group_of[a] |= group_of[b]
        for rank in group_of[b]:
            group_of[rank] = group_of[a]
    return sorted({id(group): sorted(group) for group in group_of.values()}.values())


def slow_links(rate: Mapping[K, float], share: float = SLOW_SHARE) -> dict[K, float]:
    """Of the links' rates those under `share` of the median. None of fewer than three: which would be the slow one?

    rate  by rank, or by whatever tells links apart
    """
    if len(rate) < 3:
        return {}
    usual = median(rate.values())
    return {key: value for key, value in rate.items() if value < share * usual}


class SilentNodes:
    """Nodes that have answered others and answer nobody now: cut off, as far as the others can see.

    known  all that have ever answered
    """

    def __init__(self) -> None:
        self._answers: dict[str, frozenset[str]] = {}
        self.known: frozenset[str] = frozenset()

    def add(self, node_id: str, answering: Collection[str]) -> None:
        """Take in who answers the probes of `node_id`."""
        self._answers[node_id] = frozenset(answering)
        self.known |= self._answers[node_id]

    @property
    def node_ids(self) -> frozenset[str]:
        """None if they are more than half of all: then who reports is the one that is cut off."""
        silent = self.known.difference(*self._answers.values())
        return silent if 2 * len(silent) <= len(self.known) else frozenset()
