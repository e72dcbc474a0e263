"""Options that are banned for a time, after a failure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cgx_ray.control.learned.measured import dense_shares
from cgx_ray.plan import DENSE, Option
from cgx_ray.planner.prediction import PlannedGroup

# Seconds and steps, both, for which an option is banned after its gain fell or its plan was slower than dense. The time
# doubles with each further failure of the same option: a trial costs a few slow steps, so failures must become rare.
BAN_S = 300.0
MIN_BAN_STEPS = 100
# Share of the dense bytes from which an option may be the cause of a slow plan.
MIN_SHARE = 0.05


class _Ban(NamedTuple):
    until_s: float
    until_step: int
    ends_with_network: bool


class Bans:
    """Bans of one worker group. An option stands for its hierarchical variants too."""

    def __init__(self) -> None:
        self._bans: dict[Option, _Ban] = {}
        self._num_failures: dict[Option, int] = {}
        self._num_falls: dict[Option, int] = {}

    def banned(self, step: int, now_s: float) -> frozenset[Option]:
        """Return the flat options that are banned; forget bans that have ended."""
        self._bans = {one: ban for one, ban in self._bans.items() if step < ban.until_step or now_s < ban.until_s}
        return frozenset(self._bans)

    def add_gain_fall(self, options: Iterable[Option], step: int, now_s: float) -> None:
        """Ban `options`, twice as long each time: they kept much less of the gradient than expected, or cost loss."""
        for option in {option.flat() for option in options}:
            num_falls = self._num_falls.get(option, 0)
            self._num_falls[option] = num_falls + 1
            until = now_s + BAN_S * 2**num_falls, step + MIN_BAN_STEPS * 2**num_falls
            self._bans[option] = _Ban(*until, ends_with_network=False)

    def add_slow_plan(self, groups: Sequence[PlannedGroup], step: int, now_s: float) -> float:
        """Ban the options of a plan that was slower than dense; return the seconds of the longest ban.

        Options with little of the gradient, such as that of biases, cannot be the cause and stay allowed.
        """
        longest_s = 0.0
        shares = dense_shares([group for group in groups if not group.is_fixed])
        for option in {one.flat() for one, share in shares.items() if share >= MIN_SHARE and one != DENSE}:
            num_failures = self._num_failures.get(option, 0)
            self._num_failures[option] = num_failures + 1
            ban_s = BAN_S * 2**num_failures
            longest_s = max(longest_s, ban_s)
            if option not in self._bans or self._bans[option].ends_with_network:
                self._bans[option] = _Ban(now_s + ban_s, step + MIN_BAN_STEPS, ends_with_network=True)
        return longest_s

    def shift(self, num_steps: int) -> None:
        """Let bans end `num_steps` later, as the workers go on from another step than the newest one."""
        self._bans = {option: ban._replace(until_step=ban.until_step + num_steps) for option, ban in self._bans.items()}

    def network_changed(self) -> None:
        """End the bans of slow plans: what was slow on one network may be fast on another."""
        self._bans = {option: ban for option, ban in self._bans.items() if not ban.ends_with_network}
