"""The controller's knowledge of one worker group: its plan in force, its measurements and its last decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from cgx_ray.control.gains.gain_watch import GAIN_CHANGE, KnownGains
from cgx_ray.control.gains.known_losses import KnownLosses
from cgx_ray.control.gains.loss_trend import LossFall, LossTrend
from cgx_ray.control.group_reports import GroupReports
from cgx_ray.control.history import Learned, Registration
from cgx_ray.control.joined_steps import JoinedStep
from cgx_ray.control.journal.facts import Cause, LinkKind, LoopFacts
from cgx_ray.control.learned.compute_slowdown import ComputeSlowdown
from cgx_ray.control.learned.evidence import MAX_STEPS, Evidence, Verdict, verdict
from cgx_ray.control.learned.measured import (
    bits_by_layer,
    compressing_options,
    compute_times,
    costliest,
    fallen,
    inside_of,
    is_dense,
    loss_cause,
    network_of,
    non_dense_options,
    on_link,
    period_cause,
    resized,
)
from cgx_ray.control.network.changes import SETTLE_S, ComputeChanges, network_cause
from cgx_ray.control.network.estimate import FEW, HICCUP_S, LONG_S, NOISE, OBVIOUS
from cgx_ray.control.network.recent_links import RecentLinks
from cgx_ray.control.policies.policy import MAX_SLOWDOWN, REVIEW_S, Decision, PlannerInput, Policy, Situation
from cgx_ray.control.trial.bans import Bans
from cgx_ray.control.trial.measuring_steps import MeasuringSteps
from cgx_ray.control.trial.outcome import PendingOutcome, PlanRecord
from cgx_ray.control.trial.steps_beside_predictions import StepsBesidePredictions
from cgx_ray.monitors.sample import NodeSample
from cgx_ray.plan import STEPS_TOGETHER, Option, Plan, spoken
from cgx_ray.planner.bits import bits_of
from cgx_ray.planner.cost import Link
from cgx_ray.planner.planned_group import fixed_groups
from cgx_ray.planner.prediction import Measured
from cgx_ray.units import format_seconds


class WorkerGroupState(GroupReports):
    """All that is known about one worker group; a restart of the workers makes a new object.

    plan        in force
    steps       beside their predictions, and the errors learned from them
    measuring   measuring steps that are under way, else None
    failed      the plan that was disabled last, in words, until the policy is asked what to do instead
    decided     measurements that the policy decided on last, None before the first time
    pending     the last decision until its outcome is measured, else None
    bans        of options
    speed_up    see `StepsBesidePredictions.speed_up`
    loss        trend before and since the last change of options
    """

    def __init__(
        self,
        plan: Plan,
        registration: Registration,
        policy: Policy,
        link: LinkKind,
        gain_ratios: Mapping[str, float],
        learned: Learned | None,
    ) -> None:
        """
        policy                knows which errors by layer it needs, and how it is bound by them
        link                  what lies between the ranks
        gain_ratios, learned  in earlier worker groups, of any size; see `GainWatch`
        """
        super().__init__(registration.layers, plan.world_size)
        self._fixed = fixed_groups(plan, self.layers)
        self.links = RecentLinks()
        self.steps = StepsBesidePredictions(
            self.layers, plan, registration.dense_plan, registration.codec_costs, self.network
        )
        self.measuring: MeasuringSteps | None = None
        self.failed: str | None = None
        self.decided: Measured | None = None
        self.pending: PendingOutcome | None = None
        self.bans, self.loss, self.loss_fall = Bans(), LossTrend(), LossFall()
        known = learned.measured.gain if learned is not None else {}
        self.gains = KnownGains(plan, gain_ratios, known, is_cautious=policy.is_guarded)
        self._codec = policy.codec_by_layer
        self.losses = KnownLosses(self.layers, bits_of(option.codec for option in policy.options), self._codec)
        self._max_error, self._max_period = policy.max_error, policy.max_period
        self._bits = bits_by_layer(plan, self._codec)
        self._registration, self._link, self._changes = registration, link, ComputeChanges()
        # Without them nothing is decided. A plan that stays is compared with dense only.
        self._needs_gains = policy.decides
        # The newest steps, and their number since the link was last forgotten.
        self._recent, self._num_steps = list[JoinedStep](), 0
        # Versions of the plan in force, on trial and permanent, and whether an outcome of it is known.
        self._versions, self._is_judged = {plan.version}, False
        # The policy's last decision: its time, number of network changes, and whether plans follow the link.
        self._decision_s, self._num_changes, self._follows_link = 0.0, 0, True
        self._predicted_s: float | None = None
        self._predicted_dense_s: float | None = None
        self._prediction_error: float | None = None
        self._news: Cause | None = None
        self._slow_s = 0.0
        if learned is not None:
            self._go_on(learned)

    def _go_on(self, learned: Learned) -> None:
        """Start with what was `learned`, scaled to the number of workers."""
        before, num_workers = learned.measured.network, self.plan.world_size
        self.steps.errors, self.bans, self.loss_fall = learned.errors, learned.bans, learned.loss_fall
        if before.num_workers == num_workers:
            self.steps.baseline = learned.baseline
        else:
            # Another number of ranks may share the processors of a node.
            self.steps.errors.compute_slowdown = ComputeSlowdown()
        self.decided = replace(
            learned.measured,
            network=resized(before, num_workers),
            codec_costs=self.steps.codec_costs,
            **self._registration.of_device,
            fixed=self._fixed,
        )

    @property
    def gain_ratios(self) -> Mapping[str, float]:
        return self.gains.ratios

    def learned(self) -> Learned | None:
        """Return what the next worker group shall start with; None before the first measurements."""
        if (known := self.measured() or self.decided) is None:
            return None
        known, own = replace(known, max_period=1), self.steps  # ranks begin together
        return Learned(
            measured=known, errors=own.errors, bans=self.bans, baseline=own.baseline, loss_fall=self.loss_fall
        )

    def note(self, news: str) -> None:
        """Have the policy asked as soon as there are measurements, because of `news`."""
        self._news = Cause("restart", news)

    @property
    def plan(self) -> Plan:
        return self.steps.plan

    def add_report(self, sample: NodeSample, now_s: float) -> bool:
        is_forgotten = super().add_report(sample, now_s)
        if is_forgotten:
            self._recent, self._num_steps = [], 0
        return is_forgotten

    def add_step(self, step: JoinedStep, now_s: float) -> bool:
        """Add a step of all ranks; return whether it ran under the plan in force, so that it may cause a decision."""
        self.network.add_step(step.traffic, now_s, is_far_slower=self._is_far_slower(step))
        self._slow_ranks.add_ratios(step.slowness, step.passed_s)
        self.loss_fall.add_loss(step.loss, step.num_steps)
        self._num_steps += 1
        if self.network.is_known and (link := self.network.link) is not None:
            self.links.add_link(link, step.passed_s)
        if (lease := self.plan.lease) is not None and step.plan_version == lease.fallback.version:
            self._return_to(lease.fallback)
        if step.plan_version not in self._versions or step.num_steps != self.plan.period:
            # Also if ranks do not train alone yet, or have ended a round by hand.
            return False
        if self.plan.period > 1 and self.plan.has_inside and self.decided is not None:
            # Ranks count these sums as compute. The planner adds them to it.
            step = replace(step, compute_s=max(0.0, step.compute_s - self.decided.inside_sum_s))
        same_plan = [one for one in self._recent if one.plan_version in self._versions]
        self._recent = [*same_plan[1 - FEW :], step]
        self.losses.add_step(step, self._bits)
        if step.error_bits is not None and self._max_error is not None:
            text = self.losses.too_large_error(self._bits, self._max_error)
            self._news = Cause("gain", text) if text is not None else self._news
        if self.gains.add_step(step):
            self.loss.restart()  # another learning rate has another trend
        self.loss.add_loss(step.loss, step.num_steps)
        measured = self.measured() or self.decided
        ratio = self.steps.add_step(step, measured)
        self.speed_up = self.steps.speed_up(measured)
        if measured is not None and ratio is not None:
            self._changes.add_step(step.compute_s / self.steps.compute_slowdown, step.passed_s)
        if self.steps.record.num_steps == MAX_STEPS and self.decided is not None and self.measuring is None:
            # Its first steps, those of `end_outcome`, say little.
            self._learn_and_compare(now_s)
        return True

    def _is_far_slower(self, step: JoinedStep) -> bool:
        """Return whether `step` was no hiccup and OBVIOUS times as long as usual: one is enough for another network."""
        is_current = step.plan_version in self._versions
        before = [one.step_s for one in self._recent if (one.plan_version in self._versions) == is_current]
        usual_s = median(before) if len(before) >= FEW else self._predicted_s if is_current else None
        return usual_s is not None and step.step_s >= max(OBVIOUS * usual_s, HICCUP_S)

    @property
    def may_accept(self) -> bool:
        """True if the plan in force is on trial and its outcome is known."""
        return self.plan.lease is not None and self._is_judged and self.measuring is None

    def accept(self) -> Plan:
        """Make the plan in force permanent: return the same under the next version, without a lease."""
        accepted = replace(self.plan, version=self.plan.last_version + 1, lease=None)
        self._versions.add(accepted.version)
        self.steps.plan = accepted
        return accepted

    def _return_to(self, fallback: Plan) -> None:
        """Note that the ranks have returned to the fallback of a lease, as its end came before the outcome."""
        self._news = Cause("trial_expired", f"the lease of plan {self.plan.version} has ended")
        self.counts.add_revert("trial_expired")
        self.pending = self.measuring = None
        self._start_plan(fallback, None)

    def _start_plan(self, plan: Plan, before: PlanRecord | None) -> None:
        """Begin with `plan`. `before`: its steps before measuring steps that end now."""
        is_other = (plan.period, non_dense_options(plan)) != (self.plan.period, non_dense_options(self.plan))
        if is_other and self.measuring is None and before is None:
            self.loss.start_plan()
        self._versions, self._is_judged = {plan.version}, False
        self.steps.start_plan(plan, before, is_measuring=self.measuring is not None)
        self._slow_s = 0.0
        self.gains.start_plan(plan)
        self._bits = bits_by_layer(plan, self._codec)

    def learn(self, now_s: float) -> None:
        """Learn the errors of the plan in force from its steps so far."""
        measured = self.known()
        if self.decided is not None and self._changes.cause(self.decided.compute_s, measured.compute_s):
            self.steps.compute_changed()
        if untimed := self.steps.learn(measured, now_s):
            self._news = Cause("prediction", f"{', '.join(map(spoken, sorted(untimed)))} timed in steps")

    def end_outcome(self, outcome: PendingOutcome, now_s: float) -> None:
        """Learn from an outcome, and note what is another than predicted."""
        self.pending, self._is_judged = None, True
        if self.measuring is not None or self._predicted_s is None:
            return
        self._learn_and_compare(now_s)
        ratio = outcome.step_s / self._predicted_s
        self._prediction_error = ratio - 1
        if not 1 / NOISE < ratio < NOISE:
            took, predicted = format_seconds(outcome.step_s), format_seconds(self._predicted_s)
            text = f"steps took {took} instead of the predicted {predicted}"
            self._news = Cause("prediction", text)

    def _learn_and_compare(self, now_s: float) -> None:
        self.learn(now_s)
        if (step_s := self.steps.beaten_s(self.known(), now_s)) is not None:
            took = format_seconds(step_s)
            self._news = Cause("prediction", f"steps took {took}, more for the same progress than before")

    def slowdown(self) -> Evidence | None:
        """Return the logarithm of the plan's measured seconds per progress over dense; None before FEW steps.

        None too during measuring steps, before the policy has ever decided, and for a plan that was made for a link
        that changes fast: it is not the best one all the time.
        """
        is_judged = self.measuring is None and self.decided is not None and self._follows_link
        record = self.steps.record
        if not is_judged or len(record.window) < FEW or is_dense(self.plan):
            return None
        return self.steps.slowdown(record, self.known())

    def is_slow_for_long(self, slowdown: Evidence) -> bool:
        """Return whether the plan is surely too slow, and has been for SETTLE_S: else the network may be the cause."""
        is_slow = verdict(slowdown, MAX_SLOWDOWN) is Verdict.SLOW
        self._slow_s = self._slow_s + self._recent[-1].passed_s if is_slow else 0.0
        return self._slow_s >= SETTLE_S

    def cause(self, now_s: float, measured: Measured, review_s: float = REVIEW_S) -> Cause | None:
        """Return why to decide now, or None. `review_s`: time after a decision until the next one."""
        if self.decided is None:
            return Cause("first_measurements", "first measurements")
        text = self._link_cause(self.decided.network.between, measured, now_s)
        if text is not None:
            return Cause("network", text)
        if self.pending is not None or self.measuring is not None:
            return None
        if self.failed is not None:
            return Cause("ban", f"{self.failed} failed")
        if (text := loss_cause(self.loss.worse, self.decided, measured, self.plan)) is not None:
            return Cause("loss", text)
        if self._news is not None:
            return self._news
        if (text := self._changes.cause(self.decided.compute_s, measured.compute_s)) is not None:
            return Cause("compute", text)
        if (text := self.gains.cause(self.decided.gain) or period_cause(self.decided, measured, self.plan)) is not None:
            return Cause("gain", text)
        return Cause("review", "regular review") if now_s >= self._decision_s + review_s else None

    def situation(self, cause: str, plan: Plan, measured: Measured, now_s: float) -> Situation:
        """Return the policy's input at `now_s`. `plan`: that in force, or the one before measuring steps."""
        return Situation(
            cause=cause,
            plan=replace(plan, version=self.plan.last_version, lease=None),
            link=self._link,
            planner_input=PlannerInput(
                now=measured,
                states=self.states(measured),
                errors=self.steps.errors,
                dense_groups=self.steps.dense_groups,
                plan_s=self.steps.plan_s(measured, now_s),
            ),
            banned=self.bans.banned(now_s),
        )

    def _link_cause(self, decided: Link, measured: Measured, now_s: float) -> str | None:
        """Return in words how the link differs from the one that was planned for, or None.

        Changes that come faster than plans can follow are one cause, when they begin, and another when they end.
        """
        if self.links.is_unsteady:
            return f"link changes every {self.links.dwell_s:.0f} s" if self._follows_link else None
        if not self._follows_link:
            return "link is steady again"
        now = self.network.unless_guessed(measured.network.between, decided, self._num_changes)
        cause = network_cause(decided, now)
        if cause is not None:
            self.steps.network_changed(measured, now_s, has_steps=self.measured() is not None)
        return cause

    def states(self, measured: Measured) -> list[Measured]:
        """Return what to plan for: `measured`, or with each of the newest links if they change fast."""
        if not self.links.is_unsteady:
            return [measured]
        return [on_link(measured, one) for one in self.links.different()]

    def apply(
        self,
        decision: Decision,
        measured: Measured,
        now_s: float,
        *,
        is_planned: bool,
        ended: MeasuringSteps | None = None,
    ) -> None:
        """Record `decision`, which was made on `measured`, and put its plan in force.

        is_planned  the policy has decided; else what has changed since its last decision remains a reason to ask it
        ended       measuring steps that it returns from; the steps before them count again
        """
        self.gains.acknowledge(measured.gain)
        self._changes.acknowledge()
        plan = self.plan if decision.kind == "keep" else decision.plan
        if plan != self.plan:
            self._start_plan(plan, ended.record if ended is not None else None)
        if decision.kind != "disable":
            self.failed = None
        self._news = None
        if is_planned:
            self.decided, self._decision_s = measured, now_s
            self._follows_link, self._num_changes = not self.links.is_unsteady, self.network.num_changes
        self._predicted_s, self._predicted_dense_s = decision.step_s, decision.dense_s
        self.pending = PendingOutcome(decision=decision)

    def known(self) -> Measured:
        """Return the current measurements, or those of the last decision where some are missing."""
        measured = self.measured() or self.on_link_of_now() or self.decided
        assert measured is not None
        return measured

    def on_link_of_now(self) -> Measured | None:
        """Return the measurements of the last decision on the link of now; None while one of them is missing."""
        if self.decided is None or self._num_steps < FEW:
            return None
        between = self.network.link_after(self.decided.network.between)
        return on_link(replace(self.decided, codec_costs=self.steps.codec_costs), between) if between else None

    def measured(self) -> Measured | None:
        """Return the current measurements for the planner; None while some are missing."""
        recent, between = self._recent, self.network.link
        if any(step.plan_version not in self._versions for step in recent):
            # Before the first step of a new plan, the groups that were measured are those of the plan before.
            return None
        is_long = self.decided is None and bool(recent) and recent[-1].step_s - recent[-1].compute_s >= LONG_S
        if len(recent) < (1 if is_long else FEW) or between is None or (self._needs_gains and not self.gains.gain):
            return None
        inside, device_sums = inside_of(recent[-1].inside)
        backward_s, after_s = compute_times(self.layers, self.plan, recent, self.steps.compute_slowdown, self.decided)
        # A node may say nothing for a moment.
        sizes = max(reversed(recent), key=lambda step: len(step.slowness)).node_sizes
        chooses_bits = self._max_error is not None
        before = self.decided.squared_errors if self.decided is not None else {}
        return Measured(
            layers=self.layers,
            backward_s=backward_s,
            after_s=after_s,
            network=network_of(sizes, between, inside, device_sums=device_sums),
            codec_costs=self.steps.codec_costs,
            gain=self.losses.gain | self.gains.usable if chooses_bits else self.gains.usable,
            **self._registration.of_device,
            fixed=self._fixed,
            layer_errors=self.losses.layer_errors if chooses_bits else {},
            squared_errors=self.losses.squared_errors or before,
            error_excess=self.losses.error_excess,
            max_period=self.max_period,
            loss_fall=self.loss_fall.ratio,
        )

    @property
    def max_period(self) -> int:
        """Longest period that may be chosen."""
        is_settled = self.last_step >= STEPS_TOGETHER and not self.gains.is_learning and self.loss.can_judge
        return self._max_period if is_settled and all(step.may_train_alone for step in self._recent) else 1

    def costly_options(self, measured: Measured, options: Sequence[Option]) -> set[Option]:
        """Return the option in use that keeps the least if the loss has got worse, and those of `options` below it.

        None in rounds, whose period must be shorter from now on. Otherwise forgets the trend: the next plan begins
        another.
        """
        if self.loss.worse is None:
            return set()
        if self.plan.period > 1:
            self._max_period = self.plan.period // 2
            if self._max_period > 1:
                self.loss.keep_before()
            else:
                # What rounds have lost stays lost for a while. It is not the codec's.
                self.loss.restart()
            return set()
        self.loss.restart()
        return costliest(compressing_options(self.plan), options, measured)

    def fallen_options(self, measured: Measured) -> set[Option]:
        """Return the options in use whose efficiency is more than GAIN_CHANGE under that at the last decision.

        A codec whose measured loss counts, not its gain, does not fall with the gain.
        """
        return fallen(non_dense_options(self.plan), self.decided or measured, measured, GAIN_CHANGE)

    def facts(self) -> LoopFacts:
        measured = self.measured() or self.decided
        return replace(
            super().facts(),
            predicted_step_s=self._predicted_s,
            measured_step_s=median(step.step_s for step in self._recent) if self._recent else None,
            predicted_dense_step_s=self._predicted_dense_s,
            dense_step_s=self.steps.dense_s(measured) if measured is not None else None,
            is_dense_measured=measured is not None and self.steps.is_dense_measured(measured),
            prediction_error=self._prediction_error,
            num_banned=len(self.bans.banned(self._now_s)),
        )
