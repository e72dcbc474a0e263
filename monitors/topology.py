"""Who is near whom, and whose link is slow: from round trips and rates between ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median

# Round trips within a host, a switch or a site differ by less than this, those between by more.
NEAR_FACTOR = 3.0
# A link under this share of the others' is slow.
SLOW_SHARE = 0.6


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


def slow_links(rate: Mapping[int, float], share: float = SLOW_SHARE) -> dict[int, float]:
    """Of the ranks' rates those under `share` of the median. None of fewer than three: who would be the slow one?"""
    if len(rate) < 3:
        return {}
    usual = median(rate.values())
    return {rank: value for rank, value in rate.items() if value < share * usual}
