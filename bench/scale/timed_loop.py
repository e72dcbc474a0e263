"""Control loop that notes how long reports take, for `bench scale`. The process of the loop imports no Ray."""

from __future__ import annotations

import time
from typing import Any

from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.policy import Decision
from cgx_ray.monitors.sample import NodeSample


class TimedLoop(ControlLoop):
    """Notes how long reports take."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._decision_s: list[float] = []
        self._longest_s = 0.0

    def timed(self) -> tuple[list[float], float]:
        """Return the seconds of each report that led to a decision, and of the longest of all."""
        return self._decision_s, self._longest_s

    def observe(self, sample: NodeSample, now_s: float) -> list[Decision]:
        start_s = time.perf_counter()
        found = super().observe(sample, now_s)
        took_s = time.perf_counter() - start_s
        self._longest_s = max(self._longest_s, took_s)
        if found:
            self._decision_s.append(took_s)
        return found
