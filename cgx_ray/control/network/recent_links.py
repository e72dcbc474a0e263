"""The newest links, and whether they change too fast to follow."""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean

from cgx_ray.control.network.changes import SETTLE_S, network_cause
from cgx_ray.planner.cost import Link

# Mean seconds between changes below which the loop does not follow a link that goes back and forth: 2 to 5 seconds pass
# until a change is noticed, and the plan for it is in force until the next change is.
MIN_DWELL_S = 20.0
# Changes of direction from which a link goes back and forth. A drift has one at most.
MIN_REVERSALS = 2
# Message whose time shows which of two links is faster, bytes.
_MESSAGE_BYTES = 1 << 20


@dataclass(slots=True)
class _Stay:
    link: Link
    seconds: float = 0.0


class RecentLinks:
    """The newest stays on one link each, as many as show MIN_REVERSALS."""

    def __init__(self) -> None:
        # Newest last.
        self._stays: deque[_Stay] = deque(maxlen=MIN_REVERSALS + 2)

    def add_link(self, link: Link, seconds: float) -> None:
        """Add a step of `seconds`, at whose end `link` was measured."""
        if self._is_other(link) and self._stays and self._stays[-1].seconds < SETTLE_S:
            # Estimates pass through other values after a change. The stay before it may go on.
            self._stays.pop()
        if self._is_other(link):
            self._stays.append(_Stay(link))
        self._stays[-1].link = link
        self._stays[-1].seconds += seconds

    def _is_other(self, link: Link) -> bool:
        return not self._stays or network_cause(self._stays[-1].link, link) is not None

    @property
    def dwell_s(self) -> float:
        """Seconds for which a link is expected to stay as it is; infinite unless it has gone back and forth lately.

        If the present link has stayed for MIN_DWELL_S and twice as long as those before it, it is steady again.
        """
        times = [stay.link.seconds(1, _MESSAGE_BYTES) for stay in self._stays]
        is_rise = [b > a for a, b in itertools.pairwise(times)]
        if sum(a != b for a, b in itertools.pairwise(is_rise)) < MIN_REVERSALS:
            return math.inf
        *before, now = self._stays
        mean_s = fmean(stay.seconds for stay in before)
        return mean_s if now.seconds < max(2 * mean_s, MIN_DWELL_S) else math.inf

    @property
    def is_unsteady(self) -> bool:
        return self.dwell_s < MIN_DWELL_S

    def different(self) -> list[Link]:
        """Return the different links among the newest stays, the newest of each kind."""
        found: list[Link] = []
        for stay in reversed(self._stays):
            if all(network_cause(link, stay.link) is not None for link in found):
                found.append(stay.link)
        return found
