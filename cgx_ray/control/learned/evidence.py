"""Evidence from noisy steps: the mean of logarithms with its error, and the verdict on a plan beside dense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum
from statistics import fmean, median
from typing import NamedTuple

from cgx_ray.control.network.changes import LINK_CHANGE
from cgx_ray.control.network.estimate import FEW

# Newest steps, comparisons or plans that count: older ones had another compute or network. A verdict needs FEW.
MAX_STEPS = 40
# Scatter of single steps that is assumed before there are many (standard deviation of a logarithm). It counts as FEW
# steps: three that happen to agree prove little.
PRIOR_SCATTER = 0.1
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
    """Return the mean of `logs`, at least one, each at most a LINK_CHANGE from their median.

    A pause or an evaluation makes single steps far longer.
    """
    middle, reach = median(logs), math.log(LINK_CHANGE)
    clipped = [min(max(value, middle - reach), middle + reach) for value in logs]
    mean = fmean(clipped)
    squares = math.fsum((value - mean) ** 2 for value in clipped) + FEW * PRIOR_SCATTER**2
    return Evidence(mean, math.sqrt(squares / (len(logs) - 1 + FEW) / len(logs)))


def verdict(slowdown: Evidence, limit: float, num_errors: float = SURE) -> Verdict:
    """Return whether the ratio whose logarithm is `slowdown` is over `limit`, under it, or nearer than `num_errors`."""
    if slowdown.mean - num_errors * slowdown.error > math.log(limit):
        return Verdict.SLOW
    if slowdown.mean + num_errors * slowdown.error < math.log(limit):
        return Verdict.FAST
    return Verdict.UNSURE
