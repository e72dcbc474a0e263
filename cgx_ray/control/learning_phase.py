"""Phases of a training in which gradients change fast, told from their norm."""

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


class LearningPhase:
    """Compares the norms of the fresh gradients in the last measurements."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=NUM_NORMS)

    def add(self, norm: float | None) -> None:
        """Add the norm of a step; None if the step did not measure it. A norm of 0, NaN or Inf is left out."""
        if norm is not None and 0 < norm < math.inf:
            self._norms.append(norm)

    @property
    def is_on(self) -> bool:
        """True if the medians of the older and of the newer half differ by FAST_CHANGE or more."""
        if len(self._norms) < 2:
            return False
        norms = list(self._norms)
        half = len(norms) // 2
        ratio = median(norms[-half:]) / median(norms[:half])
        return not 1 / FAST_CHANGE < ratio < FAST_CHANGE
