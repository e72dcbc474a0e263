"""Seconds of a step of whole plans that have run: no prediction is as sure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from cgx_ray.control.learned.evidence import MAX_STEPS
from cgx_ray.control.learned.learned_errors import MEMORY_S, Earlier
from cgx_ray.control.network.changes import is_other_latency
from cgx_ray.control.network.estimate import NOISE
from cgx_ray.control.network.known_network import KnownNetwork
from cgx_ray.planner.cost import Link
from cgx_ray.planner.planned_group import PlannedGroup
from cgx_ray.planner.prediction import Measured

Groups = tuple[PlannedGroup, ...]


class Bounds(NamedTuple):
    """Seconds of a step: at least and at most. Equal where the plan ran under the same conditions."""

    least_s: float
    most_s: float

    @property
    def is_measured(self) -> bool:
        return self.least_s == self.most_s

    def clamp(self, step_s: float) -> float:
        return min(max(step_s, self.least_s), self.most_s)


NO_BOUNDS = Bounds(0.0, math.inf)


class _Ran(NamedTuple):
    """A plan that ran: seconds of a step that its compute did not hide, and that compute over a dense step's.

    link, compute_s  of the time, compute as that of a dense step
    num_changes      of the network until then
    """

    exposed_s: float
    compute_slowdown: float
    now_s: float
    link: Link
    compute_s: float
    num_changes: int

    def bounds(self, measured: Measured, network: KnownNetwork) -> Bounds:
        """Return the seconds between which a step takes under the conditions of `measured`.

        No better link makes a plan slower, and no worse one faster.
        """
        if not 1 / NOISE < self.compute_s / measured.compute_s < NOISE:
            return NO_BOUNDS
        took_s = self.compute_slowdown * measured.compute_s + self.exposed_s
        link = network.unless_guessed(measured.network.between, self.link, self.num_changes)
        faster = self.link.beta_s_per_byte / link.beta_s_per_byte
        same_latency = not is_other_latency(self.link.alpha_s, link.alpha_s)
        is_no_worse = faster > 1 / NOISE and (same_latency or link.alpha_s < self.link.alpha_s)
        is_no_better = faster < NOISE and (same_latency or link.alpha_s > self.link.alpha_s)
        return Bounds(took_s if is_no_better else 0.0, took_s if is_no_worse else math.inf)


class PlanTimes:
    """Measured seconds of steps, by the groups of the plan."""

    def __init__(self, network: KnownNetwork) -> None:
        """`network` says which links are guesses."""
        self._network = network
        # Oldest first.
        self._ran: dict[Groups, _Ran] = {}
        self._earlier: Earlier[dict[Groups, _Ran]] = Earlier()

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
        self._earlier.add(dict(self._ran), now_s)
        self._ran.pop(tuple(groups), None)
        self._ran[tuple(groups)] = _Ran(
            exposed_s, compute_slowdown, now_s, link, measured.compute_s, self._network.num_changes
        )
        self._ran = dict([*self._ran.items()][-MAX_STEPS:])

    def on(self, measured: Measured, now_s: float) -> dict[Groups, Bounds]:
        """Return the bounds of each plan of the last MEMORY_S of which some are known under these conditions."""
        recent = {groups: ran for groups, ran in self._ran.items() if now_s < ran.now_s + MEMORY_S}
        bounds = {groups: ran.bounds(measured, self._network) for groups, ran in recent.items()}
        return {groups: one for groups, one in bounds.items() if one != NO_BOUNDS}

    def undo(self, now_s: float) -> None:
        """Forget steps of the last seconds: another network may not have been noticed yet."""
        self._ran = self._earlier.take(self._ran, now_s)
