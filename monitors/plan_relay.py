"""Plans on their way from the controller to the ranks of a node, which ask their agent by long poll."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from cgx_ray.plan import Plan

# Longest time for which a rank's long poll waits for a new plan, in seconds.
POLL_TIMEOUT_S = 10.0
# Newest plans that are kept for ranks that ask late, as many as the controller keeps for its own next one.
KEPT_PLANS = 8


class PlanRelay:
    """Keeps the plans that the controller has answered reports with, until ranks ask.

    No plan may be missing: all ranks wait for a plan until each of them holds it.
    """

    def __init__(self, *, has_controller: bool) -> None:
        """`has_controller`: there is one that gets reports. Without it, ranks have to ask for plans themselves."""
        self._plans: list[Plan] = []
        # Whether the controller has answered the last report.
        self._has_answer = has_controller
        self._changed = threading.Condition()

    @property
    def newest(self) -> int:
        """Version of the newest plan, -1 for none."""
        return self._plans[-1].version if self._plans else -1

    def take_answer(self, plans: Sequence[Plan] | None) -> None:
        """Keep the plans of an answer to a report. None: the controller does not answer."""
        with self._changed:
            self._has_answer = plans is not None
            new = [plan for plan in plans or () if plan.version > self.newest]
            self._plans = [*self._plans, *new][-KEPT_PLANS:]
            self._changed.notify_all()

    def after(self, version: int, timeout_s: float) -> list[Plan] | None:
        """Return the plans newer than `version`, oldest first; wait up to `timeout_s` for one, then return none.

        Returns None if the controller does not answer this node: then ask it, it may answer others.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._newer(version)) or not self._has_answer, timeout_s)
            return self._newer(version) if self._has_answer else None

    def _newer(self, version: int) -> list[Plan]:
        return [plan for plan in self._plans if plan.version > version]
