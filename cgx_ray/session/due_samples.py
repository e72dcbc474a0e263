"""When the samples of a rank go to the control loop: at once after a slow step, else twice a second."""

from __future__ import annotations

import time
from collections.abc import Callable

from cgx_ray.monitors.sample import StepSample

# Seconds between two looks for new samples.
LOOK_S = 0.05


class DueSamples:
    """Collects samples, and gives them out every `interval_s`, or at once if no step has ended for so long.

    A plan that answers a step which took long can then be in force one step earlier.
    """

    def __init__(self, take_samples: Callable[[], list[StepSample]], interval_s: float) -> None:
        self._take_samples, self._interval_s = take_samples, interval_s
        self._samples: list[StepSample] = []
        self._due_s = 0.0

    def take(self) -> list[StepSample]:
        """Return the samples that are due now, oldest first. Call it every LOOK_S."""
        self._samples += self._take_samples()
        now_s = time.monotonic()
        if not self._samples or now_s < self._due_s:
            return []
        self._due_s = now_s + self._interval_s
        return self.take_all()

    def take_all(self) -> list[StepSample]:
        """Return all samples since the last call."""
        samples, self._samples = self._samples + self._take_samples(), []
        return samples
