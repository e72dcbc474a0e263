"""The rates of all ranks' links in one direction, also of ranks whose messages are too short to show one."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from cgx_ray.control.topology import slow_links


class LinkRates:
    """The newest rate of each rank.

    After a change of the network a rate from before it is compared with the new ones, but names nobody slow who was not
    slow already: where one link has become slow, the plan for it sends so little that only that link is filled.

    all   bytes per second by rank, from before the last change if there is none since
    slow  those that are much slower than the others
    """

    def __init__(self) -> None:
        self.all: dict[int, float] = {}
        self.slow: dict[int, float] = {}
        self._new: set[int] = set()

    def update(self, rates: Mapping[int, float]) -> None:
        """Add rates that were measured since the last change."""
        self.all.update(rates)
        self._new |= rates.keys()
        known = self._new | self.slow.keys()
        self.slow = {rank: rate for rank, rate in slow_links(self.all).items() if rank in known}

    def forget(self) -> None:
        """Take all rates for those from before a change."""
        self._new = set()

    @property
    def usual(self) -> float | None:
        """Median rate; None unless the rates of all ranks are from after the last change."""
        return median(self.all.values()) if self.all and self._new >= self.all.keys() else None

    @property
    def is_outdated(self) -> bool:
        """True if a rank counts as slow by its rate from before the last change."""
        return not self.slow.keys() <= self._new
