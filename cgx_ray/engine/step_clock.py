"""The clock of a step, on the host and on the CUDA device."""

from __future__ import annotations

import time

import torch


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
