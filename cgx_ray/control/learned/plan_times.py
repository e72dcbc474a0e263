"""Seconds of a step of whole plans that have run: no prediction is as sure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cgx_ray.control.learned.evidence import MAX_STEPS
from cgx_ray.control.learned.learned_errors import MEMORY_S
from cgx_ray.control.network.changes import WINDOW_S, is_other_latency
from cgx_ray.control.network.estimate import NOISE
from cgx_ray.planner.cost import Link
from cgx_ray.planner.prediction import Measured, PlannedGroup

Groups = tuple[PlannedGroup, ...]


class _Ran(NamedTuple):
    """A plan that ran: seconds of a step that its compute did not hide, and that compute over a dense step's.

    link, compute_s  of the time, compute as that of a dense step
    """

    exposed_s: float
    compute_slowdown: float
    now_s: float
    link: Link
    compute_s: float

    def is_like(self, measured: Measured) -> bool:
        link = measured.network.between
        return (
            not is_other_latency(self.link.alpha_s, link.alpha_s)
            and 1 / NOISE < self.link.beta_s_per_byte / link.beta_s_per_byte < NOISE
            and 1 / NOISE < self.compute_s / measured.compute_s < NOISE
        )


class PlanTimes:
    """Measured seconds of steps, by the groups of the plan."""

    def __init__(self) -> None:
        # Oldest first.
        self._ran: dict[Groups, _Ran] = {}

    def add_steps(
        self,
        groups: Sequence[PlannedGroup],
        exposed_s: float,
        compute_slowdown: float,
        measured: Measured,
        now_s: float,
    ) -> None:
        """Note steps on the network, and with the compute, of `measured`.

        exposed_s         seconds of a step that compute did not hide
        compute_slowdown  compute of these steps over that of dense steps
        """
        link = measured.network.between
        self._ran.pop(tuple(groups), None)
        self._ran[tuple(groups)] = _Ran(exposed_s, compute_slowdown, now_s, link, measured.compute_s)
        self._ran = dict([*self._ran.items()][-MAX_STEPS:])

    def on(self, measured: Measured, now_s: float) -> dict[Groups, float]:
        """Return the seconds of a step of each plan that ran in the last MEMORY_S under conditions like `measured`."""
        return {
            groups: ran.compute_slowdown * measured.compute_s + ran.exposed_s
            for groups, ran in self._ran.items()
            if now_s < ran.now_s + MEMORY_S and ran.is_like(measured)
        }

    def undo(self, now_s: float) -> None:
        """Forget steps of the last seconds: another network may not have been noticed yet."""
        self._ran = {groups: ran for groups, ran in self._ran.items() if ran.now_s < now_s - WINDOW_S}
