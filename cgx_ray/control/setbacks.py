"""Memory of failures: which codecs and schemes are banned until which step, and when a pause ends."""

from __future__ import annotations

from collections.abc import Iterable

from cgx_ray.control.policy import Pair

# Steps for which a codec is banned after its gain fell. After a plan slower than dense the controller stays dense for
# as many steps, doubled with each further failure: a trial costs a few slow steps, so failures must become rare.
BAN_STEPS = 500


class Setbacks:
    """Bans and pauses of one worker group. All numbers are steps of the training.

    pause_end  first step at which something other than dense may be tried again; 0 if there is no pause
    """

    def __init__(self) -> None:
        self.pause_end = 0
        self._banned_until: dict[Pair, int] = {}
        self._num_failures = 0

    def banned(self, step: int) -> frozenset[Pair]:
        """Return the pairs of codec and scheme that are banned at `step`, flat or hierarchical; forget older bans."""
        self._banned_until = {pair: until for pair, until in self._banned_until.items() if until > step}
        return frozenset(self._banned_until)

    def add_gain_fall(self, pairs: Iterable[Pair], step: int) -> None:
        """Ban `pairs` for BAN_STEPS, because their codec kept much less of the gradient than expected."""
        self._ban(pairs, step + BAN_STEPS)

    def add_slow_plan(self, pairs: Iterable[Pair], step: int) -> int:
        """Begin a pause after a plan slower than dense, and ban its `pairs`; return the steps of the pause."""
        pause_steps = BAN_STEPS << self._num_failures
        self._num_failures += 1
        # The ban lasts twice as long as the pause, so the next trial is a different plan.
        self._ban(pairs, step + 2 * pause_steps)
        self.pause_end = step + pause_steps
        return pause_steps

    def _ban(self, pairs: Iterable[Pair], until: int) -> None:
        self._banned_until |= {pair: max(until, self._banned_until.get(pair, 0)) for pair in pairs}
