"""Memory of failures: the options that are banned until some step, and the end of a pause."""

from __future__ import annotations

from collections.abc import Iterable

from cgx_ray.plan import Option

# Steps for which an option is banned after its gain fell. After a plan slower than dense the controller stays dense for
# as many steps. Both double with each further failure: a trial costs some steps, so failures must become rare.
BAN_STEPS = 500


class Setbacks:
    """Bans and pauses of one worker group. All numbers are steps of the training.

    pause_end  first step at which something other than dense may be tried again; 0 if there is no pause
    """

    def __init__(self) -> None:
        self.pause_end = 0
        # By flat option, which stands for its hierarchical variants too.
        self._banned_until: dict[Option, int] = {}
        self._num_failures = 0
        self._num_falls: dict[Option, int] = {}

    def banned(self, step: int) -> frozenset[Option]:
        """Return the flat options that are banned at `step`; forget older bans."""
        self._banned_until = {option: until for option, until in self._banned_until.items() if until > step}
        return frozenset(self._banned_until)

    def add_gain_fall(self, options: Iterable[Option], step: int) -> None:
        """Ban `options` for BAN_STEPS, twice as long each time, because they kept much less than expected."""
        for flat in {option.flat() for option in options}:
            self._ban([flat], step + (BAN_STEPS << self._num_falls.get(flat, 0)))
            self._num_falls[flat] = self._num_falls.get(flat, 0) + 1

    def add_slow_plan(self, options: Iterable[Option], step: int) -> int:
        """Begin a pause after a plan slower than dense, and ban its `options`; return the steps of the pause."""
        pause_steps = BAN_STEPS << self._num_failures
        self._num_failures += 1
        # The ban lasts twice as long as the pause, so the next trial is a different plan.
        self._ban(options, step + 2 * pause_steps)
        self.pause_end = step + pause_steps
        return pause_steps

    def _ban(self, options: Iterable[Option], until: int) -> None:
        for flat in {option.flat() for option in options}:
            self._banned_until[flat] = max(until, self._banned_until.get(flat, 0))
