"""Policies: given the situation of a training they return a decision. They change nothing themselves.

A policy is also the value that users configure: it goes to `CGXConfig` or `attach`, and the control loop asks a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from statistics import geometric_mean, harmonic_mean
from typing import Any, Literal, Protocol, runtime_checkable

from cgx_ray.control.journal.facts import LinkKind
from cgx_ray.control.learned.learned_errors import LearnedErrors
from cgx_ray.errors import ConfigError, PlanError, names_arguments, unknown
from cgx_ray.plan import (
    DENSE,
    NONE,
    CodecSpec,
    Given,
    Intra,
    Option,
    Plan,
    Scheme,
    as_option,
    check_period,
    preferred_scheme,
)
from cgx_ray.planner.bits import QSGD
from cgx_ray.planner.candidates import codec_options
from cgx_ray.planner.cost import Link
from cgx_ray.planner.joint import BestPlan, as_round, best_plan
from cgx_ray.planner.planned_group import PlannedGroup, groups_of
from cgx_ray.planner.prediction import Measured, Prediction, predict

# Seconds after a decision before a policy is asked again without any other cause. Rare enough to cost nothing, frequent
# enough to follow slow trends.
REVIEW_S = 60.0
# Largest allowed ratio of a plan's seconds per step to dense: the promise is "never more than 3 % slower than dense".
MAX_SLOWDOWN = 1.03
# Least improvement of the score, as a fraction, that a change of plan must promise: noise would flip plans otherwise.
MIN_IMPROVEMENT = 0.05
# Gbit/s of the slowest link that may be a machine's memory: busy processors copy 4 Gbit/s through it, idle ones 40. A
# slower one was limited on purpose.
MEMORY_GBPS = 2.0
DecisionKind = Literal["keep", "replace", "disable"]


@names_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerInput:
    """Measurements to plan for.

    now           the measurements
    states        `now`; or several if the network changes too fast to follow, each as likely as the others
    errors        factors that predictions are multiplied with
    dense_groups  DDP's groups; empty: the grouping predicted best for dense
    plan_s        seconds of a step of plans that ran in the last minutes, by their groups: measured, or predicted
                  within what they took on better or worse networks. In no score over several states
    """

    now: Measured
    states: Sequence[Measured]
    errors: LearnedErrors = field(default_factory=LearnedErrors)
    dense_groups: tuple[PlannedGroup, ...] = ()
    plan_s: Mapping[tuple[PlannedGroup, ...], float] = field(default_factory=dict)

    def step_s(self, predicted: Prediction) -> float:
        """Return the seconds that the predicted step will take."""
        # A factor of less than 1, learned where codecs hide behind compute, would shorten compute too.
        return self.plan_s.get(predicted.groups) or max(self.errors.step_s(predicted), predicted.compute_s)

    def score(self, groups: Sequence[PlannedGroup]) -> float:
        """Return seconds for the progress of a dense step, on average over the time."""
        if len(self.states) == 1:
            return self.score_of(predict(self.now, groups))
        scores = [predict(measured, groups).score for measured in self.states]
        return self.errors.factor(groups) * harmonic_mean(scores) if max(scores) < math.inf else math.inf

    def score_of(self, predicted: Prediction) -> float:
        """Return the seconds that the predicted step will take over the progress that it keeps."""
        return predicted.score * self.step_s(predicted) / predicted.step_s

    def hoped_s(self, groups: Sequence[PlannedGroup]) -> float:
        """Return the seconds of a step with codec times as calibrated and without any error that was learned."""
        return predict(replace(self.now, codec_costs=self.errors.calibrated(self.now.codec_costs)), groups).step_s

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

    def best_of_round(self, options: Sequence[Option], min_gain: float, period: int) -> tuple[PlannedGroup, ...]:
        """Return the groups with the smallest score if ranks train alone for `period` steps between two exchanges.

        The search is that for single steps, whose compute is that of a round.
        """
        alone = replace(self, dense_groups=())
        rounds = [one for state in self.states for one in state.rounds(period, options)]
        found = (
            as_round(plan.best.groups, period, pool)
            for of_round, pool in rounds
            for plan in alone._candidates(of_round, pool, min_gain)
        )
        return min(found, key=self.score)

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
        others have, it searches again among those with smaller errors. Each search takes 3 to 260 ms, with thousands of
        layers 400.
        """
        errors, pool, plans = self.errors, list(options), []
        best_s = math.inf
        while True:
            found = best_plan(measured, pool, min_gain=min_gain, dense_groups=self.dense_groups)
            for plan in (found, replace(found, best=found.dense, gap=0.0)):
                plans.append(plan)
                best_s = min(best_s, errors.factor(plan.best.groups) * plan.best.score)
            used = [option for option in found.best.options if option in pool and option != DENSE]
            least = min((errors.option_factor(option) for option in pool), default=1.0)
            if not used or least * found.best.score > best_s * (1 - MIN_IMPROVEMENT):
                return plans
            worst = max(map(errors.option_factor, used))
            pool = [option for option in pool if errors.option_factor(option) < worst]


@names_arguments
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


@names_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The input of a policy.

    cause          the reason for asking now, in words
    plan           in force
    planner_input  measurements, and the errors learned so far
    link           what lies between the ranks
    banned         flat options whose gain fell or that cost loss; the hierarchical ones with the same codec and scheme
                   are banned too
    """

    cause: str
    plan: Plan
    planner_input: PlannerInput
    link: LinkKind = "network"
    banned: frozenset[Option] = field(default_factory=frozenset)

    @property
    def is_in_memory(self) -> bool:
        """Whether gradients cross nothing but the memory of one machine, and its processors hold them."""
        now = self.planner_input.now
        is_fast = now.network.between.bandwidth_gbps >= MEMORY_GBPS
        return self.link == "machine" and is_fast and now.encodes_on != "device"

    def allowed(self, options: Iterable[Option]) -> tuple[Option, ...]:
        """Return those of `options` that are not banned, each once: where nodes have one rank, all are flat."""
        is_flat = self.planner_input.now.network.is_flat
        kept = (option for option in options if option.flat() not in self.banned)
        # An offloaded option is flat already.
        return tuple(
            dict.fromkeys(replace(option, intra=Intra.FLAT) if is_flat(option.intra) else option for option in kept)
        )

    def current(self) -> Prediction:
        """Return the prediction of the plan in force."""
        return predict(self.planner_input.now, groups_of(self.plan, self.planner_input.now.layers))

    def best(self, options: Sequence[Option], min_gain: float = 0.0) -> Prediction:
        """Return the prediction of the best plan from dense and `options`, all layers and groupings considered.

        Options whose gain is unknown or less than `min_gain` are left out.
        """
        return self.planner_input.best(options, min_gain).best

    def decision(self, chosen: Prediction, reason: str, *, dense: Prediction | None = None) -> Decision:
        """Return the decision that puts the groups of `chosen` in force, or keeps them if they are.

        dense  the prediction of dense, if it is known
        """
        step_s, dense_s = map(self.planner_input.step_s, (chosen, dense or self.planner_input.dense()))
        kind: DecisionKind = "keep"
        plan = self.plan
        if chosen.groups != groups_of(plan, self.planner_input.now.layers):
            kind, plan = "replace", chosen.plan(version=plan.version + 1, world_size=plan.world_size)
        return Decision(kind=kind, plan=plan, reason=reason, predicted=chosen, step_s=step_s, dense_s=dense_s)

    def check(self, decision: Decision) -> None:
        """Raise PlanError if the ranks could not follow the plan of `decision`."""
        if decision.kind == "keep":
            return
        layers, plan = self.planner_input.now.layers, decision.plan
        plan.check(layers, self.plan.world_size)
        if plan.version != self.plan.version + 1 or set(self.planner_input.now.fixed) - set(groups_of(plan, layers)):
            raise PlanError(
                f"plan {plan.version} of the policy does not follow plan {self.plan.version}, or lacks layer rules; "
                "make decisions by `Situation.decision` from predictions of `Situation.best`"
            )


@runtime_checkable
class Policy(Protocol):
    """Makes the decisions of a control loop. Subclasses need no more than `decide`, and mostly `options`.

    The loop asks a copy, made by pickle in a process of its own: the class must be in a module that can be imported
    there. An error in `decide` is written to the journal, and the plan in force stays.
    """

    @property
    def options(self) -> Sequence[Option]:
        """All options that may be chosen, besides dense. Ranks measure the times and gains of their codecs."""
        return ()

    @property
    def decides(self) -> bool:
        """False if the first plan stays for the whole run, so that it needs neither gains nor searches."""
        return True

    @property
    def review_s(self) -> float:
        """Seconds after a decision until the policy is asked again without any other cause."""
        return REVIEW_S

    @property
    def max_period(self) -> int:
        """Longest period that it may choose. With more than 1 it is asked when ranks may, or may not, train alone."""
        return 1

    @property
    def is_guarded(self) -> bool:
        """True if the loop takes back plans that are slower than dense, compares with dense where it is unsure, and
        believes no small gain while gradients change fast."""
        return True

    @property
    def max_error(self) -> float | None:
        """Error of bits by layer over that of 4 bits above which it is asked at once; None if it chooses no bits."""
        return None

    @property
    def codec_by_layer(self) -> CodecSpec:
        """Codec whose errors ranks measure by layer, with each number of bits of the qsgd codecs that they time."""
        return QSGD

    @property
    def timed_codecs(self) -> Sequence[CodecSpec]:
        """Codecs that ranks time before training."""
        return tuple(dict.fromkeys(option.codec for option in self.options if option.codec != NONE))

    @property
    def gain_codecs(self) -> Sequence[CodecSpec]:
        """Codecs whose gain ranks measure during training."""
        return self.timed_codecs

    def decide(self, situation: Situation) -> Decision | None:
        """Return a decision, or None if this policy never decides."""

    def codec_to_time(self, situation: Situation, kept: Decision) -> CodecSpec | None:
        """Return a codec whose calibrated times may be what keeps it out of the best plan, or None."""
        return None

    def recorded(self) -> dict[str, Any]:
        """Return the policy for the journal, as `recorded.read_policy` reads it."""
        cls, given = type(self), dict[str, Any]()
        if is_dataclass(self):
            given = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        return {"kind": "own", "name": f"{cls.__module__}:{cls.__qualname__}", "given": given}


def check_name(what: str, name: object, known: Sequence[str]) -> None:
    """Raise ConfigError if `name` is none of `known`."""
    if name not in known:
        raise ConfigError(unknown(what, name, known))


def check_review(review_s: object) -> None:
    """Raise ConfigError if `review_s` is no number of seconds that one can wait."""
    if not isinstance(review_s, int | float) or not 0 < review_s < math.inf:
        raise ConfigError(f"review_s {review_s!r} is not allowed; give seconds above 0, such as {REVIEW_S:g}")


def as_codec(given: CodecSpec | str) -> CodecSpec:
    return given if isinstance(given, CodecSpec) else CodecSpec.parse(given)


def as_candidate(given: Given) -> CodecSpec | Option:
    """Read a codec, or an option, which is a tuple or the text of one."""
    if isinstance(given, str) and not Option.is_text(given) and given in tuple(Scheme):
        raise ConfigError(
            f"candidate {given!r} is a scheme; give its codec with it, such as ('qsgd:bits=4', {given!r}), or the "
            "codec alone for all schemes"
        )
    return as_option(given) if Option.is_text(given) or not isinstance(given, str | CodecSpec) else as_codec(given)


def options_from(candidates: Iterable[Given]) -> tuple[Option, ...]:
    """Return dense and the options that `candidates` allow: a codec stands for all schemes that can carry it.

    Then dense has all its schemes too, also inside nodes first.
    """
    read = [as_candidate(one) for one in candidates]
    found = [DENSE] if all(isinstance(one, Option) for one in read) else list(codec_options([NONE]))
    for one in read:
        found += [one] if isinstance(one, Option) else codec_options([one])
    return tuple(dict.fromkeys(found))


@names_arguments
@dataclass(frozen=True)
class Static(Policy):
    """Keeps one option for the whole run.

    codec   a CodecSpec, or text for `CodecSpec.parse`; None: qsgd, or no codec with scheme "dense"
    scheme  None: the codec's usual one
    intra   "dense" or "compressed" sums inside nodes first, see `collectives.hierarchical`; or "flat"
    period  steps between two exchanges: with more than 1, ranks train alone between them (`engine.period`). The codec
            then encodes what these steps have changed in the parameters
    """

    codec: CodecSpec | str | None = None
    scheme: str | None = None
    intra: str = Intra.FLAT.value
    period: int = 1
    option: Option = field(init=False, repr=False, compare=False)

    decides = False
    is_guarded = False

    def __post_init__(self) -> None:
        check_period(self.period)
        usual = "none" if self.scheme == Scheme.DENSE else "qsgd"
        codec = as_codec(usual if self.codec is None else self.codec)
        option = as_option((codec, preferred_scheme(codec) if self.scheme is None else self.scheme, self.intra))
        object.__setattr__(self, "option", option)
        for name in ("codec", "scheme", "intra"):
            # As text, so that policies that mean the same are the same.
            object.__setattr__(self, name, str(getattr(option, name)))

    def decide(self, situation: Situation) -> Decision | None:
        return None

    def recorded(self) -> dict[str, Any]:
        return {"kind": "static"}
