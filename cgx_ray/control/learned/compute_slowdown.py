"""Learns how much longer compute takes while codecs share its processors, from steps on both sides of a switch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

from cgx_ray.control.learned.evidence import MAX_STEPS, Evidence, evidence
from cgx_ray.control.network.estimate import FEW, Z_95
from cgx_ray.plan import Option

_NONE = Evidence(0.0, 0.0)


class ComputeSlowdown:
    """Logarithm of compute in steps with codecs over compute in dense steps, by the options of their plan.

    Predictions are made for the compute of dense steps. Otherwise the compute of a dense step would seem to be as long
    as it is beside codecs, and a plan that makes it longer would seem to save time.
    """

    def __init__(self) -> None:
        self._found: dict[frozenset[Option], deque[Evidence]] = {}
        self._newest: frozenset[Option] = frozenset()

    def add_comparison(self, options: frozenset[Option], dense_s: Sequence[float], others_s: Sequence[float]) -> None:
        """Add compute of dense steps, and of steps under a plan with `options` soon before or after them."""
        dense, others = (evidence([math.log(seconds) for seconds in times]) for times in (dense_s, others_s))
        self._found.setdefault(options, deque(maxlen=MAX_STEPS)).append(others.less(dense))
        self._newest = options

    def under(self, options: frozenset[Option]) -> Evidence:
        """Return the logarithm under `options`; where they were never compared, under those compared last.

        It is 0 without error if compute is not longer for sure.
        """
        found = self._found.get(options) or self._found.get(self._newest)
        if not found:
            return _NONE
        # Compute may fall or rise by itself at a switch, as after a cold start: the median leaves such a one out.
        mean = median(one.mean for one in found)
        error = math.sqrt(fmean(one.error**2 for one in found) / len(found))
        return Evidence(mean, error) if mean > Z_95 * error else _NONE


class SideBySide:
    """Compute of the newest dense steps, and of those under another plan, until both are compared."""

    def __init__(self) -> None:
        self._dense_s: deque[float] = deque(maxlen=MAX_STEPS)
        self._others_s: deque[float] = deque(maxlen=MAX_STEPS)
        self._since_dense = 0

    def start_plan(self, *, is_dense: bool, is_new: bool) -> None:
        """Begin to compare a plan with the dense steps before it, or dense steps with the plan before them.

        is_new  False for the plan that goes on after dense measuring steps: the two were compared then
        """
        self._is_dense, self._is_open = is_dense, is_new
        if is_new:
            (self._dense_s if is_dense else self._others_s).clear()

    def add_step(self, compute_s: float) -> tuple[Sequence[float], Sequence[float]] | None:
        """Add a step; return the compute of dense and of other steps if they can be compared now, once per plan."""
        own_s, before_s = (self._dense_s, self._others_s) if self._is_dense else (self._others_s, self._dense_s)
        own_s.append(compute_s)
        self._since_dense = 0 if self._is_dense else self._since_dense + 1
        is_far = self._since_dense > MAX_STEPS
        if not self._is_open or is_far or len(own_s) < FEW or not before_s:
            return None
        self._is_open = False
        return self._dense_s, self._others_s
