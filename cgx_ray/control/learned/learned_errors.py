"""Errors of the planner's model, learned from every step: measured over predicted seconds, by option and by codec."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from statistics import fmean, median_low
from typing import Any, Generic, TypeVar

from cgx_ray.control.learned.compute_slowdown import ComputeSlowdown
from cgx_ray.control.learned.measured import dense_shares
from cgx_ray.control.network.changes import WINDOW_S
from cgx_ray.plan import DENSE, NONE, CodecSpec, Device, Option
from cgx_ray.planner.candidates import CodecCost, CodecCosts
from cgx_ray.planner.planned_group import PlannedGroup
from cgx_ray.planner.prediction import Prediction

# Seconds after which an error that was not measured again is forgotten: what made an option slow may have passed. They
# double with each plan that was slower than dense on the same network, since a trial costs slow steps.
MEMORY_S = 600.0

T = TypeVar("T")


class LearnedErrors:
    """Factors that predictions are multiplied with.

    A plan's error is the mean of its options' (of logarithms, by dense bytes). Dense counts only in plans with nothing
    else: dense steps show its error, so the error of a mixture is that of the rest, however small its part is. An
    option that was never tried has the largest error of those with its codec on its device, and at least none: it must
    not look better than its twins only because these were tried. Without any, it has the median of the codecs' and of
    no error, at least none: one codec that failed says little of the others, but two say that the machine is slower
    than the model.

    compute_slowdown  factors that measured compute beside codecs is divided by
    """

    def __init__(self) -> None:
        self._memory_s = MEMORY_S
        # By option, the logarithm of its error and the time at which it was measured last.
        self._steps: dict[Option, tuple[float, float]] = {}
        self._earlier: Earlier[dict[Option, tuple[float, float]]] = Earlier()
        self.compute_slowdown = ComputeSlowdown()
        # Codecs that ran with others, and those that ran without.
        self._mixed: set[CodecSpec] = set()
        self._alone: set[CodecSpec] = set()
        # By name of a codec's cost, see `Measured.cost_name`, the logarithm of its measured over its calibrated time.
        self._codecs: dict[str, float] = {}

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> LearnedErrors:
        """Return the errors that `recorded` wrote. They have no age."""
        errors = cls()
        errors._steps = {Option.parse(option): (log, 0.0) for option, log in fields["options"].items()}
        errors._codecs = dict(fields["codecs"])
        errors._mixed = set(map(CodecSpec.parse, fields.get("only_mixed", ())))
        return errors

    def recorded(self) -> dict[str, Any]:
        """Return the logarithms of the errors by option and by codec, for the journal."""
        return {
            "options": {str(option): log for option, (log, _) in self._steps.items()},
            "codecs": dict(self._codecs),
            "only_mixed": sorted(map(str, self.only_mixed)),
        }

    @property
    def only_mixed(self) -> Set[CodecSpec]:
        """Codecs that ran in mixtures only. These do not tell which of their codecs an error comes from."""
        return self._mixed - self._alone

    def factor(self, groups: Sequence[PlannedGroup]) -> float:
        """Return the seconds that a step with `groups` will take over those that are predicted."""
        return math.exp(math.fsum(share * self._log(option) for option, share in _counted_shares(groups).items()))

    def step_s(self, predicted: Prediction) -> float:
        """Return the seconds that the predicted step will take."""
        return self.factor(predicted.groups) * predicted.step_s

    def option_factor(self, option: Option) -> float:
        return math.exp(self._log(option))

    def learn_step(self, groups: Sequence[PlannedGroup], log_ratio: float, now_s: float) -> None:
        """Add steps whose measured over predicted seconds have the mean logarithm `log_ratio`: the newest count."""
        self._earlier.add(dict(self._steps), now_s)
        shares = _counted_shares(groups)
        before = {option: self._log(option) for option in shares}
        miss = log_ratio - math.fsum(share * before[option] for option, share in shares.items())
        weight = 1 / math.fsum(share**2 for share in shares.values())
        for option, share in shares.items():
            self._steps[option] = before[option] + weight * share * miss, now_s
        codecs = {option.codec for option in shares} - {NONE}
        (self._mixed if len(codecs) > 1 else self._alone).update(codecs)

    def network_changed(self, now_s: float) -> None:
        """Undo what was learned in the last seconds, while predictions were made for the network before.

        Remember errors for the usual time again.
        """
        self._steps = self._earlier.take(self._steps, now_s)
        self._memory_s = MEMORY_S

    def learn_codecs(self, codecs: Iterable[str], ratio: float) -> None:
        """Correct the times of `codecs`, which took `ratio` times as long as predicted with the present correction."""
        for codec in codecs:
            self._codecs[codec] = self._codecs.get(codec, 0.0) + math.log(ratio)

    def is_timed(self, codec: str) -> bool:
        """Return whether `codec` was timed in steps of this training."""
        return codec in self._codecs

    def corrected(self, calibrated: CodecCosts) -> dict[str, CodecCost]:
        """Return codec times as they are in steps; as calibrated for codecs that were not timed there."""
        return {codec: cost.slowed(math.exp(self._codecs.get(codec, 0.0))) for codec, cost in calibrated.items()}

    def calibrated(self, corrected: CodecCosts) -> dict[str, CodecCost]:
        """Return the calibrated codec times that `corrected` has corrected."""
        return {codec: cost.slowed(math.exp(-self._codecs.get(codec, 0.0))) for codec, cost in corrected.items()}

    def forget_old(self, now_s: float) -> None:
        self._steps = {option: found for option, found in self._steps.items() if now_s - found[1] < self._memory_s}

    def remember_longer(self) -> None:
        """Take into account that a plan was slower than dense."""
        self._memory_s *= 2

    def _log(self, option: Option) -> float:
        if option in self._steps:
            return self._steps[option][0]
        if option == DENSE:
            return 0.0
        by_codec: dict[tuple[CodecSpec, Device], list[float]] = {}
        for other, (log, _) in self._steps.items():
            by_codec.setdefault((other.codec, other.device), []).append(log)
        if twins := by_codec.get((option.codec, option.device)):
            return max(0.0, *twins)
        means = [fmean(logs) for (codec, _), logs in by_codec.items() if codec != NONE]
        return max(0.0, median_low([0.0, *means]))


class Earlier(Generic[T]):
    """States before each of the last changes, oldest first, for as long as these may be undone."""

    def __init__(self) -> None:
        self._states: list[tuple[float, T]] = []

    def add(self, state: T, now_s: float) -> None:
        """Keep `state`, which is about to change."""
        self._states = [*undoable(self._states, now_s), (now_s, state)]

    def take(self, state: T, now_s: float) -> T:
        """Return the state before the changes of the last seconds, `state` if there are none, and forget all."""
        recent, self._states = undoable(self._states, now_s), []
        return recent[0][1] if recent else state


def undoable(learned: Iterable[tuple[float, T]], now_s: float) -> list[tuple[float, T]]:
    """Return the (time, value) entries young enough to be dropped if the network has changed.

    A change is noticed after 2 to 5 s.
    """
    return [one for one in learned if one[0] >= now_s - WINDOW_S]


def _counted_shares(groups: Sequence[PlannedGroup]) -> dict[Option, float]:
    """Return each option's share of the dense bytes, without fixed groups; dense counts only where nothing else is."""
    free = [group for group in groups if not group.is_fixed] or groups
    return dense_shares([group for group in free if group.option != DENSE] or free)
