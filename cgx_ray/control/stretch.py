"""Learns how much longer compute takes while codecs share its processors, from steps on both sides of a switch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from cgx_ray.control.evidence import evidence

# Steps before a switch between dense and another plan that are compared, at most and at least: a training has two dense
# steps without its first one when it decides for the first time.
ADJACENT_STEPS, LEAST_BEFORE = 8, 2
# Steps after the switch, as many as an excursion has.
LEAST_AFTER = 3
# Newest switches that count.
NUM_SWITCHES = 3
# Standard errors by which compute must be longer before that counts: compute is noisy.
WORTH = 2.0


class ComputeStretch:
    """Compute of steps with codecs over that of dense steps.

    Predictions are made for the compute of dense steps. Otherwise the compute of a dense step would seem to be as long
    as it is beside codecs, and a plan that makes it longer would seem to save time.

    factor  1 or more
    error   standard error of its logarithm
    """

    def __init__(self) -> None:
        self.factor, self.error = 1.0, 0.0
        self._found: deque[tuple[float, float]] = deque(maxlen=NUM_SWITCHES)

    def add(self, dense_s: Sequence[float], others_s: Sequence[float]) -> None:
        """Add compute of dense steps, and of steps under another plan right before or after them."""
        dense, others = (evidence([math.log(seconds) for seconds in times]) for times in (dense_s, others_s))
        self._found.append(others.less(dense))
        mean, error = (median(column) for column in zip(*self._found, strict=True))
        is_sure = mean > WORTH * error
        self.factor, self.error = (math.exp(mean), error) if is_sure else (1.0, 0.0)
