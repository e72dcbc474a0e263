"""Choose the codec of a sharded model by trying each one for some steps.

FSDP2 groups the layers itself and says nothing of when gradients are ready, so no model predicts these steps. Codecs
are tried in rounds: with the first steps, when steps have taken another time than before for SETTLE_S, and now and
then.

1. The plan in force is measured, then dense.
2. The steps of another codec take at least the compute of dense ones and, of the rest, its share of dense's bytes. The
   codec with the least of these bounds is tried, then the next, until no bound promises MIN_IMPROVEMENT over the
   fastest: a search by branch and bound.
3. Of the codecs that are within MIN_IMPROVEMENT of the fastest, the one in force stays, if it is at most 3 % slower
   than dense; else the one with most bytes is chosen, which keeps most of the gradient.

Each plan on trial has a lease. The seconds by which steps on trial were longer than those of the plan chosen are the
cost of a round. The next one waits until that is a small share of the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

from cgx_ray.control.group_reports import GroupReports
from cgx_ray.control.history import Registration
from cgx_ray.control.joined_steps import JoinedStep
from cgx_ray.control.journal.facts import Cause, LoopFacts, When
from cgx_ray.control.journal.lines import MadeBy, outcome_entry, tried_entry
from cgx_ray.control.network.changes import SETTLE_S
from cgx_ray.control.network.estimate import NOISE
from cgx_ray.control.policies.policy import MAX_SLOWDOWN, MIN_IMPROVEMENT, DecisionKind, Policy
from cgx_ray.control.trial.outcome import WARM_UP_STEPS
from cgx_ray.plan import NONE, CodecSpec, Lease, Plan, Scheme, make_plan
from cgx_ray.planner.planned_group import groups_of
from cgx_ray.units import format_seconds

_BY_POLICY: MadeBy = "policy"
# Steps of a plan that are measured. The median of so few is off by some percent on a busy machine.
TRIAL_STEPS = 5
# Largest share of the time that rounds cost: of regular ones, and of those that other step times cause.
REVIEW_SHARE, CHANGE_SHARE = 0.02, 0.1
# Least share of a step on trial that counts as its cost: plans that are as fast must not change all the time either.
LEAST_COST = 0.2


class StepTime(NamedTuple):
    """Median seconds of steps under one codec, and of their compute."""

    step_s: float
    compute_s: float

    @property
    def rest_s(self) -> float:
        return max(self.step_s - self.compute_s, 0.0)


@dataclass(slots=True, kw_only=True)
class _Round:
    """A round of trials.

    home      codec before it
    times     of the codecs that were measured
    trials_s  seconds of each step under a plan on trial
    """

    cause: Cause
    home: CodecSpec
    times: dict[CodecSpec, StepTime] = field(default_factory=dict)
    trials_s: list[float] = field(default_factory=list)


class _Expected(NamedTuple):
    """Seconds that a decision expects of the plan's steps and of dense ones."""

    step_s: float
    dense_s: float


def codecs_to_try(policy: Policy) -> tuple[CodecSpec, ...]:
    """Return none and the codecs of a policy's options that a sharded model can change to and from, each once."""
    codecs = (option.codec for option in policy.options)
    fit = (codec for codec in codecs if codec.record.is_reencoded and not codec.record.feeds_back(codec))
    return tuple(dict.fromkeys([NONE, *fit]))


class TriedCodecs(GroupReports):
    """State of one worker group with a sharded model; a restart of the workers makes a new object."""

    def __init__(self, plan: Plan, registration: Registration, policy: Policy) -> None:
        """A policy that does not decide keeps `plan`."""
        super().__init__(registration.layers, plan.world_size)
        self._plan = plan
        fixed = [group for group in registration.first_plan.groups if group.is_fixed]
        self._fixed, self._fixed_layers = fixed, {name for group in fixed for name in group.layers}
        self._decides, self._review_s, self._codecs = policy.decides, policy.review_s, codecs_to_try(policy)
        self._codec = self._codec_of(plan)
        home = plan.lease.fallback if plan.lease is not None else plan
        first = Cause("first_measurements", "first measurements")
        self._round = _Round(cause=first, home=self._codec_of(home)) if policy.decides else None
        # Versions of the plan in force, and its number of steps, of which the newest are kept.
        self._num_steps, self._recent = 0, deque[JoinedStep](maxlen=TRIAL_STEPS)
        self._applied_step = -1
        # What the last decision expects until its outcome is known; what it expected.
        self._pending: _Expected | None = None
        self._expected: _Expected | None = None
        self._prediction_error: float | None = None
        # Of the plan in force when it was chosen; seconds of dense steps since.
        self._level: StepTime | None = None
        self._dense_s: float | None = None
        # Seconds for which steps have taken another time; end and cost of the last round.
        self._off_s = self._ended_s = self._cost_s = 0.0

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
        lease = self._plan.lease
        if lease is not None and step.plan_version == lease.fallback.version:
            self._end_lease(lease, at)
        if step.plan_version != self._plan.version:
            return
        self._num_steps += 1
        if self._num_steps == 1:
            self._applied_step = step.step
        if self._round is not None and self._plan.lease is not None:
            self._round.trials_s.append(step.step_s)
        if self._num_steps <= WARM_UP_STEPS:
            return
        self._recent.append(step)
        if len(self._recent) < TRIAL_STEPS:
            return
        time = self._time()
        self.speed_up = self._dense_s / time.step_s if self._dense_s else None
        if self._pending is not None:
            self._prediction_error = time.step_s / self._pending.step_s - 1
            yield outcome_entry(
                self._pending.step_s,
                time.step_s,
                applied_step=self._applied_step,
                version=self._plan.version,
                step=at.step,
                time_s=at.time_s,
            )
            self._pending = None
        if self._round is None and self._decides:
            self._watch(time, step.passed_s, at)
        if self._round is not None:
            self._round.times[self._codec] = time
            yield self._go_on(self._round, at)

    def facts(self) -> LoopFacts:
        step_s, dense_s = self._expected or (None, None)
        return replace(
            super().facts(),
            predicted_step_s=step_s,
            predicted_dense_step_s=dense_s,
            measured_step_s=self._time().step_s if self._recent else None,
            dense_step_s=self._dense_s,
            is_dense_measured=self._dense_s is not None,
            prediction_error=self._prediction_error,
        )

    def _time(self) -> StepTime:
        return StepTime(
            median(step.step_s for step in self._recent), median(step.means["compute_s"] for step in self._recent)
        )

    def _watch(self, time: StepTime, passed_s: float, at: When) -> None:
        """Begin a round if there is a cause and the last one was cheap enough."""
        if self._level is None:
            self._level = time
        before = self._level
        is_off = not 1 / NOISE < time.step_s / before.step_s < NOISE
        self._off_s = self._off_s + passed_s if is_off else 0.0
        since_s = at.now_s - self._ended_s
        if not _may_improve(time.compute_s, time.step_s):
            # No codec can be better, but compute may be another.
            if self._off_s >= SETTLE_S:
                self._dense_s = self._dense_s and self._dense_s + time.compute_s - before.compute_s
                self._level, self._off_s = time, 0.0
        elif self._off_s >= SETTLE_S and since_s >= self._cost_s / CHANGE_SHARE:
            is_compute = abs(time.compute_s - before.compute_s) > abs(time.rest_s - before.rest_s)
            text = f"a step takes {format_seconds(time.step_s)} instead of {format_seconds(before.step_s)}"
            self._round = _Round(cause=Cause("compute" if is_compute else "network", text), home=self._codec)
            self._dense_s = None
        elif since_s >= max(self._review_s, self._cost_s / REVIEW_SHARE):
            self._round = _Round(cause=Cause("review", "regular review"), home=self._codec)

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
        self._cost_s, self._ended_s = sum(max(s - chosen.step_s, LEAST_COST * s) for s in now.trials_s), at.now_s
        self._round, self._level, self._off_s = None, None, 0.0
        plan, kind, made_by = self._plan, _kind(codec, now), _BY_POLICY
        if plan.lease is not None:
            kind, made_by = ("replace", "return") if kind == "keep" else (kind, made_by)
        if kind != "keep":
            plan = self._plan_of(codec, plan.last_version + 1)
        if kind == "disable":
            self.counts.add_revert("slower_than_dense")
        expected = _Expected(chosen.step_s, dense.step_s)
        return self._decide(plan, codec, expected, kind, made_by, _reason(now), now, at)

    def _chosen(self, now: _Round) -> CodecSpec:
        """Return the codec that a round has found, see 3 in the module's docstring."""
        times, dense_s = now.times, now.times[NONE].step_s
        fastest_s = min(time.step_s for time in times.values())
        as_fast = [codec for codec, time in times.items() if not _may_improve(fastest_s, time.step_s)]
        if now.home in as_fast and times[now.home].step_s <= MAX_SLOWDOWN * dense_s:
            return now.home
        return max(as_fast, key=self._bytes)

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
        self._num_steps, self._pending, self._round, self._level = 0, None, None, None
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


def _reference(times: Mapping[CodecSpec, StepTime]) -> CodecSpec:
    """Return the codec that others are predicted from: none, or the one in force when the round began."""
    return NONE if NONE in times else next(iter(times))


def _may_improve(step_s: float, than_s: float) -> bool:
    return step_s < (1 - MIN_IMPROVEMENT) * than_s


def _kind(codec: CodecSpec, now: _Round) -> DecisionKind:
    if codec == now.home:
        return "keep"
    return "disable" if codec == NONE else "replace"


def _reason(now: _Round) -> str:
    """Return the cause of a round and what it has measured, the fastest first."""
    names = {codec: codec.describe() if codec != NONE else "dense" for codec in now.times}
    found = sorted(now.times.items(), key=lambda one: one[1].step_s)
    said = ", ".join(f"{names[codec]} {format_seconds(time.step_s)}" for codec, time in found)
    if len(found) == 1:
        said += f", of which {found[0][1].compute_s / found[0][1].step_s:.0%} is compute: no codec promises enough"
    return f"{now.cause.text}: per step {said}"
