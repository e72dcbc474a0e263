"""Detectors that separate a change from noise: CUSUM (Page 1954) on logarithms, with evidence counted in seconds.

Each second adds log(value / level) - log(NOISE) to the evidence for a rise, and the same with the other sign for a
fall; evidence never falls below 0. A ratio counts as at most OBVIOUS. An alarm is raised when the evidence reaches
ALARM. A change by 2x adds log 2 - log 1.2 = 0.51 per second, so it is noticed after 2.1 s, and one of 2 s is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from cgx_ray.control.network.estimate import NOISE, OBVIOUS, WORK_S
from cgx_ray.planner.cost import Link

# Ratio of two bandwidths, or of two latencies that differ by more than WORK_S. Larger than the spread of an estimate
# that is sure (NOISE), so noise is no change.
LINK_CHANGE = 1.5
# Evidence that raises an alarm, in units of logarithm times seconds: 2.1 s of a change by 2x.
ALARM = 1.05
# Seconds in which values settle: the first level is learned before anything can be a change, and what has been so for
# less may be on its way to something else.
SETTLE_S = 2.0
# Seconds of steps that estimates and levels are made from, and for which what was learned is undone if the network has
# changed. Long enough for quantiles, short enough to follow a drift.
WINDOW_S = 10.0


def network_cause(old: Link, new: Link) -> str | None:
    """Return in words how `new` differs from `old`, or None if both count as the same network."""
    if is_other_latency(old.alpha_s, new.alpha_s):
        verb = _verb(old.alpha_s, new.alpha_s)
        return f"latency {verb} from {old.alpha_s * 1e3:.1f} to {new.alpha_s * 1e3:.1f} ms"
    if not 1 / LINK_CHANGE < new.bandwidth_gbps / old.bandwidth_gbps < LINK_CHANGE:
        verb = _verb(old.bandwidth_gbps, new.bandwidth_gbps)
        return f"bandwidth {verb} from {_rate(old.bandwidth_gbps)} to {_rate(new.bandwidth_gbps)}"
    return None


def is_other_latency(old_s: float, new_s: float) -> bool:
    return abs(new_s - old_s) > WORK_S and not 1 / LINK_CHANGE < new_s / old_s < LINK_CHANGE


def _verb(old: float, new: float) -> str:
    return "rose" if new > old else "fell"


def _rate(gbps: float) -> str:
    return f"{gbps:.2f} Gbit/s" if gbps >= 1 else f"{gbps * 1e3:.0f} Mbit/s"


class ChangeDetector:
    """Watches one positive quantity and reports when its level has moved by about 2x or more, up or down.

    Samples may come at any rate: a sample that covers `seconds` counts as much as several that cover them together.
    After an alarm the new level is the mean of the samples since the evidence began to grow.

    had_level  samples of SETTLE_S have made a level; it stays True after an alarm
    """

    def __init__(self) -> None:
        self.had_level = False
        self._level = self._seconds = 0.0
        self._up = _Evidence()
        self._down = _Evidence()

    def add_sample(self, value: float, seconds: float) -> float | None:
        """Add a sample; return the seconds since the level changed if that is now certain, else None.

        Raises ValueError if `value` is not a positive number.
        """
        if not 0 < value < math.inf:
            raise ValueError(f"value {value!r} has no logarithm; give a positive number")
        log_value = math.log(value)
        if not self._has_level:
            self._learn(log_value, seconds)
            return None
        for evidence, sign in ((self._up, 1), (self._down, -1)):
            has_grown = evidence.add_sample(sign * (log_value - self._level), log_value, seconds)
            if has_grown and evidence.amount >= ALARM:
                since_s = evidence.seconds
                # Some of these samples may be from before the change, so the level goes on learning.
                self._level, self._seconds = evidence.sum / since_s, min(since_s, SETTLE_S)
                self._up, self._down = _Evidence(), _Evidence()
                return since_s
        if not (self._up.seconds or self._down.seconds):
            self._learn(log_value, seconds)
        return None

    @property
    def _has_level(self) -> bool:
        return self._seconds >= SETTLE_S

    def is_far_below(self, value: float) -> bool:
        """Return whether `value` is less than the level by OBVIOUS or more; False before the level is known."""
        return self._has_level and math.log(value) <= self._level - math.log(OBVIOUS)

    def _learn(self, log_value: float, seconds: float) -> None:
        self._seconds = min(self._seconds + seconds, WINDOW_S)
        self._level += (log_value - self._level) * min(1.0, seconds / self._seconds)
        self.had_level |= self._has_level


class _Evidence:
    """Evidence for a change in one direction, and the samples since it last was 0."""

    def __init__(self) -> None:
        self.amount = 0.0
        self.seconds = 0.0
        self.sum = 0.0

    def add_sample(self, deviation: float, log_value: float, seconds: float) -> bool:
        """Add a sample; return whether there was evidence before and is more now, as one may always be an outlier."""
        before = self.amount
        self.amount = max(0.0, self.amount + (min(deviation, math.log(OBVIOUS)) - math.log(NOISE)) * seconds)
        if not self.amount:
            self.seconds, self.sum = 0.0, 0.0
            return False
        self.seconds += seconds
        self.sum += log_value * seconds
        return 0 < before < self.amount


class SlowRanks:
    """Ranks whose compute takes more than 1.2x the median for SETTLE_S; cleared after as many normal seconds."""

    def __init__(self, world_size: int) -> None:
        self._slow_s = [0.0] * world_size
        self.ranks: frozenset[int] = frozenset()

    def add_ratios(self, ratios: Mapping[int, float], seconds: float) -> bool:
        """Add compute times over their median by rank; return whether `ranks` has changed."""
        before = self.ranks
        for rank, ratio in ratios.items():
            if ratio < NOISE and not self._slow_s[rank]:
                # Nearly all ranks, nearly always: nothing changes.
                continue
            self._slow_s[rank] += seconds if ratio >= NOISE else -seconds
            self._slow_s[rank] = min(max(0.0, self._slow_s[rank]), SETTLE_S)
            if self._slow_s[rank] == SETTLE_S:
                self.ranks |= {rank}
            elif self._slow_s[rank] == 0:
                self.ranks -= {rank}
        return self.ranks != before


class ComputeChanges:
    """CUSUM test of compute."""

    def __init__(self) -> None:
        self._detector = ChangeDetector()
        self._has_changed = False

    def add_step(self, compute_s: float, seconds: float) -> None:
        """Add the compute of a step that took `seconds`."""
        self._has_changed |= self._detector.add_sample(compute_s, seconds) is not None

    def cause(self, decided_s: float, compute_s: float) -> str | None:
        """Return in words how compute has changed since `acknowledge`, or None. `decided_s`: of the last decision."""
        shorter_s, longer_s = sorted((decided_s, compute_s))
        if self._has_changed and longer_s >= NOISE * shorter_s:
            return f"compute {_verb(decided_s, compute_s)} from {decided_s:.3f} to {compute_s:.3f} s"
        return None

    def acknowledge(self) -> None:
        """Forget the changes until now, because a decision has taken them into account."""
        self._has_changed = False
