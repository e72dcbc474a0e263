"""The trend of the loss that the training reports, before and since a change of options.

Without reports nothing is judged. A loss is worse since the change if one of these is sure:

1. Its mean is above the mean before, where it did not surely rise before.
2. Its mean is above the line through the losses before, continued from the change on with half the slope. A loss that
   falls as a power of the steps, up to -1.5, keeps half, as no more is looked back than a quarter of the training.
   Losses that reach further than twice the steps of those before, as in long rounds, are only judged by the mean.

A rise before the change may go on as fast. The line rules out a plan that learns slower, the mean needs fewer losses.
Losses since the change are judged while they are no more than those before.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

from cgx_ray.control.network.estimate import FEW, Z_95

# Least ratio of the two halves that counts as a fast change. With small batches single norms differ by 2x.
FAST_CHANGE = 1.5
# Ratio of learning rates that counts as a change if it comes about within so many steps, for which gradients change
# fast after it: as many as norms take. A slow decay changes nothing fast.
OTHER_RATE, RATE_STEPS = 2.0, 120


# Losses on either side of a change that a verdict needs, and at most has. Single losses scatter by some 5 %.
MIN_LOSSES, MAX_LOSSES = 20, 100
# Losses from this on are left out: their squares have no float.
MAX_LOSS = 1e100
# No codec costs more of a loss that has fallen further.
MAX_FALL = 1e6
# Standard errors on the safe side: the verdict is made again after every step. With 3, 1.3 % of changes that cost
# nothing would seem worse, with 4 it is 0.2 %.
SURE = 4.0
# Share of the training that may be looked back.
LOOK_BACK = 0.25
# Share of a falling slope that must go on.
KEPT_SLOPE = 0.5


class LearningPhase:
    """Compares the norms of the fresh gradients in the last measurements, and the learning rates of steps.

    Of norms the newest FEW and those before: 120 steps at the usual interval.
    """

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=2 * FEW)
        # Number of the step, and its rate: those of the last RATE_STEPS, and the one before.
        self._rates: deque[tuple[int, float]] = deque()
        self._num_steps = self._num_left = 0

    def add_norm(self, norm: float | None) -> None:
        """Add the norm of a step; None if the step did not measure it. A norm of 0, NaN or Inf is left out."""
        if norm is not None and 0 < norm < math.inf:
            self._norms.append(norm)

    def add_rate(self, lr: float | None, num_steps: int = 1) -> bool:
        """Add the learning rate of a step, None if it is unknown; return whether it has just changed by OTHER_RATE.

        num_steps  since the step before: more than 1 in rounds

        The first rate is no change. Without any rate the norm alone decides.
        """
        self._num_steps += num_steps
        self._num_left = max(0, self._num_left - num_steps)
        if lr is None or not 0 < lr < math.inf:
            return False
        while len(self._rates) > 1 and self._rates[1][0] <= self._num_steps - RATE_STEPS:
            self._rates.popleft()
        has_changed = bool(self._rates) and not 1 / OTHER_RATE < lr / self._rates[0][1] < OTHER_RATE
        if has_changed:
            self._rates.clear()
            self._num_left = RATE_STEPS
        self._rates.append((self._num_steps, lr))
        return has_changed

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


@dataclass(slots=True)
class LossFall:
    """By how much the loss has fallen.

    ratio  mean of the first MIN_LOSSES losses over the least mean of as many later ones, found anew after one that is
           twice as large; 1 before these are known
    """

    ratio: float = 1.0
    _first: float | None = None
    _least: float = math.inf
    _newest: deque[float] = field(default_factory=lambda: deque(maxlen=MIN_LOSSES))

    def add_loss(self, loss: float | None, num_steps: int = 1) -> None:
        """Add a step's loss. None is left out, and so is one that is not positive: it has no ratio to another.

        num_steps  since the step before. In long rounds four losses count, as twenty are of too long ago
        """
        if loss is None or not 0 < loss < MAX_LOSS:
            return
        self._newest.extend([loss] * min(num_steps, MIN_LOSSES // 4))
        if len(self._newest) < MIN_LOSSES:
            return
        mean = fmean(self._newest)
        self._first = mean if self._first is None else self._first
        if mean > 2 * self._least:
            # Other data or another scale, or tiny losses have passed.
            self._least = math.inf
            self._newest.clear()
            return
        self._least = min(mean, self._least)
        self.ratio = min(max(self._first / self._least, 1.0), MAX_FALL)

    def add_mean(self, loss: float, num_steps: int) -> None:
        """Add the mean loss of so many steps in a row."""
        for _ in range(min(num_steps, MIN_LOSSES)):
            self.add_loss(loss)


class LossTrend:
    """The last losses before and since a change of options."""

    def __init__(self) -> None:
        self._num_losses = self._num_since = self._num_steps = 0
        self._keeps_before = False
        # Number of the step, and loss.
        self._before: list[tuple[int, float]] = []
        self._since: list[tuple[int, float]] = []
        self.worse: str | None = None

    def add_loss(self, loss: float | None, num_steps: int = 1) -> None:
        """Add a step's loss, unless it is None, not finite or huge. Set `worse` if it says so, in words.

        num_steps  since the step before: more than 1 in rounds
        """
        self._num_steps += num_steps
        if loss is None or not abs(loss) < MAX_LOSS:
            return
        self._num_losses, self._num_since = self._num_losses + 1, self._num_since + 1
        self._since = [*self._since[1 - MAX_LOSSES :], (self._num_steps, loss)]
        if self.worse is None and MIN_LOSSES <= self._num_since <= len(self._before):
            self.worse = _worse(self._before, self._since)

    @property
    def can_judge(self) -> bool:
        """False if losses are reported, and those so far are too few to judge other options by, if these began now."""
        num_known = len(self._before) + len(self._since)
        return not self._num_losses or min(self._num_before, num_known) >= MIN_LOSSES

    @property
    def _num_before(self) -> int:
        return min(MAX_LOSSES, int(LOOK_BACK * self._num_losses))

    def start_plan(self) -> None:
        """Begin with other options."""
        if not self._keeps_before:
            num = self._num_before
            before = [*self._before, *self._since][-num:] if num >= MIN_LOSSES else []
            self._before = before if len(before) >= MIN_LOSSES else []
        self._keeps_before = False
        self._forget_since()

    def keep_before(self) -> None:
        """Judge the next options by the same losses before, for those since were worse."""
        self._keeps_before = True
        self._forget_since()

    def restart(self) -> None:
        """Forget all losses so far: they have another trend than those to come."""
        self._before, self._keeps_before = [], False
        self._forget_since()

    def _forget_since(self) -> None:
        self._since, self._num_since, self.worse = [], 0, None


class _Line(NamedTuple):
    """Least-squares line through losses, over the number of the step.

    middle   mean number of their steps
    squares  sum of the squared distances of their steps from it
    scatter  standard deviation of the losses about it; larger if neighbours deviate alike, as they then say less
    """

    middle: float
    squares: float
    mean: float
    slope: float
    scatter: float


def _line(losses: Sequence[tuple[int, float]]) -> _Line:
    middle, mean = (fmean(values) for values in zip(*losses, strict=True))
    squares = math.fsum((x - middle) ** 2 for x, _ in losses)
    slope = math.fsum((x - middle) * y for x, y in losses) / squares
    left = [y - mean - slope * (x - middle) for x, y in losses]
    errors = math.fsum(one**2 for one in left)
    alike = math.fsum(a * b for a, b in pairwise(left)) / errors if errors > 0 else 0.0
    alike = min(max(alike, 0.0), 0.9)
    scatter = math.sqrt(errors / (len(losses) - 2) * (1 + alike) / (1 - alike))
    return _Line(middle, squares, mean, slope, scatter)


def _worse(before: Sequence[tuple[int, float]], since: Sequence[tuple[int, float]]) -> str | None:
    """Return in words how the losses `since` are worse than those `before`, or None."""
    # The scatter is not that of the losses since: one that begins to rise scatters too.
    old, mean = _line(before), fmean(loss for _, loss in since)
    mean_error = old.scatter * math.sqrt(1 / len(before) + 1 / len(since))
    slope_error = old.scatter / math.sqrt(old.squares)
    # Steps from the middle of the losses before to the change, and from there to the middle of those since.
    change = (before[-1][0] + since[0][0]) / 2
    until, after = change - old.middle, fmean(step for step, _ in since) - change
    reach = until + after * (KEPT_SLOPE if old.slope < 0 else 1.0)
    line = old.mean + old.slope * reach
    # Losses of long rounds, or those after other options, reach further than the line was seen.
    seen = before[-1][0] - before[0][0]
    is_near = since[0][0] - before[-1][0] <= seen / 2 and since[-1][0] - before[-1][0] <= 2 * seen
    is_higher = old.slope <= Z_95 * slope_error and mean > old.mean + SURE * mean_error
    is_slower = is_near and mean > line + SURE * math.hypot(mean_error, slope_error * reach)
    if not is_higher and not is_slower:
        return None
    return f"loss is {mean:.4g} since the change of options, expected at most {old.mean if is_higher else line:.4g}"
