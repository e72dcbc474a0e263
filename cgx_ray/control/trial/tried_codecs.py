"""Choose the codec of a sharded model by trying each one for some steps.

FSDP2 groups the layers itself and says nothing of when gradients are ready, so no model predicts these steps. Codecs
are tried in rounds: with the first steps, when steps have taken another time than before for SETTLE_S and twice
TRIAL_STEPS, and now and then.

1. The plan in force is measured, then dense, each for TRIAL_STEPS and TRIAL_S.
2. The steps of another codec take at least the compute of dense ones and, of the rest, its share of dense's bytes. The
   codec with the least of these bounds is tried, then the next, until no bound promises MIN_IMPROVEMENT over the
   fastest: a search by branch and bound.
3. Dense is left for codecs that are faster by MIN_IMPROVEMENT and by more than noise. Of those about as fast as the
   fastest the one in force stays, else the one with most bytes is chosen, which keeps most of the gradient.

Each plan on trial has a lease. The seconds by which all steps of such plans were longer than those of the plan chosen
are the cost of a round. The next one waits until that is a small share of the time.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

from cgx_ray.control.group_reports import GroupReports
from cgx_ray.control.history import Registration
from cgx_ray.control.joined_steps import JoinedStep
from cgx_ray.control.journal.facts import Cause, LoopFacts, When
from cgx_ray.control.journal.lines import MadeBy, outcome_entry, tried_entry
from cgx_ray.control.learned.evidence import MAX_STEPS
from cgx_ray.control.network.changes import SETTLE_S
from cgx_ray.control.network.estimate import NOISE
from cgx_ray.control.policies.policy import MAX_SLOWDOWN, MIN_IMPROVEMENT, DecisionKind, Policy
from cgx_ray.control.trial.outcome import WARM_UP_STEPS
from cgx_ray.plan import NONE, CodecSpec, Lease, Plan, Scheme, make_plan
from cgx_ray.planner.fidelity import loss_of
from cgx_ray.planner.planned_group import groups_of
from cgx_ray.units import format_seconds

logger = logging.getLogger(__name__)

# Least steps and seconds of a plan that are measured, and most steps: the median of fewer is off by some percent on a
# busy machine.
TRIAL_STEPS, TRIAL_S, MAX_TRIAL_STEPS = 5, 1.0, 200
# Standard errors by which a codec must be faster.
SURE = 2.0
# Standard deviation of a normal distribution over its median absolute deviation.
NORMAL_MAD = 1.4826
# Largest share of the time that rounds cost: of regular ones, and of those that other step times cause.
REVIEW_SHARE, CHANGE_SHARE = 0.02, 0.1
# Least share of a step on trial that counts as its cost: plans that are as fast must not change all the time either.
LEAST_COST = 0.2


class StepTime(NamedTuple):
    """Median seconds of steps under one codec with its standard error, and of their compute."""

    step_s: float
    compute_s: float
    error_s: float

    @property
    def rest_s(self) -> float:
        return max(self.step_s - self.compute_s, 0.0)


@dataclass(slots=True, kw_only=True)
class _Round:
    """A round of trials.

    home      codec before it
    times     of the codecs that were measured
    """

    cause: Cause
    home: CodecSpec
    times: dict[CodecSpec, StepTime] = field(default_factory=dict)


class _Expected(NamedTuple):
    """Seconds that a decision expects of the plan's steps and of dense ones."""

    step_s: float
    dense_s: float


def codecs_to_try(policy: Policy) -> tuple[CodecSpec, ...]:
    """Return none and the codecs of a policy's options that a sharded model can change to and from, each once.

    Without those that lose more than the policy's `max_loss`, if it has one, and its reserve: the loss is not watched.
    """
    codecs, max_loss = (option.codec for option in policy.options), getattr(policy, "max_loss", None) or math.inf
    fit = (codec for codec in codecs if codec.record.is_reencoded and not codec.record.feeds_back(codec))
    reserve: Collection[CodecSpec] = getattr(policy, "reserve", ())
    return tuple(
        dict.fromkeys([NONE, *(codec for codec in fit if loss_of(codec, 1, 1) <= max_loss and codec not in reserve)])
    )


class TriedCodecs(GroupReports):
    """State of one worker group with a sharded model; a restart of the workers makes a new object."""

    def __init__(self, plan: Plan, registration: Registration, policy: Policy) -> None:
        """A policy that does not decide keeps `plan`."""
        super().__init__(registration.layers, plan.world_size)
        self._plan = plan
        fixed = [group for group in registration.first_plan.groups if group.is_fixed]
        self._fixed, self._fixed_layers = fixed, {name for group in fixed for name in group.layers}
        self._review_s, self._codecs = policy.review_s, codecs_to_try(policy)
        self._codec = self._codec_of(plan)
        home = plan.lease.fallback if plan.lease is not None else plan
        first = Cause("first_measurements", "first measurements")
        # Layer rules may leave nothing to decide.
        self._decides = policy.decides and len(self._fixed_layers) < len(self.layers)
        self._round = _Round(cause=first, home=self._codec_of(home)) if self._decides else None
        # Steps of the plan in force, of which the newest are kept, and the first one.
        self._num_steps, self._recent = 0, deque[JoinedStep](maxlen=MAX_TRIAL_STEPS)
        self._applied_step = -1
        self._has_warned = False
        # What the last decision expects until its outcome is known; what it expected.
        self._pending: _Expected | None = None
        self._expected: _Expected | None = None
        self._prediction_error: float | None = None
        # The first MAX_STEPS steps of the plan that was chosen, and what dense ones take beside them.
        self._before: list[JoinedStep] = []
        self._dense_s: float | None = None
        # Steps, and their seconds, that have taken another time.
        self._off_steps, self._off_s = 0, 0.0
        # Of the newest round: versions of its plans on trial, seconds of each of their steps, its end, and seconds of a
        # step of the plan that it chose.
        self._trials, self._trials_s = set[int](), list[float]()
        self._ended_s = self._chosen_s = 0.0

    @property
    def plan(self) -> Plan:
        return self._plan

    def note(self, news: str) -> None:
        """Begin a round as soon as there are measurements, because of `news`."""
        if self._round is not None:
            self._round.cause = Cause("restart", news)

    def add_step(self, step: JoinedStep, at: When) -> Iterator[dict[str, Any]]:
        """Add a step of all ranks; yield the lines of the journal that it causes. `plan` may be another one then."""
        self._slow_ranks.add_ratios(step.slowness, step.passed_s)
        if not self._is_current(step, at):
            return
        self._num_steps += 1
        if self._num_steps == 1:
            self._applied_step = step.step
        if self._num_steps > WARM_UP_STEPS:
            self._recent.append(step)
        self._compare_with_dense(step)
        if not self._is_measured:
            return
        if self._pending is not None:
            yield self._outcome(self._pending, at)
        if self._round is None and self._decides:
            self._watch(step, at)
        if self._round is not None and self._is_measured:
            self._round.times[self._codec] = _time(self._recent)
            yield self._go_on(self._round, at)

    def _is_current(self, step: JoinedStep, at: When) -> bool:
        """Return whether a step ran under the plan in force, which its version may show to be another one."""
        lease, version = self._plan.lease, step.plan_version
        if lease is not None and version == lease.fallback.version:
            self._end_lease(lease, at)
        if version in self._trials:
            # Also after the next decision, whose plan has not arrived yet.
            self._trials_s.append(step.step_s)
        if version > self._plan.last_version and self._decides and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the ranks have plan %d, which is none of the controller's: nothing is decided any more; leave out "
                "Attachment.hold where policy 'adaptive' decides",
                version,
            )
        return version == self._plan.version

    def _outcome(self, expected: _Expected, at: When) -> dict[str, Any]:
        """Compare the newest steps with what was expected of them; return the line of the journal."""
        step_s = _time(self._recent).step_s
        self._pending, self._prediction_error = None, step_s / expected.step_s - 1
        version, first = self._plan.version, self._applied_step
        return outcome_entry(
            expected.step_s, step_s, applied_step=first, version=version, step=at.step, time_s=at.time_s
        )

    @property
    def _is_measured(self) -> bool:
        num_steps = len(self._recent)
        is_long = sum(step.passed_s for step in self._recent) >= TRIAL_S or num_steps == MAX_TRIAL_STEPS
        return num_steps >= TRIAL_STEPS and is_long

    def _compare_with_dense(self, step: JoinedStep) -> None:
        """Set `speed_up`. While steps take another time than before, what dense ones take is not known."""
        if self._codec == NONE:
            self.speed_up = 1.0
        else:
            newest = median(one.step_s for one in list(self._recent)[-MAX_STEPS:] or [step])
            self.speed_up = self._dense_s / newest if self._dense_s and not self._off_s else None

    def facts(self) -> LoopFacts:
        expected_s, expected_dense_s = self._expected or (None, None)
        step_s = _time(self._recent).step_s if self._recent else None
        dense_s = step_s if self._codec == NONE and self._is_measured else self._dense_s
        return replace(
            super().facts(),
            predicted_step_s=expected_s,
            predicted_dense_step_s=expected_dense_s,
            measured_step_s=step_s,
            dense_step_s=dense_s,
            is_dense_measured=dense_s is not None,
            prediction_error=self._prediction_error,
        )

    def _watch(self, step: JoinedStep, at: When) -> None:
        """Begin a round if there is a cause and the last one was cheap enough."""
        if len(self._before) < MAX_STEPS and not self._off_s:
            self._before.append(step)
        now, before = _time(list(self._recent)[-TRIAL_STEPS:]), _time(self._before)
        is_slow = self._codec != NONE and self._dense_s is not None and now.step_s > MAX_SLOWDOWN * self._dense_s
        is_off = is_slow or not 1 / NOISE < now.step_s / before.step_s < NOISE
        self._off_steps, self._off_s = (self._off_steps + 1, self._off_s + step.passed_s) if is_off else (0, 0.0)
        has_changed = self._off_s >= SETTLE_S and self._off_steps >= 2 * TRIAL_STEPS
        since_s, cost_s = at.now_s - self._ended_s, self._cost_s
        if self._codec == NONE and not _may_improve(now.compute_s, now.step_s):
            # No codec can be better.
            if has_changed:
                self._before, self._off_steps, self._off_s = [], 0, 0.0
        elif has_changed and since_s >= cost_s / CHANGE_SHARE:
            is_compute = abs(now.compute_s - before.compute_s) > abs(now.rest_s - before.rest_s)
            text = f"a step takes {format_seconds(now.step_s)} instead of {format_seconds(before.step_s)}"
            cause = Cause("compute" if is_compute else "network", text)
            if is_slow and self._dense_s is not None:
                text = f"a step takes {format_seconds(now.step_s)}, a dense one {format_seconds(self._dense_s)}"
                cause = Cause("slower_than_dense", text)
            self._dense_s = None
            self._begin_round(cause)
        elif since_s >= max(self._review_s, cost_s / REVIEW_SHARE):
            self._begin_round(Cause("review", "regular review"))

    def _begin_round(self, cause: Cause) -> None:
        self._round = _Round(cause=cause, home=self._codec)
        self._off_steps, self._off_s = 0, 0.0
        self._trials.clear()
        self._trials_s.clear()
        # Steps of before the change say nothing of now.
        recent = list(self._recent)[-TRIAL_STEPS:]
        self._recent.clear()
        self._recent.extend(recent)

    @property
    def _cost_s(self) -> float:
        """Seconds that the newest round has cost."""
        return sum(max(step_s - self._chosen_s, LEAST_COST * step_s) for step_s in self._trials_s)

    def _go_on(self, now: _Round, at: When) -> dict[str, Any]:
        """Begin the next trial of a round, or end it; return the decision's line of the journal."""
        if NONE in now.times:
            self._dense_s = now.times[NONE].step_s
        codec = self._next_codec(now.times)
        return self._end_round(now, at) if codec is None else self._begin_trial(codec, now, at)

    def _next_codec(self, times: dict[CodecSpec, StepTime]) -> CodecSpec | None:
        """Return the codec to try now: dense, then the one that promises most; None if none promises enough."""
        if NONE not in times:
            return NONE
        untried = [codec for codec in self._codecs if codec not in times]
        codec = min(untried, key=lambda codec: self._predicted_s(codec, times), default=None)
        fastest_s = min(time.step_s for time in times.values())
        return codec if codec is not None and _may_improve(self._predicted_s(codec, times), fastest_s) else None

    def _predicted_s(self, codec: CodecSpec, times: dict[CodecSpec, StepTime]) -> float:
        """Return what a step takes if all but compute takes time in proportion to bytes; dense's own if it is known."""
        if codec in times:
            return times[codec].step_s
        known = _reference(times)
        return times[known].compute_s + times[known].rest_s * self._bytes(codec) / self._bytes(known)

    def _bytes(self, codec: CodecSpec) -> int:
        return sum(group.wire_bytes for group in groups_of(self._plan_of(codec, 0), self.layers)) or 1

    def _begin_trial(self, codec: CodecSpec, now: _Round, at: When) -> dict[str, Any]:
        expected = _Expected(self._predicted_s(codec, now.times), self._predicted_s(NONE, now.times))
        plan = self.leased(self._plan_of(codec, self._plan.last_version + 1), at.step, expected.step_s)
        reason = f"{now.cause.text}: try {codec.describe() if codec != NONE else 'dense'}"
        return self._decide(plan, codec, expected, "replace", "plan_trial", reason, now, at)

    def _end_round(self, now: _Round, at: When) -> dict[str, Any]:
        codec = self._chosen(now)
        chosen, dense = now.times[codec], now.times[NONE]
        self._ended_s, self._chosen_s = at.now_s, chosen.step_s
        self._round, self._before, self._off_steps, self._off_s = None, [], 0, 0.0
        plan, kind = self._plan, _kind(codec, now)
        made_by: MadeBy = "policy"
        if kind == "keep" and plan.lease is not None:
            kind, made_by = "replace", "return"
        if kind != "keep":
            plan = self._plan_of(codec, plan.last_version + 1)
        if kind == "disable":
            self.counts.add_revert("slower_than_dense")
        expected = _Expected(chosen.step_s, dense.step_s)
        return self._decide(plan, codec, expected, kind, made_by, _reason(now, codec), now, at)

    def _chosen(self, now: _Round) -> CodecSpec:
        """Return the codec that a round has found, see 3 in the module's docstring."""
        times, dense = now.times, now.times[NONE]
        faster = [codec for codec, time in times.items() if _is_faster(time, dense)]
        if not faster:
            return NONE
        fastest = min((times[codec] for codec in faster), key=lambda time: time.step_s)
        as_fast = [codec for codec in faster if not _is_faster(fastest, times[codec])]
        return now.home if now.home in as_fast else max(as_fast, key=self._bytes)

    def _decide(
        self,
        plan: Plan,
        codec: CodecSpec,
        expected: _Expected,
        kind: DecisionKind,
        made_by: MadeBy,
        reason: str,
        now: _Round,
        at: When,
    ) -> dict[str, Any]:
        """Put `plan` in force; return the line of the journal."""
        old, self._expected = self._plan, expected
        if plan is not old:
            self._plan, self._codec, self._pending = plan, codec, expected
            self._num_steps = 0
            self._recent.clear()
            if made_by == "plan_trial":
                self._trials.add(plan.version)
        self.counts.add_decision(kind, now.cause.kind, at.time_s)
        return tried_entry(
            kind,
            made_by,
            old=old,
            new=plan,
            layers=self.layers,
            reason=reason,
            cause=now.cause.text,
            compute_s=now.times[_reference(now.times)].compute_s,
            facts=self.facts(),
            predicted_s=expected,
            step=at.step,
            time_s=at.time_s,
        )

    def _end_lease(self, lease: Lease, at: When) -> None:
        """Note that the ranks have returned to the fallback of a lease, as its end came before that of the trial."""
        self.counts.add_revert("trial_expired")
        self._plan, self._codec = lease.fallback, self._codec_of(lease.fallback)
        self._num_steps, self._pending, self._round, self._before = 0, None, None, []
        self._ended_s = at.now_s
        self._recent.clear()

    def _plan_of(self, codec: CodecSpec, version: int) -> Plan:
        """Return the plan with `codec` for all layers but those of layer rules."""
        free = [layer for layer in self.layers if layer.name not in self._fixed_layers]
        scheme = Scheme.DENSE if codec == NONE else Scheme.SRA
        size = self._plan.world_size
        plan = make_plan(free, version=version, world_size=size, codec=codec, scheme=scheme)
        return replace(plan, groups=(*plan.groups, *self._fixed))

    @staticmethod
    def _codec_of(plan: Plan) -> CodecSpec:
        """Return the codec of the layers that no rule has fixed."""
        free = (group.option.codec for group in plan.groups if not group.is_fixed)
        return next((codec for codec in free if codec != NONE), NONE)


def _time(steps: Collection[JoinedStep]) -> StepTime:
    """Return the time of a step. Its error is that of the median of normal noise with the deviation of the steps."""
    step_s = median(step.step_s for step in steps)
    deviation_s = NORMAL_MAD * median(abs(step.step_s - step_s) for step in steps)
    error_s = math.sqrt(math.pi / 2 / len(steps)) * deviation_s
    return StepTime(step_s, median(step.means["compute_s"] for step in steps), error_s)


def _is_faster(time: StepTime, than: StepTime) -> bool:
    """Return whether steps are faster by MIN_IMPROVEMENT and by more than noise."""
    is_sure = than.step_s - time.step_s > SURE * math.hypot(time.error_s, than.error_s)
    return is_sure and _may_improve(time.step_s, than.step_s)


def _reference(times: Mapping[CodecSpec, StepTime]) -> CodecSpec:
    """Return the codec that others are predicted from: none, or the one in force when the round began."""
    return NONE if NONE in times else next(iter(times))


def _may_improve(step_s: float, than_s: float) -> bool:
    return step_s < (1 - MIN_IMPROVEMENT) * than_s


def _kind(codec: CodecSpec, now: _Round) -> DecisionKind:
    if codec == now.home:
        return "keep"
    return "disable" if codec == NONE else "replace"


def _reason(now: _Round, chosen: CodecSpec) -> str:
    """Return the cause of a round and what it has measured, the fastest first."""
    names = {codec: codec.describe() if codec != NONE else "dense" for codec in now.times}
    found = sorted(now.times.items(), key=lambda one: one[1].step_s)
    said = ", ".join(f"{names[codec]} {format_seconds(time.step_s)}" for codec, time in found)
    if len(found) == 1:
        said += f", of which {found[0][1].compute_s / found[0][1].step_s:.0%} is compute: no codec promises enough"
    elif found[0][0] != chosen:
        said += f"; {names[chosen]} is about as fast as any"
    return f"{now.cause.text}: per step {said}"
