"""When a running job may probe which way, and how much a probe may send. Pure: no clock, no sockets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

# A probe costs at most this share of a link over this long.
BUDGET_SHARE = 0.01
BUDGET_S = 60.0
# What a link is taken for before anyone has measured it: 100 Mbit/s.
FIRST_GUESS_BYTES_PER_S = 12.5e6


def budget_bytes(bytes_per_s: float | None) -> int:
    """What a probe may send, once a minute, over a link of that rate; None if it is unknown."""
    return int(BUDGET_SHARE * BUDGET_S * (bytes_per_s or FIRST_GUESS_BYTES_PER_S))


class ProbeSchedule:
    """Gives each way between two nodes its turn. A node takes part in one probe a minute, at either end.

    So no link sends or receives more than one budget a minute, and no node is ever probed twice at once: a probe is
    over long before that. The first minute belongs to the job's own messages.
    """

    def __init__(self) -> None:
        self._node_s: dict[str, float] = {}
        self._way_s: dict[tuple[str, str], float] = {}

    def grant(self, source: str, nodes: Collection[str], now_s: float) -> str | None:
        """The node that `source` is to probe now; None if it is not its turn.

        nodes  all that take part, `source` among them. Each of them must ask every now and then
        now_s  by one clock for all
        """
        rested = sorted(node for node in nodes if now_s - self._node_s.setdefault(node, now_s) >= BUDGET_S)
        ways = itertools.permutations(rested, 2)
        way = min(ways, key=lambda way: self._way_s.get(way, -math.inf), default=None)
        if way is None or way[0] != source:
            return None
        self._node_s[way[0]] = self._node_s[way[1]] = self._way_s[way] = now_s
        return way[1]
