"""Options that are banned for a time, because they cost loss or keep much less of the gradient than expected."""

from __future__ import annotations

from collections.abc import Iterable

from cgx_ray.control.learned.learned_errors import MEMORY_S
from cgx_ray.plan import Option


class Bans:
    """Bans of one worker group. An option stands for its hierarchical variants too.

    A ban lasts MEMORY_S, and twice as long with each further one of the same option: a trial costs loss.
    """

    def __init__(self) -> None:
        self._until_s: dict[Option, float] = {}
        self._num_bans: dict[Option, int] = {}

    def banned(self, now_s: float) -> frozenset[Option]:
        """Return the flat options that are banned."""
        return frozenset(option for option, until_s in self._until_s.items() if now_s < until_s)

    def add(self, options: Iterable[Option], now_s: float) -> None:
        """Ban `options`."""
        for option in {option.flat() for option in options}:
            num_bans = self._num_bans.get(option, 0)
            self._num_bans[option] = num_bans + 1
            self._until_s[option] = now_s + MEMORY_S * 2**num_bans
