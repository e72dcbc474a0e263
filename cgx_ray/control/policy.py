"""Policies: given the situation of a training they return a decision. They change nothing themselves.

`AdaptivePolicy` asks the planner for the plan with the smallest score under the current measurements, where the score
is predicted seconds per step over the fraction of a dense step's progress that the plan keeps. The plan in force is
scored with the same measurements, then:

1. If the plan in force clearly keeps less than `min_gain`, uses a banned codec and scheme, or is predicted to be more
   than 3 % slower than dense, the best plan replaces it at once.
2. Else the best plan replaces it only if its score is more than 5 % smaller.

Gains are noisy, so options in force may keep a little less than `min_gain`, and others must keep a little more
(GAIN_MARGIN).

Dense means the sums of plain DDP. Hierarchical dense sums are an option like any other. If a node has one rank, or all
ranks share memory, hierarchical options equal flat ones, so the planner leaves them out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cgx_ray.plan import DENSE, Option, Plan
from cgx_ray.planner.joint import BestPlan, best_plan
from cgx_ray.planner.prediction import Measured, Prediction, groups_of, predict

# Least improvement of the score, as a fraction, that a change of plan must promise: noise would flip plans otherwise.
MIN_IMPROVEMENT = 0.05
# Largest allowed ratio of a plan's seconds per step to dense: the promise is "never more than 3 % slower than dense".
MAX_SLOWDOWN = 1.03

# Share of the error that `min_gain` allows: options in force may have so much more, others must have so much less. Mean
# gains scatter by about 0.02 around 0.8, which is a tenth of the error.
GAIN_MARGIN = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Stay with the plan in force.

    reason     one sentence for journal and dashboard: cause, change and prediction
    predicted  of the plan that is in force after the decision
    dense_s    predicted seconds of a dense step, in dense's own best groups
    """

    reason: str
    predicted: Prediction
    dense_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """Switch to `plan`. The other fields are those of `Keep`."""

    plan: Plan
    reason: str
    predicted: Prediction
    dense_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Disable:
    """Go back to `plan`, which is dense, because a plan was measured slower. The other fields are those of `Keep`."""

    plan: Plan
    reason: str
    predicted: Prediction
    dense_s: float


Decision = Keep | Replace | Disable


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The input of a policy.

    cause   the reason for asking now, in words
    plan    in force
    banned  flat options whose plan was slower than dense or whose gain fell; the hierarchical ones with the same codec
            and scheme are banned too
    """

    cause: str
    plan: Plan
    measured: Measured
    banned: frozenset[Option] = field(default_factory=frozenset)


class Policy(Protocol):
    def decide(self, situation: Situation) -> Decision | None:
        """Return a decision, or None if this policy never decides."""


class StaticPolicy:
    """Keeps the plan that the user has chosen."""

    def decide(self, situation: Situation) -> Decision | None:
        return None


class AdaptivePolicy:
    """Chooses the plan with the smallest score, as the module's docstring describes.

    options   all that may be chosen, besides dense
    min_gain  least gain that an option must have, up to GAIN_MARGIN
    """

    def __init__(self, options: Sequence[Option], *, min_gain: float) -> None:
        self._options = tuple(options)
        self._min_gain = min_gain

    def decide(self, situation: Situation) -> Decision:
        measured, cause = situation.measured, situation.cause
        in_force = {group.option for group in situation.plan.groups}
        least = max(0.0, 1 - (1 + GAIN_MARGIN) * (1 - self._min_gain))
        entered = 1 - (1 - GAIN_MARGIN) * (1 - self._min_gain)
        allowed = [
            option
            for option in self._options
            if option.flat() not in situation.banned
            and (option in in_force or (measured.efficiency(option) or 0.0) >= entered)
        ]
        found = best_plan(measured, allowed, min_gain=least)
        best, dense_s = found.best, found.dense.step_s
        current = predict(measured, groups_of(situation.plan, measured.layers))
        if best.groups == current.groups:
            return Keep(reason=f"{cause}: {_describe_best(found)}", predicted=current, dense_s=dense_s)
        is_allowed = current.efficiency is not None and current.efficiency >= least
        used = {option.flat() for option in current.options if option != DENSE}
        is_allowed = is_allowed and situation.banned.isdisjoint(used)
        breaks_promise = not current.is_dense and current.step_s > MAX_SLOWDOWN * dense_s
        if is_allowed and not breaks_promise and best.score > current.score * (1 - MIN_IMPROVEMENT):
            kept, other = describe_options(current), describe_options(best)
            return Keep(
                reason=f"{cause}: kept {kept}; {other if other != kept else 'another grouping'} would be less than "
                f"{MIN_IMPROVEMENT:.0%} better",
                predicted=current,
                dense_s=dense_s,
            )
        return Replace(
            plan=best.plan(version=situation.plan.version + 1, world_size=situation.plan.world_size),
            reason=f"{cause}: {_describe_best(found)}",
            predicted=best,
            dense_s=dense_s,
        )


def describe_options(prediction: Prediction) -> str:
    """Return the options of a plan and their number of groups, such as "2x qsgd:bits=4 over sra, 1x dense"."""
    if len(prediction.options) == 1:
        return str(prediction.options[0])
    counts = Counter(group.option for group in prediction.groups)
    return ", ".join(f"{counts[option]}x {option}" for option in prediction.options)


def _describe_best(found: BestPlan) -> str:
    best, dense_s = found.best, found.dense.step_s
    if best.is_dense:
        return f"nothing beats dense; predicted {dense_s:.3f} s per step, bound by {found.dense.bound_by}"
    assert best.efficiency is not None
    text = (
        f"{describe_options(best)}; predicted {best.step_s:.3f} s per step (dense {dense_s:.3f} s), keeps "
        f"{best.efficiency:.1%} of the gradient"
    )
    gap = f"{found.gap:.1%}"
    return text if gap == "0.0%" else f"{text}, at most {gap} from the optimum"
