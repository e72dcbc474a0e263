"""The clock of a step, on the host and on the CUDA device, and what happens between two steps."""

from __future__ import annotations

import time
from collections import deque
from statistics import median_low

import torch

# Steps whose median is the usual time, and the fewest that tell it: the first step is unlike all others.
USUAL_STEPS, LEAST_STEPS = 31, 3
# Times the usual time from which the rest is a pause. Less is noise of small models and of data loaders.
PAUSE_FACTOR = 2.0


class StepClock:
    """The time at which the step under way began, which is when the step before it ended.

    began_s  host time, as of `time.perf_counter`
    """

    def __init__(self, device: torch.device) -> None:
        """Begin the first step. `device`: where the gradients are."""
        self._device = device
        self._began: torch.cuda.Event | None = None
        self.restart()

    def restart(self) -> None:
        """Begin a step. On a CUDA device, wait until the work of the step before has finished."""
        if self._device.type == "cuda":
            self._began = torch.cuda.Event(enable_timing=True)
            self._began.record(torch.cuda.current_stream(self._device))
            self._began.synchronize()
        self.began_s = time.perf_counter()

    def time_of(self, event: torch.cuda.Event) -> float:
        """Wait for `event`. Return the host time at which the device reached it."""
        assert self._began is not None
        event.synchronize()
        since_began_ms: float = self._began.elapsed_time(event)
        return self.began_s + 1e-3 * since_began_ms


class PauseWatch:
    """Tells a pause between two steps, such as an evaluation, a checkpoint or a report, from what each step needs.

    Optimizer, data loading and forward come before a step's first gradient. If that takes more than PAUSE_FACTOR times
    the median of the last steps, the time beyond the median is a pause. A pause in each step is a part of the step.
    """

    def __init__(self) -> None:
        self._before_s: deque[float] = deque(maxlen=USUAL_STEPS)
        self._backward_s: deque[float] = deque(maxlen=USUAL_STEPS)

    def add(self, before_s: float, backward_s: float) -> float:
        """Add a step; return the seconds of its pause, 0 if it had none.

        before_s    from the end of the step before to the first gradient
        backward_s  from the first gradient to the last one. A long batch needs more time for both
        """
        pause_s = 0.0
        if len(self._before_s) >= LEAST_STEPS:
            usual_s, usual_backward_s = median_low(self._before_s), median_low(self._backward_s)
            if backward_s > usual_backward_s > 0:
                usual_s *= backward_s / usual_backward_s
            pause_s = before_s - usual_s if before_s > PAUSE_FACTOR * usual_s else 0.0
        self._before_s.append(before_s)
        self._backward_s.append(backward_s)
        return pause_s
