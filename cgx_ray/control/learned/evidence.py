"""Evidence from noisy steps: the mean of logarithms with its error, and the verdict on a plan beside dense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from statistics import fmean, median
from typing import NamedTuple

# Steps that a verdict needs, and the newest ones that it is made from.
MIN_STEPS, MAX_STEPS = 4, 40
# Newest steps, comparisons or plans that count: older ones had another compute or network.
NUM_NEWEST = 8
# Scatter of single steps that is assumed before there are many (standard deviation of a logarithm), and the number of
# steps that this assumption counts as. Four steps that happen to agree prove little.
PRIOR_SCATTER, PRIOR_STEPS = 0.1, 3
# Logarithm of the largest ratio to the median that counts: a pause or an evaluation makes single steps far longer.
CLIP = math.log(1.65)
# Standard errors on the safe side of a verdict. It is made again after every step, thousands of times.
SURE = 3.0


class Evidence(NamedTuple):
    """Mean of logarithms, and its standard error."""

    mean: float
    error: float

    def less(self, other: Evidence) -> Evidence:
        """Return the evidence for the difference to `other`."""
        return Evidence(self.mean - other.mean, math.hypot(self.error, other.error))

    def also(self, error: float) -> Evidence:
        """Return the same with another, independent error."""
        return Evidence(self.mean, math.hypot(self.error, error))


class Verdict(StrEnum):
    """Comparison of a plan with dense."""

    FAST = "fast"
    SLOW = "slow"
    UNSURE = "unsure"


def evidence(logs: Sequence[float]) -> Evidence:
    """Return the mean of `logs`, at least one, each at most CLIP from their median."""
    middle = median(logs)
    clipped = [min(max(value, middle - CLIP), middle + CLIP) for value in logs]
    mean = fmean(clipped)
    squares = math.fsum((value - mean) ** 2 for value in clipped) + PRIOR_STEPS * PRIOR_SCATTER**2
    return Evidence(mean, math.sqrt(squares / (len(logs) - 1 + PRIOR_STEPS) / len(logs)))


def verdict(slowdown: Evidence, limit: float, num_errors: float = SURE) -> Verdict:
    """Return whether the ratio whose logarithm is `slowdown` is over `limit`, under it, or nearer than `num_errors`."""
    if slowdown.mean - num_errors * slowdown.error > math.log(limit):
        return Verdict.SLOW
    if slowdown.mean + num_errors * slowdown.error < math.log(limit):
        return Verdict.FAST
    return Verdict.UNSURE
