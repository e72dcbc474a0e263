"""Phases of a training in which gradients change fast, told from their norm and from the learning rate."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

# Measured norms that are compared, the older half with the newer: 120 steps at the usual interval.
NUM_NORMS = 6
# Least ratio of the two halves that counts as a fast change. With small batches single norms differ by 2x.
FAST_CHANGE = 1.5
# Least gain of options that a plan may take up meanwhile. Gains that were measured on other gradients may be off by
# much, and steps that change the loss fast are the ones where lost progress costs most.
LEARNING_GAIN = 0.95
# Ratio of learning rates that counts as a change, and steps for which gradients change fast after it: as many as the
# norms above take.
OTHER_RATE, RATE_STEPS = 2.0, 120


class LearningPhase:
    """Compares the norms of the fresh gradients in the last measurements, and the learning rates of steps."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=NUM_NORMS)
        self._rate: float | None = None
        self._num_left = 0

    def add(self, norm: float | None) -> None:
        """Add the norm of a step; None if the step did not measure it. A norm of 0, NaN or Inf is left out."""
        if norm is not None and 0 < norm < math.inf:
            self._norms.append(norm)

    def add_rate(self, lr: float | None) -> bool:
        """Add the learning rate of a step, None if it is unknown; return whether it has changed by OTHER_RATE.

        A slow decay counts each time that it has added up to OTHER_RATE. The first rate is no change. Without any rate
        the norm alone tells.
        """
        self._num_left = max(0, self._num_left - 1)
        if lr is None or not 0 < lr < math.inf:
            return False
        self._rate = self._rate or lr
        if 1 / OTHER_RATE < lr / self._rate < OTHER_RATE:
            return False
        self._rate, self._num_left = lr, RATE_STEPS
        return True

    @property
    def is_on(self) -> bool:
        """True if the learning rate has just changed, or norms: the medians of their halves differ by FAST_CHANGE."""
        if self._num_left:
            return True
        if len(self._norms) < 2:
            return False
        norms = list(self._norms)
        half = len(norms) // 2
        ratio = median(norms[-half:]) / median(norms[:half])
        return not 1 / FAST_CHANGE < ratio < FAST_CHANGE
