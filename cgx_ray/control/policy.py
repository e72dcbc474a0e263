"""Policies: given the situation of a training they return a decision. They change nothing themselves.

`AdaptivePolicy` asks the planner for the plan with the smallest score under the current measurements, where the score
is predicted seconds per step, times the errors learned so far, over the fraction of a dense step's progress that the
plan keeps. The plan in force is scored with the same measurements, then:

1. If the plan in force clearly keeps less than `min_gain`, uses a banned codec and scheme, or is predicted to be more
   than 3 % slower than dense, the best plan replaces it at once.
2. Else the best plan replaces it only if its score is more than 5 % smaller, and the seconds saved until the network is
   expected to change are more than the change of plan takes. Dense is left only for more than half of what predictions
   have been wrong by lately, at most 20 %: where ranks share processors, plans often promise 10 % and take 50 % longer.

On a network that changes too fast to follow, a score is the mean over the recent states of the network.

Gains are noisy, so options in force may keep a little less than `min_gain`, and others must keep a little more
(GAIN_MARGIN).

Dense means the sums of plain DDP. Hierarchical dense sums are an option like any other. If a node has one rank, or all
ranks share memory, hierarchical options equal flat ones, so the planner leaves them out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean, harmonic_mean
from typing import Any, Literal, Protocol

from cgx_ray.control.learned.learned_errors import LearnedErrors
from cgx_ray.plan import DENSE, NONE, CodecSpec, Option, Plan
from cgx_ray.planner.cost import Link
from cgx_ray.planner.fidelity import describe_costs
from cgx_ray.planner.joint import BestPlan, best_plan
from cgx_ray.planner.options import codec_cost_of, offloaded
from cgx_ray.planner.prediction import Measured, PlannedGroup, Prediction, groups_of, predict

# Searches per network, each of 3 to 260 ms, with thousands of layers 400.
MAX_SEARCHES = 4
# Share of the score below which a better plan is not searched for.
TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Measurements to plan for.

    now           the measurements
    states        `now`; or several if the network changes too fast to follow, each as likely as the others
    errors        factors that predictions are multiplied with
    dense_groups  of dense, those of DDP; empty: the best ones for dense, as predicted
    """

    now: Measured
    states: Sequence[Measured]
    errors: LearnedErrors = field(default_factory=LearnedErrors)
    dense_groups: tuple[PlannedGroup, ...] = ()

    def score(self, groups: Sequence[PlannedGroup]) -> float:
        """Return seconds for the progress of a dense step, on average over the time."""
        scores = [predict(measured, groups).score for measured in self.states]
        return self.errors.factor(groups) * harmonic_mean(scores) if max(scores) < math.inf else math.inf

    def dense(self) -> Prediction:
        """Return the prediction of dense."""
        return predict(self.now, self.dense_groups) if self.dense_groups else best_plan(self.now, ()).dense

    def best(self, options: Sequence[Option], min_gain: float) -> BestPlan:
        """Return the best plan and dense, both predicted for `now`."""
        found = [plan for measured in self.states for plan in self._candidates(measured, options, min_gain)]
        if len(self.states) > 1:
            # A plan that is the best one in no state may be good in all.
            between = self._between()
            for codec in dict.fromkeys(option.codec for option in options):
                same = [option for option in options if option.codec == codec]
                found.append(best_plan(between, same, min_gain=min_gain, dense_groups=self.dense_groups))
        best = min(found, key=lambda plan: self.score(plan.best.groups))
        return replace(best, best=predict(self.now, best.best.groups), dense=predict(self.now, best.dense.groups))

    def _between(self) -> Measured:
        """Return the measurements with the geometric mean of all links."""
        links = [measured.network.between for measured in self.states]
        mean = Link(
            alpha_s=geometric_mean(link.alpha_s for link in links),
            beta_s_per_byte=geometric_mean(link.beta_s_per_byte for link in links),
        )
        return replace(self.now, network=replace(self.now.network, between=mean))

    def _candidates(self, measured: Measured, options: Sequence[Option], min_gain: float) -> list[BestPlan]:
        """Return plans of which one is the best under `measured`, with learned errors.

        The planner knows no errors of options. So while the plan that it finds has an option with a larger error than
        others have, it searches again among those with smaller errors.
        """
        errors, pool, plans = self.errors, list(options), []
        best_s = math.inf
        for _ in range(MAX_SEARCHES):
            found = best_plan(measured, pool, min_gain=min_gain, dense_groups=self.dense_groups)
            for plan in (found, replace(found, best=found.dense, gap=0.0)):
                plans.append(plan)
                best_s = min(best_s, errors.factor(plan.best.groups) * plan.best.score)
            used = [option for option in found.best.options if option in pool and option != DENSE]
            least = min((errors.option_factor(option) for option in pool), default=1.0)
            if not used or least * found.best.score > best_s * (1 - TOLERANCE):
                break
            worst = max(map(errors.option_factor, used))
            pool = [option for option in pool if errors.option_factor(option) < worst]
        return plans


# Least improvement of the score, as a fraction, that a change of plan must promise: noise would flip plans otherwise.
MIN_IMPROVEMENT = 0.05
# The same for leaving dense while predictions are far off.
MOST_IMPROVEMENT = 0.2
# Seconds after a decision before a policy is asked again without any other cause. Rare enough to cost nothing, frequent
# enough to follow slow trends.
REVIEW_S = 60.0
# Largest allowed ratio of a plan's seconds per step to dense: the promise is "never more than 3 % slower than dense".
MAX_SLOWDOWN = 1.03
# Told times of a codec may be this many times too long.
MAX_OVERSTATED = 300.0
# Share of the error that `min_gain` allows: options in force may have so much more, others must have so much less. Mean
# gains scatter by about 0.02 around 0.8, which is a tenth of the error.
GAIN_MARGIN = 0.1


DecisionKind = Literal["keep", "replace", "disable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Answer of a policy, or of the loop that guards it.

    kind       keep: stay with the plan in force. replace: switch to `plan`. disable: go back to `plan`, which is dense,
               because a plan was measured slower
    plan       of `keep`, the one that the policy was given
    reason     one sentence for journal and dashboard: cause, change and prediction
    predicted  of the plan that is in force after the decision
    step_s     expected seconds of its steps: as predicted, with the errors learned so far
    dense_s    the same of a dense step, in DDP's groups
    """

    kind: DecisionKind
    plan: Plan
    reason: str
    predicted: Prediction
    step_s: float
    dense_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The input of a policy.

    cause   the reason for asking now, in words
    plan    in force
    outlook measurements, and the errors learned so far
    dwell_s, switch_s
            seconds for which the network is expected to stay as it is, and that a change of plan takes
    banned  flat options whose plan was slower than dense or whose gain fell; the hierarchical ones with the same codec
            and scheme are banned too
    """

    cause: str
    plan: Plan
    outlook: Outlook
    dwell_s: float = math.inf
    switch_s: float = 0.0
    banned: frozenset[Option] = field(default_factory=frozenset)


class Policy(Protocol):
    @property
    def options(self) -> Sequence[Option]:
        """All options that may be chosen, besides dense."""

    @property
    def review_s(self) -> float:
        """Seconds after a decision until the policy is asked again without any other cause."""

    @property
    def is_guarded(self) -> bool:
        """True if the loop takes back plans that are slower than dense, and compares with dense where it is unsure."""

    @property
    def max_error(self) -> float | None:
        """Error of bits by layer over that of 4 bits above which it is asked at once; None if it chooses no bits."""

    def decide(self, situation: Situation) -> Decision | None:
        """Return a decision, or None if this policy never decides."""

    def codec_to_time(self, situation: Situation, kept: Decision) -> CodecSpec | None:
        """Return a codec whose told times may be what keeps it out of the best plan, or None."""

    def recorded(self) -> dict[str, Any]:
        """Return the policy for the journal, as `recorded.read_policy` reads it."""


class StaticPolicy:
    """Keeps the plan that the user has chosen."""

    options: Sequence[Option] = ()
    review_s = REVIEW_S
    is_guarded = False
    max_error = None

    def decide(self, situation: Situation) -> Decision | None:
        return None

    def codec_to_time(self, situation: Situation, kept: Decision) -> CodecSpec | None:
        return None

    def recorded(self) -> dict[str, Any]:
        return {"kind": "static"}


class AdaptivePolicy:
    """Chooses the plan with the smallest score, as the module's docstring describes.

    options   all that may be chosen, besides dense; where a GPU holds the gradients also offloaded
    min_gain  least gain that an option must have, up to GAIN_MARGIN
    """

    is_guarded = True
    max_error = None

    def __init__(self, options: Sequence[Option], *, min_gain: float, review_s: float = REVIEW_S) -> None:
        self.options: Sequence[Option] = tuple(options)
        self._min_gain = min_gain
        self.review_s = review_s
        self._least_gain = max(0.0, 1 - (1 + GAIN_MARGIN) * (1 - min_gain))
        self._enter_gain = 1 - (1 - GAIN_MARGIN) * (1 - min_gain)

    def decide(self, situation: Situation) -> Decision:
        cause, outlook = situation.cause, situation.outlook
        found = outlook.best(self._allowed(situation), self._least_gain)
        best, current = found.best, predict(outlook.now, groups_of(situation.plan, outlook.now.layers))
        current_s, best_s, dense_s = map(outlook.errors.step_s, (current, best, found.dense))
        if best.groups == current.groups:
            reason = f"{cause}: {_describe_best(found, outlook)}"
            return Decision(
                kind="keep",
                plan=situation.plan,
                reason=reason,
                predicted=current,
                step_s=current_s,
                dense_s=dense_s,
            )
        if self._may_stay(situation, current) and not self._is_worth(situation, current, found):
            kept, other = current.describe_options(), best.describe_options()
            return Decision(
                kind="keep",
                plan=situation.plan,
                reason=f"{cause}: kept {kept}; {other if other != kept else 'another grouping'} would be less than "
                f"{_least_improvement(current, outlook):.0%} better",
                predicted=current,
                step_s=current_s,
                dense_s=dense_s,
            )
        return Decision(
            kind="replace",
            plan=best.plan(version=situation.plan.version + 1, world_size=situation.plan.world_size),
            reason=f"{cause}: {_describe_best(found, outlook)}",
            predicted=best,
            step_s=best_s,
            dense_s=dense_s,
        )

    def recorded(self) -> dict[str, Any]:
        return {"kind": "adaptive", "options": list(map(str, self.options)), "min_gain": self._min_gain}

    def _allowed(self, situation: Situation) -> list[Option]:
        """Return the options that are not banned and keep enough: those in force may keep a little less.

        Where a GPU holds the gradients, with the same ones offloaded.
        """
        in_force, measured = {group.option for group in situation.plan.groups}, situation.outlook.now
        moved = offloaded(self.options) if measured.bus is not None else ()
        return [
            option
            for option in (*self.options, *moved)
            if option.flat() not in situation.banned
            and (option in in_force or (measured.efficiency(option) or 0.0) >= self._enter_gain)
        ]

    def _may_stay(self, situation: Situation, current: Prediction) -> bool:
        used = {group.option.flat() for group in current.groups if group.option != DENSE and not group.is_fixed}
        keeps_enough = current.efficiency is not None and current.efficiency >= self._least_gain
        return keeps_enough and situation.banned.isdisjoint(used)

    def _is_worth(self, situation: Situation, current: Prediction, found: BestPlan) -> bool:
        """Return whether the best plan saves enough, and pays back the time that the change takes."""
        outlook = situation.outlook
        current_s, best_s = outlook.score(current.groups), outlook.score(found.best.groups)
        if not current.is_dense and current_s > MAX_SLOWDOWN * outlook.score(found.dense.groups):
            return True
        saved = 1 - best_s / current_s
        return saved > _least_improvement(current, outlook) and saved * situation.dwell_s > situation.switch_s

    def codec_to_time(self, situation: Situation, kept: Decision) -> CodecSpec | None:
        """Return a codec that was never in use, if its told times may be all that keeps a plan from replacing `kept`.

        They may be MAX_OVERSTATED times too long.
        """
        measured, errors = situation.outlook.now, situation.outlook.errors
        allowed = self._allowed(situation)
        codecs = {option.codec for option in allowed} - {NONE}
        untimed = {codec for codec in codecs if not errors.is_timed(str(codec))}
        costs = dict(measured.codec_costs)
        for codec in untimed:
            costs[str(codec)] = codec_cost_of(costs, codec).slowed(1 / MAX_OVERSTATED)
        best = best_plan(replace(measured, codec_costs=costs), allowed, min_gain=self._least_gain).best
        kept_s = errors.factor(kept.predicted.groups) * kept.predicted.score
        least = _least_improvement(kept.predicted, situation.outlook)
        if errors.factor(best.groups) * best.score >= kept_s * (1 - least):
            return None
        slowed = set(map(str, untimed))
        return next((option.codec for option in best.options if measured.cost_name(option) in slowed), None)


def _least_improvement(current: Prediction, outlook: Outlook) -> float:
    """Return the share of the score of `current` that another plan must save."""
    if not current.is_dense:
        return MIN_IMPROVEMENT
    return max(MIN_IMPROVEMENT, min(1 - math.exp(-outlook.errors.doubt / 2), MOST_IMPROVEMENT))


def _describe_best(found: BestPlan, outlook: Outlook) -> str:
    best = found.best
    best_s, dense_s = map(outlook.errors.step_s, (best, found.dense))
    if best.is_dense:
        return f"nothing beats dense; predicted {dense_s:.3f} s per step, bound by {found.dense.bound_by}"
    assert best.efficiency is not None
    text = (
        f"{best.describe_options()}; predicted {best_s:.3f} s per step (dense {dense_s:.3f} s), keeps "
        f"{best.efficiency:.1%} of its progress"
    )
    costs = describe_costs(option.codec for option in best.options)
    text = f"{text}; {costs}" if costs else text
    gap = f"{found.gap:.1%}"
    return text if gap == "0.0%" else f"{text}, at most {gap} from the optimum"
