"""The controller's knowledge of one worker group: its plan in force, its measurements and its last decision."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from cgx_ray.control.baseline import DenseBaseline
from cgx_ray.control.changes import SlowRanks
from cgx_ray.control.evidence import MIN_STEPS, Evidence, evidence
from cgx_ray.control.excursion import MAX_SPEEDUP, ComparisonBudget, Excursion, is_worth_comparing
from cgx_ray.control.facts import LoopFacts
from cgx_ray.control.gains import GAIN_CHANGE, GainWatch
from cgx_ray.control.innovation import Innovations
from cgx_ray.control.joined_steps import JoinedStep, StepJoiner
from cgx_ray.control.known_network import KnownNetwork
from cgx_ray.control.learned_errors import LearnedErrors
from cgx_ray.control.measured import at_compute, codecs_in_use, is_dense, layer_times, network_of
from cgx_ray.control.network_change import network_cause
from cgx_ray.control.outcome import PairedStep, PendingOutcome, PlanRecord
from cgx_ray.control.policy import Decision, Disable, Keep, Replace
from cgx_ray.control.recent_links import RecentLinks
from cgx_ray.control.setbacks import Setbacks
from cgx_ray.monitors.sample import NodeSample
from cgx_ray.plan import NONE, CodecSpec, Layer, Plan
from cgx_ray.planner.cost import Link
from cgx_ray.planner.options import FREE, CodecCost
from cgx_ray.planner.prediction import Measured, groups_of, predict

# Steps whose median is measured, and the least number of steps before the first decision: a median needs three.
LINK_STEPS = 3
# Dense steps that are measured before a plan is tried that is less than MAX_SPEEDUP faster.
BASELINE_STEPS = 8
# Time and steps after a decision, both, before the policy is asked again without any other cause. Rare enough to cost
# nothing, frequent enough to follow slow trends.
REVIEW_S, REVIEW_STEPS = 60.0, 20
# Ratio of measured and predicted seconds from which an outcome is a reason to decide anew.
SURPRISE = 1.2
# Least seconds that a codec is taken to need: a clock cannot tell less.
MIN_CODEC_S = 1e-7


class WorkerGroupState:
    """All that is known about one worker group; a restart of the workers makes a new object.

    plan             in force
    dense_plan, dense_groups
                     that the guard compares with and goes back to: the last dense plan
    excursion        that is under way, else None
    failed           the plan that was disabled last, in words, until the policy is asked what to do instead
    decided          measurements that the last decision was made on, None before the first
    pending          the last decision until its outcome is measured, else None
    decision_step, decision_s
                     step after which the last decision was made, and its time
    record           steps under the plan in force
    baseline, errors, setbacks
                     what the steps so far say of dense, of all options, and of those that failed
    trained_s        seconds of all steps
    """

    def __init__(
        self, layers: Sequence[Layer], plan: Plan, dense_plan: Plan, codec_costs: Mapping[str, CodecCost]
    ) -> None:
        """`dense_plan`: compared with until another dense plan is in force."""
        self.layers = tuple(layers)
        self.plan = plan
        self.dense_plan = plan if is_dense(plan) else dense_plan
        self.groups = groups_of(plan, layers)
        self.dense_groups = groups_of(self.dense_plan, layers)
        self.excursion: Excursion | None = None
        self.failed: str | None = None
        self.decided: Measured | None = None
        self.pending: PendingOutcome | None = None
        self.decision_step, self.decision_s = 0, 0.0
        self.record = PlanRecord()
        self.baseline = DenseBaseline()
        self.errors = LearnedErrors()
        self.setbacks = Setbacks()
        self.network = KnownNetwork()
        self.links = RecentLinks()
        self.gains = GainWatch(map(str, codecs_in_use(plan)))
        self.trained_s = 0.0
        self._codec_costs = dict(codec_costs)
        self._joiner = StepJoiner(plan.world_size)
        self._slow_ranks = SlowRanks(plan.world_size)
        self._recent: list[JoinedStep] = []
        self._predicted_s: float | None = None
        self._comparisons = ComparisonBudget()
        self._news: str | None = None
        self._innovations = Innovations()
        self._follows_link = True
        self._switch_s: list[float] = []

    def add_report(self, sample: NodeSample, now_s: float) -> list[JoinedStep]:
        """Add a node's report; return the steps that it completes, oldest first. Give each of them to `add_step`."""
        if self.network.add_report(sample, now_s):
            self._recent = []
        return self._joiner.add(sample.steps)

    def add_step(self, step: JoinedStep, now_s: float) -> bool:
        """Add a step of all ranks; return whether it ran under the plan in force, so that it may cause a decision."""
        self.network.add_step(step.traffic, now_s)
        self._slow_ranks.add(step.slowness, step.step_s)
        if step.plan_version != self.plan.version:
            return False
        self.trained_s += step.step_s
        same_plan = [one for one in self._recent if one.plan_version == step.plan_version]
        self._recent = [*same_plan[1 - LINK_STEPS :], step]
        self.gains.add(step.gain)
        if self.record.is_warm(step.step_s):
            self._pair(step)
        return True

    def _pair(self, step: JoinedStep) -> None:
        """Compare a warm step with its predictions."""
        measured = self.measured() or self.decided
        if measured is None or min(step.compute_s, measured.compute_s) <= 0:
            return
        own = at_compute(measured, step.compute_s)
        predicted = predict(own, self.groups)
        log_ratio = math.log(step.step_s / predicted.step_s)
        over_dense = 0.0
        if predicted.is_dense:
            self.baseline.add(log_ratio, measured.network.between)
        else:
            score = step.step_s / (predicted.efficiency or 1.0)
            over_dense = math.log(score / predict(own, self.dense_groups).step_s)
        self.record.window.append(PairedStep(step.step_s, step.codec_s, log_ratio, over_dense))
        self._innovations.add(step.compute_s, math.exp(log_ratio), step.step_s)
        self.links.add(measured.network.between, step.step_s)

    def learn(self, now_s: float) -> None:
        """Learn the errors of the plan in force from its steps so far."""
        window, measured = self.record.window, self.measured() or self.decided
        if len(window) < MIN_STEPS or measured is None:
            return
        self.errors.forget_old(now_s)
        before = predict(measured, self.groups)
        codec_s = median(step.codec_s for step in window)
        if before.codec_s > 0 and codec_s > 0 and not is_dense(self.plan):
            self.errors.learn_codecs(codecs_in_use(self.plan), codec_s / before.codec_s)
            corrected = replace(measured, codec_costs=self.errors.corrected(self._codec_costs))
            self._innovations.restart_ratio()
            self.record.shift(math.log(predict(corrected, self.groups).step_s / before.step_s))
        self.errors.learn_step(self.groups, evidence([step.over_plan for step in window]).mean, len(window), now_s)

    def learn_trial(self, codec: CodecSpec) -> None:
        """Learn the times of `codec` from the steps of an excursion with one layer under it."""
        measured = self.known()
        costs = {**measured.codec_costs, str(codec): FREE}
        others_s = predict(replace(measured, codec_costs=costs), self.groups).codec_s
        told_s = predict(measured, self.groups).codec_s - others_s
        codec_s = median(step.codec_s for step in self.record.window) - others_s
        if told_s > 0:
            self.errors.learn_codecs([codec], max(codec_s, MIN_CODEC_S) / told_s)

    def end_outcome(self, outcome: PendingOutcome, now_s: float) -> None:
        """Learn from an outcome, and note what is another than predicted."""
        self.pending = None
        predicted_s = self._predicted_s
        if self.excursion is not None or predicted_s is None:
            return
        if isinstance(outcome.decision, Replace) and self.record.window:
            self._switch_s = [*self._switch_s[-4:], self.record.switch_s]
        untimed = {codec for codec in codecs_in_use(self.plan) if not self.errors.is_timed(codec)} - {NONE}
        self.learn(now_s)
        if not 1 / SURPRISE < outcome.step_s / predicted_s < SURPRISE:
            self._news = f"a step took {outcome.step_s:.3f} s, predicted {predicted_s:.3f} s"
        elif untimed:
            self._news = f"{', '.join(sorted(map(str, untimed)))} timed in steps"

    def slowdown(self) -> Evidence | None:
        """Return the logarithm of the plan's measured seconds per progress over dense; None before MIN_STEPS steps.

        None too for a plan that was made for a link that changes fast: it is not the best one all the time.
        """
        if len(self.record.window) < MIN_STEPS or is_dense(self.plan) or not self._follows_link:
            return None
        return self.slowdown_of(self.record)

    def slowdown_of(self, record: PlanRecord) -> Evidence:
        return evidence([step.over_dense for step in record.window]).less(self._dense)

    @property
    def _dense(self) -> Evidence:
        return self.baseline.on(self.known().network.between)

    def dense_s(self, measured: Measured) -> float:
        """Return the seconds of a dense step under `measured`."""
        return math.exp(self._dense.mean) * predict(measured, self.dense_groups).step_s

    def grants_comparison(self, slowdown: Evidence) -> bool:
        """Return whether to compare the plan with dense now, and count the time that this takes."""
        window = self.record.window
        # A step unlike the others: something is changing, and the policy will soon be asked.
        usual = median(step.over_plan for step in window)
        if abs(window[-1].over_plan - usual) > math.log(SURPRISE):
            return False
        if not is_worth_comparing(slowdown, self._dense, len(window)):
            return False
        step_s = median(step.step_s for step in window)
        return self._comparisons.grant(slowdown, self.record, step_s, self.trained_s)

    def needs_dense_steps(self, decision: Decision) -> bool:
        """Return whether dense is known from too few steps to judge `decision` by, and little is lost by more."""
        if not is_dense(self.plan) or self.baseline.num_steps >= BASELINE_STEPS:
            return False
        return self.dense_s(self.known()) < MAX_SPEEDUP * decision.predicted.score

    def cause(self, step: int, now_s: float, measured: Measured) -> str | None:
        """Return in words why to decide after `step`, or None."""
        if self.excursion is not None:
            return None
        if self.decided is None:
            return "first measurements"
        cause = self._link_cause(self.decided.network.between, measured.network.between)
        if cause is not None:
            return cause
        if self.pending is not None:
            return None
        if self.failed is not None:
            return f"{self.failed} failed"
        cause = self._news or self._innovations.cause(self.decided.compute_s, measured.compute_s)
        cause = cause or self.gains.cause(self.decided.gain)
        is_due = now_s >= self.decision_s + REVIEW_S and step >= self.decision_step + REVIEW_STEPS
        return cause if cause is not None or not is_due else "regular review"

    def _link_cause(self, decided: Link, now: Link) -> str | None:
        """Return in words how the link differs from the one that was planned for, or None.

        Changes that come faster than plans can follow are one cause, when they begin, and another when they end.
        """
        if self.links.is_unsteady:
            return f"link changes every {self.links.dwell_s:.0f} s" if self._follows_link else None
        if not self._follows_link:
            return "link is steady again"
        cause = network_cause(decided, now)
        if cause is not None:
            self.setbacks.network_changed()
            self.record.window.clear()
        return cause

    def states(self, measured: Measured) -> list[Measured]:
        """Return what to plan for: `measured`, or with each link of the last minute if it changes fast."""
        if not self.links.is_unsteady:
            return [measured]
        return [replace(measured, network=replace(measured.network, between=one)) for one in self.links.different()]

    @property
    def switch_s(self) -> float:
        """Seconds that a change of plan takes, by those so far; one step before the first."""
        return median(self._switch_s or [step.step_s for step in self._recent])

    def apply(
        self,
        decision: Decision,
        measured: Measured,
        step: int,
        now_s: float,
        *,
        is_planned: bool,
        ended: Excursion | None = None,
    ) -> None:
        """Record `decision`, which was made after `step` on `measured`, and put its plan in force.

        is_planned  the policy has decided; else what has changed since its last decision remains a reason to ask it
        ended       the excursion that it returns from; the steps before it count again
        """
        self.gains.acknowledge()
        plan = self.plan if isinstance(decision, Keep) else decision.plan
        is_other_plan = plan != self.plan
        self._innovations.acknowledge()
        if is_other_plan:
            self.plan = plan
            self.groups = groups_of(self.plan, self.layers)
            self._innovations.restart_ratio()
            if ended is None and self.excursion is None:
                self._comparisons.start_plan()
            self.record = PlanRecord(window=ended.record.window) if ended is not None else PlanRecord()
            self.gains.start_plan(map(str, codecs_in_use(self.plan)))
        if is_dense(self.plan):
            self.dense_plan, self.dense_groups = self.plan, self.groups
        if not isinstance(decision, Disable):
            self.failed = None
        self._news = None
        if is_planned:
            self.decided, self.decision_step, self.decision_s = measured, step, now_s
            self._follows_link = not self.links.is_unsteady
        self._predicted_s = self.errors.factor(self.groups) * decision.predicted.step_s
        self.pending = PendingOutcome(decision=decision)

    def known(self) -> Measured:
        """Return the current measurements, or those of the last decision where some are missing."""
        measured = self.measured() or self.decided
        assert measured is not None
        return measured

    def measured(self) -> Measured | None:
        """Return the current measurements in the planner's terms; None while some are missing."""
        recent, rate = self._recent, self.network.bandwidth
        if len(recent) < LINK_STEPS or rate is None or not self.gains.gain:
            return None
        between = Link(alpha_s=self.network.latency_s or self.network.probed_s, beta_s_per_byte=1 / rate.value)
        ready_s = [median(times) for times in zip(*(one.ready_s for one in recent), strict=True)]
        backward_s = layer_times(self.layers, self.plan, ready_s)
        return Measured(
            layers=self.layers,
            backward_s=backward_s,
            after_s=max(0.0, median(one.compute_s for one in recent) - sum(backward_s)),
            network=network_of(self.plan.world_size, recent[-1].num_local, between),
            codec_costs=self.errors.corrected(self._codec_costs),
            gain=self.gains.gain,
        )

    def fallen_codecs(self, measured: Measured) -> set[CodecSpec]:
        """Return the codecs in use whose gain is more than GAIN_CHANGE under the one that the plan was chosen on."""
        before = self.decided.gain if self.decided is not None else {}
        return {
            codec
            for codec in codecs_in_use(self.plan)
            if measured.gain.get(str(codec), math.inf) < before.get(str(codec), 0.0) - GAIN_CHANGE
        }

    def facts(self) -> LoopFacts:
        return LoopFacts(
            bandwidth=self.network.bandwidth,
            latency_s=self.network.latency_s,
            num_link_changes=self.network.num_changes,
            slow_link_bits_per_s={rank: 8 * rate for rank, rate in self.network.slow.items()},
            slow_ranks=self._slow_ranks.ranks,
            silent_nodes=self.network.silent_nodes,
            predicted_step_s=self._predicted_s,
            measured_step_s=median(step.step_s for step in self._recent) if self._recent else None,
        )
