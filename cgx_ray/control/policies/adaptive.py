"""Policy "adaptive": the plan with the smallest score.

It asks the planner for the plan with the smallest score under the current measurements, where the score is predicted
seconds per step, times the errors learned so far, over the fraction of a dense step's progress that the plan keeps. The
plan in force is scored with the same measurements, then:

1. If the plan in force clearly keeps less than `min_gain`, uses a banned codec and scheme, or is predicted to be more
   than 3 % slower than dense, the best plan replaces it at once.
2. Else the best plan replaces it only if its score is more than 5 % smaller.

On a network that changes too fast to follow, a score is the mean over the recent states of the network.

Gains are noisy, so options in force may have MIN_IMPROVEMENT more error than `min_gain` allows, and others must have as
much less.

Dense stays where the ranks share one machine and its processors hold the gradients. Codecs would take what they save.

Dense means the sums of plain DDP. Hierarchical dense sums are an option like any other. If a node has one rank, or all
ranks share memory, hierarchical options equal flat ones, so the planner leaves them out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cgx_ray.control.journal.facts import IN_MEMORY
from cgx_ray.control.policies.policy import (
    MAX_SLOWDOWN,
    MIN_IMPROVEMENT,
    REVIEW_S,
    Decision,
    PlannerInput,
    Policy,
    Situation,
    as_candidate,
    check_name,
    check_review,
    options_from,
)
from cgx_ray.errors import ConfigError, names_arguments
from cgx_ray.plan import DENSE, NONE, CodecSpec, Given, Option
from cgx_ray.planner.by_hand import plans_by_hand, unless_by_hand, with_best
from cgx_ray.planner.candidates import FREE, offloaded
from cgx_ray.planner.fidelity import (
    PERIODS,
    RESERVE,
    USUAL_MIN_GAIN,
    Fidelity,
    codecs_of,
    describe_costs,
    loss_of,
    periods_of,
)
from cgx_ray.planner.joint import BestPlan, best_plan
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES
from cgx_ray.planner.planned_group import PlannedGroup, groups_of, period_of
from cgx_ray.planner.prediction import Prediction, predict
from cgx_ray.units import format_seconds


@names_arguments
@dataclass(frozen=True, kw_only=True)
class Adaptive(Policy):
    """Chooses the plan with the smallest score, see the module's docstring.

    fidelity    codecs and periods that may be chosen, by the loss that they are expected to cost: "strict" at most 1 %
                over dense, "balanced" 5 %, "fast" any. See `planner.fidelity`
    candidates  codecs that may be chosen, in place of those of a fidelity: text for `CodecSpec.parse`, over every
                scheme that can carry it; or options, such as ("topk:density=0.01", "allgather"). Where a GPU holds the
                gradients they may also be offloaded
    min_gain    leaves out codecs whose gain is smaller, up to MIN_IMPROVEMENT of the error. For codecs without error
                feedback whose loss was measured, dense's loss over theirs takes the place of the gain
    review_s    seconds after a decision until it is asked again without any other cause
    periods     steps between two exchanges that may be chosen besides 1 (`engine.period`), of those in
                `planner.fidelity`. Default: those of the fidelity, and 1 with `candidates`
    max_loss    expected loss over dense's that a codec and a period may have together; None: any. Default: that of
                the fidelity, 1.01 or 1.044, if neither candidates nor periods are given
    """

    fidelity: str = Fidelity.STRICT.value
    candidates: Sequence[Given] | None = None
    min_gain: float = USUAL_MIN_GAIN
    review_s: float = REVIEW_S
    periods: Sequence[int] | None = None
    max_loss: float | None = None

    def __post_init__(self) -> None:
        check_name("fidelity", self.fidelity, tuple(Fidelity))
        if not isinstance(self.min_gain, int | float) or not 0 <= self.min_gain <= 1:
            raise ConfigError(
                f"min_gain {self.min_gain!r} is not in [0, 1]; 0.8 keeps 80 % of the gradient's squared norm"
            )
        check_review(self.review_s)
        if not (self.max_loss is None or (isinstance(self.max_loss, int | float) and 1 <= self.max_loss < math.inf)):
            raise ConfigError(f"max_loss {self.max_loss!r} is not allowed; give a loss over dense's, such as 1.01")
        if self.periods is None:
            usual = periods_of(self.fidelity) if self.candidates is None else (1,)
            object.__setattr__(self, "periods", usual)
            if self.max_loss is None and self.candidates is None:
                object.__setattr__(self, "max_loss", Fidelity(self.fidelity).max_loss)
        elif not isinstance(self.periods, tuple | list) or not {*self.periods} <= {1, *PERIODS}:
            raise ConfigError(
                f"periods {self.periods!r} is not allowed; give some of {', '.join(map(str, (1, *PERIODS)))}, "
                "such as (1, 4, 8)"
            )
        if self.candidates is None:
            return
        if not isinstance(self.candidates, tuple | list) or not self.candidates:
            raise ConfigError(
                f"candidates {self.candidates!r} is not allowed; give one codec or more, such as "
                "('qsgd:bits=4', 'topk:density=0.1'), or None to choose by fidelity"
            )
        if self.fidelity != Fidelity.STRICT:
            raise ConfigError(
                f"fidelity {str(self.fidelity)!r} and candidates are both given, and both say which codecs may be "
                "chosen; give one of them"
            )
        # As text, so that policies that mean the same are the same.
        object.__setattr__(self, "candidates", tuple(str(as_candidate(one)) for one in self.candidates))

    @cached_property
    def options(self) -> Sequence[Option]:
        """All that may be chosen."""
        chosen = self.candidates
        return options_from(codecs_of(self.fidelity, CANDIDATE_DENSITIES) if chosen is None else chosen)

    @property
    def reserve(self) -> frozenset[CodecSpec]:
        """Codecs that only stand in for others of their kind that lose too much."""
        return frozenset([RESERVE] if self.candidates is None else [])

    @property
    def max_period(self) -> int:
        return max(1, *self._periods)

    @property
    def _most_loss(self) -> float:
        return math.inf if self.max_loss is None else self.max_loss

    @property
    def _least_gain(self) -> float:
        """Least gain of an option in force."""
        return max(0.0, 1 - (1 + MIN_IMPROVEMENT) * (1 - self.min_gain))

    @property
    def _enter_gain(self) -> float:
        """Least gain of other options."""
        return 1 - (1 - MIN_IMPROVEMENT) * (1 - self.min_gain)

    def decide(self, situation: Situation) -> Decision:
        cause, planner_input = situation.cause, situation.planner_input
        if self._stays_dense(situation):
            return situation.decision(situation.current(), f"{cause}: {IN_MEMORY}")
        hopeful = self._with_hopes(situation)
        found, current = self._best(hopeful, ran=planner_input.plan_s.keys()), situation.current()
        best, reason = found.best, f"{cause}: {_describe_best(found, planner_input)}"
        is_other = best.groups != current.groups
        if is_other and self._may_stay(situation, current) and not self._is_worth(hopeful, current, found):
            kept, other = current.describe_options(), best.describe_options()
            what = other if other != kept else "other groups"
            best, reason = current, f"{cause}: kept {kept}; {what} would be less than {MIN_IMPROVEMENT:.0%} better"
        elif best.groups in hopeful.planner_input.plan_s.keys() - planner_input.plan_s.keys():
            reason = f"{reason}; tried alone once, as only mixtures with it ran"
        return situation.decision(best, "; ".join([reason, *self._held_back(situation)]), dense=found.dense)

    def _held_back(self, situation: Situation) -> Iterator[str]:
        """Say in words what the policy allows and the measurements do not: candidates, and rounds."""
        measured, in_force = situation.planner_input.now, {group.option.codec for group in situation.plan.groups}
        kept: dict[CodecSpec, float] = {}
        for option in self.options if self.candidates is not None else ():
            share = measured.efficiency(option)
            if share is not None and option.codec not in in_force:
                kept[option.codec] = max(share, kept.get(option.codec, 0.0))
        for codec, share in kept.items():
            if share < self._enter_gain:
                yield (
                    f"{codec.describe()}: a step counts as {share:.1%} of a dense one, and min_gain allows "
                    f"{self._enter_gain:.1%} or more"
                )
        for codec, option in {option.codec: option for option in self.options}.items():
            if loss_of(codec, 1, 1) > self._most_loss:
                yield f"{describe_costs([codec])}, and max_loss is {self._most_loss:g}"
            elif (loss := measured.loss_of(option, 1, 1)) > self._most_loss:
                by_fall = loss == loss_of(codec, 1, 1, measured.loss_fall)
                cause = "the loss has fallen so far" if by_fall else "its errors are so large here"
                yield f"{codec.describe()} would end {loss - 1:.1%} above dense, as {cause}"
        if self.max_period > 1 and measured.max_period == 1 and not measured.fixed:
            yield "ranks do not train alone now"

    def _stays_dense(self, situation: Situation) -> bool:
        """Return whether the plan in force is dense and no codec can help: differences would be noise."""
        groups = groups_of(situation.plan, situation.planner_input.now.layers)
        return situation.is_in_memory and all(group.is_fixed or group.option == DENSE for group in groups)

    def _best(self, situation: Situation, ran: Set[tuple[PlannedGroup, ...]]) -> BestPlan:
        """Return the best plan. One that is not in `ran` must promise MIN_IMPROVEMENT over each that is, and dense."""
        planner_input, allowed = situation.planner_input, self._allowed(situation)
        found = self._with_rounds(planner_input, allowed, self._best_predicted(situation, allowed))
        usable = {DENSE, *(option for option in allowed if self._keeps_enough(option, planner_input))}
        measured = [
            groups
            for groups in ran
            if all(group.is_fixed or group.option in usable for group in groups)
            and self._may_have(period_of(groups), planner_input)
        ]
        if not measured:
            return found
        # Dense ran at the start.
        best = min((*measured, found.dense.groups), key=planner_input.score)
        return with_best(found, best, planner_input.now, planner_input.score, promised=MIN_IMPROVEMENT)

    def _may_have(self, period: int, planner_input: PlannerInput) -> bool:
        return period in (1, *self._periods) and period <= planner_input.now.max_period

    @property
    def _periods(self) -> Sequence[int]:
        assert self.periods is not None
        return self.periods

    def _may_lose(self, option: Option, period: int, planner_input: PlannerInput) -> bool:
        now = planner_input.now
        return now.loss_of(option, period, now.network.num_replicas([option])) <= self._most_loss

    def _with_rounds(self, planner_input: PlannerInput, allowed: Sequence[Option], found: BestPlan) -> BestPlan:
        """Return `found`, or the best plan of rounds if that promises MIN_IMPROVEMENT over it."""
        periods = [period for period in self._periods if 1 < period <= planner_input.now.max_period]
        if not periods or planner_input.now.fixed:
            return found
        found_groups = []
        for period in periods:
            if options := [option for option in allowed if self._may_lose(option, period, planner_input)]:
                found_groups.append(planner_input.best_of_round(options, 0.0, period))
        if not found_groups:
            return found
        best = min(found_groups, key=planner_input.score)
        return with_best(found, best, planner_input.now, planner_input.score, promised=-MIN_IMPROVEMENT)

    def _best_predicted(self, situation: Situation, allowed: Sequence[Option]) -> BestPlan:
        """Return the best plan by prediction, which must beat what one would write by hand."""
        planner_input = situation.planner_input
        found = planner_input.best(allowed, self._least_gain)
        return unless_by_hand(found, planner_input.now, allowed, planner_input.score, min_gain=self._least_gain)

    def _with_hopes(self, situation: Situation) -> Situation:
        """Return `situation` with the seconds that are hoped of plans by hand.

        A codec that ran in mixtures only is hoped to take alone what was predicted before: so each gets one trial,
        where it may be the best.
        """
        planner_input = situation.planner_input
        in_doubt = planner_input.errors.only_mixed
        if not in_doubt or len(planner_input.states) > 1:
            return situation
        allowed = [option for option in self._allowed(situation) if option.codec in in_doubt]
        hoped = {
            groups: min(planner_input.hoped_s(groups), planner_input.step_s(predict(planner_input.now, groups)))
            for groups in plans_by_hand(planner_input.now, allowed, self._least_gain)
        }
        return replace(situation, planner_input=replace(planner_input, plan_s={**hoped, **planner_input.plan_s}))

    def recorded(self) -> dict[str, Any]:
        if type(self) is not Adaptive:
            return super().recorded()
        return {"kind": "adaptive", "options": list(map(str, self.options)), "min_gain": self.min_gain} | {
            "periods": list(self._periods),
            "max_loss": self.max_loss,
            "fidelity": str(self.fidelity) if self.candidates is None else None,
        }

    def _allowed(self, situation: Situation) -> list[Option]:
        """Return the options that are not banned, lose no more than `max_loss`, and keep enough: those in force may
        keep a little less.

        Where a GPU holds the gradients, with the same ones offloaded, but none whose link inside nodes is not known.
        """
        in_force, measured = {group.option for group in situation.plan.groups}, situation.planner_input.now
        moved = offloaded(self.options) if measured.bus is not None else ()
        found = [
            option
            for option in situation.allowed((*self.options, *moved))
            if self._may_lose(option, 1, situation.planner_input)
            and (
                option in in_force
                or (measured.network.knows_inside(option) and (measured.efficiency(option) or 0.0) >= self._enter_gain)
            )
        ]
        others = [option for option in found if option.codec not in self.reserve]
        needs_no_reserve = any(option.codec.name == RESERVE.name for option in others)
        return others if needs_no_reserve else found

    def _keeps_enough(self, option: Option, planner_input: PlannerInput) -> bool:
        return (planner_input.now.efficiency(option) or 0.0) >= self._least_gain

    def _may_stay(self, situation: Situation, current: Prediction) -> bool:
        planner_input = situation.planner_input
        used = {group.option for group in current.groups if group.option != DENSE and not group.is_fixed}
        keeps_enough = current.efficiency is not None and current.efficiency >= self._least_gain
        may_lose = all(self._may_lose(option, current.period, planner_input) for option in used)
        is_banned = not situation.banned.isdisjoint(option.flat() for option in used)
        return keeps_enough and may_lose and self._may_have(current.period, planner_input) and not is_banned

    def _is_worth(self, situation: Situation, current: Prediction, found: BestPlan) -> bool:
        """Return whether the best plan saves enough."""
        planner_input = situation.planner_input
        current_s, best_s = planner_input.score(current.groups), planner_input.score(found.best.groups)
        if not current.is_dense and current_s > MAX_SLOWDOWN * planner_input.score(found.dense.groups):
            return True
        return best_s < (1 - MIN_IMPROVEMENT) * current_s

    def codec_to_time(self, situation: Situation, kept: Decision) -> CodecSpec | None:
        """Return a codec that was never in use, if its calibrated times may be all that keeps a plan from replacing
        `kept`.

        They may be far too long. Those of a GPU are not: steps could not time it better.
        """
        planner_input, errors = situation.planner_input, situation.planner_input.errors
        measured = planner_input.now
        if measured.encodes_on == "device" or self._stays_dense(situation):
            return None
        allowed = self._allowed(situation)
        codecs = {option.codec for option in allowed} - {NONE}
        untimed = {codec for codec in codecs if not errors.is_timed(str(codec))}
        costs = {**measured.codec_costs, **dict.fromkeys(map(str, untimed), FREE)}
        best = best_plan(replace(measured, codec_costs=costs), allowed, min_gain=self._least_gain).best
        if planner_input.score_of(best) >= planner_input.score_of(kept.predicted) * (1 - MIN_IMPROVEMENT):
            return None
        slowed = set(map(str, untimed))
        return next((option.codec for option in best.options if measured.cost_name(option) in slowed), None)


def _describe_best(found: BestPlan, planner_input: PlannerInput) -> str:
    best = found.best
    took, dense_took = (format_seconds(planner_input.step_s(one)) for one in (best, found.dense))
    if best.is_dense:
        return f"nothing beats dense; predicted {dense_took} per step, bound by {found.dense.bound_by}"
    kept = best.describe_kept()
    text = f"{best.describe_options()}; predicted {took} per step (dense {dense_took}), {kept}"
    costs = describe_costs([option.codec for option in best.options], best.period, best.replicas)
    text = f"{text}; {costs}" if costs else text
    gap = f"{found.gap:.1%}"
    return text if gap == "0.0%" else f"{text}, at most {gap} slower than the best possible plan"
