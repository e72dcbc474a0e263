"""Measured beside predicted seconds: evidence of the steps so far for the plan in force, dense and all options."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import takewhile
from statistics import median

from cgx_ray.control.gains.gain_watch import MIN_GAIN
from cgx_ray.control.joined_steps import JoinedStep
from cgx_ray.control.learned.compute_slowdown import SideBySide
from cgx_ray.control.learned.evidence import MAX_STEPS, Evidence, evidence
from cgx_ray.control.learned.learned_errors import LearnedErrors
from cgx_ray.control.learned.measured import at_compute, is_dense, non_dense_options, on_link, timed_options
from cgx_ray.control.learned.plan_times import PlanTimes
from cgx_ray.control.network.changes import network_cause
from cgx_ray.control.network.estimate import FEW, NOISE
from cgx_ray.control.network.known_network import KnownNetwork
from cgx_ray.control.policies.policy import MIN_IMPROVEMENT
from cgx_ray.control.trial.measuring_steps import is_worth_comparing
from cgx_ray.control.trial.outcome import PairedStep, PlanRecord
from cgx_ray.plan import CodecSpec, Layer, Option, Plan
from cgx_ray.planner.candidates import FREE, CodecCost, CodecCosts
from cgx_ray.planner.cost import Link
from cgx_ray.planner.planned_group import PlannedGroup, groups_of, period_of
from cgx_ray.planner.prediction import Measured, predict

# Least seconds that a codec is taken to need: a clock cannot measure less.
MIN_CODEC_S = 1e-7


class DenseBaseline:
    """Logarithm of measured over predicted seconds of the newest dense steps, all on one network.

    link         on which they were predicted, None before the first one
    num_changes  of the network until the newest of them
    """

    def __init__(self) -> None:
        self._logs: deque[float] = deque(maxlen=MAX_STEPS)
        self.link: Link | None = None
        self.num_changes = 0

    @property
    def num_steps(self) -> int:
        return len(self._logs)

    def add_step(self, log_ratio: float, link: Link, num_changes: int) -> None:
        """Add a dense step on `link`; forget those on another network."""
        if not self.is_of(link):
            self._logs.clear()
            self.link = link
        self.num_changes = num_changes
        self._logs.append(log_ratio)

    def is_of(self, link: Link) -> bool:
        """Return whether the steps were on `link`, as far as plans are concerned."""
        return self.link is not None and network_cause(self.link, link) is None

    def on(self, link: Link) -> Evidence:
        """Return what is known of dense steps on `link`.

        The model errs by NOISE without any dense step, and on another network than the one that they were measured on.
        """
        if self.link is None:
            return Evidence(0.0, math.log(NOISE))
        found = evidence(self._logs)
        return found if self.is_of(link) else found.also(math.log(NOISE))


class StepsBesidePredictions:
    """The steps so far beside their predictions, and what was learned from them.

    plan          in force
    dense_plan    that plans are compared with: that of DDP
    dense_groups  those of `dense_plan`
    record        steps under the plan in force
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        plan: Plan,
        dense_plan: Plan,
        calibrated_costs: CodecCosts,
        network: KnownNetwork,
    ) -> None:
        """
        calibrated_costs  codec times as they were measured before training
        network           says which links are guesses
        """
        self.layers = tuple(layers)
        self._network = network
        self.dense_plan = dense_plan
        self.baseline = DenseBaseline()
        self.errors = LearnedErrors()
        self.plan_times = PlanTimes(network)
        self.dense_groups = groups_of(dense_plan, layers)
        self._calibrated_costs = dict(calibrated_costs)
        # Comparisons of the plan in force with dense.
        self._num_comparisons = 0
        # Options of the plan that dense steps are compared with: that in force, or the last one before it.
        self._options: frozenset[Option] = frozenset()
        # Options by which compute is slowed under the plan in force; None: compute is that of dense steps.
        self._slowing: frozenset[Option] | None = None
        self._sides = SideBySide()
        # Whether the slowdown of compute has changed since the steps of the plan with `_options` were paired.
        self.has_old_pairs = False
        self.start_plan(plan, None, is_measuring=False)

    @property
    def codec_costs(self) -> dict[str, CodecCost]:
        """Codec times as they are in steps."""
        return self.errors.corrected(self._calibrated_costs)

    def start_plan(self, plan: Plan, before: PlanRecord | None, *, is_measuring: bool) -> None:
        """Begin with `plan`. `before`: its steps before measuring steps that end now."""
        self.plan, self._groups = plan, groups_of(plan, self.layers)
        self._is_known_beaten = False
        if before is None and not is_measuring:
            self._num_comparisons = 0
        # Measuring steps under another plan than dense have one layer with a codec, which says little of compute.
        self._is_trial = is_measuring and not is_dense(plan)
        if not self._is_trial:
            self._sides.start_plan(is_dense=is_dense(plan), is_new=before is None)
            self._slowing = None if is_dense(plan) else non_dense_options(plan)
            self._options = self._slowing or self._options
        self.record = PlanRecord(window=before.window) if before is not None else PlanRecord()

    @property
    def compute_slowdown(self) -> float:
        """Compute of steps under the plan in force over that of dense steps."""
        return 1.0 if self._slowing is None else math.exp(self.errors.compute_slowdown.under(self._slowing).mean)

    def add_step(self, step: JoinedStep, measured: Measured | None) -> float | None:
        """Compare a step with the predictions under `measured`; return measured over predicted seconds.

        None for a step that warms the plan up, or without measurements.
        """
        is_warm = self.record.add_step()
        if is_warm and step.compute_s > 0 and not self._is_trial:
            self._learn_compute_slowdown(step.compute_s)
        if not is_warm or measured is None or min(step.step_s, step.compute_s, measured.compute_s) <= 0:
            return None
        paired = self._paired(step, measured)
        self.record.window.append(paired)
        if is_dense(self.plan):
            as_ran = self._as_dense_ran(measured)
            over_plan = (paired if as_ran is measured else self._paired(step, as_ran)).over_plan
            self.baseline.add_step(over_plan, as_ran.network.between, self._network.num_changes)
        if self.has_old_pairs and self._slowing is not None and not self._is_trial:
            self.record.window = deque((self._paired(one, measured) for one in self.record.window), maxlen=MAX_STEPS)
            self.has_old_pairs = False
        return math.exp(self.record.window[-1].over_plan)

    def _paired(self, step: JoinedStep | PairedStep, measured: Measured) -> PairedStep:
        """Return `step` beside the predictions under `measured` for its own compute."""
        own = at_compute(measured, step.compute_s / self.compute_slowdown)
        predicted = predict(own, self._groups)
        over_plan, over_dense, kept = math.log(step.step_s / predicted.step_s), 0.0, 1.0
        if not predicted.is_dense:
            # Errors by layer may say that the plan in force keeps nothing.
            kept = 1.0 if predicted.efficiency is None else max(predicted.efficiency, MIN_GAIN)
            over_dense = math.log(step.step_s / kept / predict(self._as_dense_ran(own), self.dense_groups).step_s)
        return PairedStep(step.step_s, step.compute_s, step.codec_s, over_plan, over_dense, math.log(kept))

    def _learn_compute_slowdown(self, compute_s: float) -> None:
        """Add a step's compute; compare dense steps with others once there are enough of both."""
        both = self._sides.add_step(compute_s)
        if both is not None:
            before = self.errors.compute_slowdown.under(self._options)
            self.errors.compute_slowdown.add_comparison(self._options, *both)
            self.has_old_pairs |= self.errors.compute_slowdown.under(self._options).mean != before.mean

    def network_changed(self, measured: Measured, now_s: float, *, has_steps: bool = True) -> None:
        """Forget what was learned in the last seconds, while predictions were made for the network before.

        measured   on the network of now. The newest steps that took about as long as the last one had it too
        has_steps  the plan has run on it: else its steps are those of a time before
        """
        self.errors.network_changed(now_s)
        self.plan_times.undo(now_s)
        window = self.record.window
        alike = [*takewhile(lambda one: 1 / NOISE < one.step_s / window[-1].step_s < NOISE, reversed(window))]
        window.clear()
        if has_steps and len(alike) >= FEW:
            self._note_plan(alike, measured, now_s)

    def compute_changed(self) -> None:
        """Keep the newest steps only: those before had another compute."""
        self.record.window = deque([*self.record.window][-FEW:], maxlen=MAX_STEPS)

    def _note_plan(self, steps: Iterable[PairedStep], measured: Measured, now_s: float) -> None:
        """Note how long `steps` took beyond their compute. `DenseBaseline` knows it of dense."""
        if not is_dense(self.plan):
            exposed_s = median(step.step_s - step.compute_s for step in steps)
            self.plan_times.add_steps(self._groups, exposed_s, self.compute_slowdown, measured, now_s)

    def learn(self, measured: Measured, now_s: float) -> list[str]:
        """Learn the errors of the plan in force; return the codecs that were never timed in steps before.

        A codec on a GPU is another one than on the host, see `Measured.cost_name`. No step times it, since the host
        does not wait for it: its times stay as calibrated, and what they lack is an error of its options.
        """
        window = self.record.window
        # All plans are compared with dense, so a single dense step counts.
        if len(window) < (1 if is_dense(self.plan) else FEW):
            return []
        self.errors.forget_old(now_s)
        before = predict(measured, self._groups)
        codec_s = median(step.codec_s for step in window)
        codecs = {measured.cost_name(option) for option in timed_options(self.plan)}
        if any(measured.is_untimed(option) for option in timed_options(self.plan)):
            codecs = set()
        untimed = [codec for codec in codecs if not self.errors.is_timed(codec)]
        # Without a GPU these codecs take all of it.
        others_s = self._others_s(measured, codecs) if measured.bus is not None else 0.0
        predicted_s, took_s = before.codec_s - others_s, codec_s - others_s
        if predicted_s > 0 and codec_s > 0 and codecs:
            self.errors.learn_codecs(codecs, max(took_s, MIN_CODEC_S) / predicted_s)
            corrected = predict(replace(measured, codec_costs=self.codec_costs), self._groups)
            self.record.shift(math.log(corrected.step_s / before.step_s))
        self._note_plan(window, measured, now_s)
        self.errors.learn_step(self._groups, evidence([step.over_plan for step in window]).mean, now_s)
        return untimed

    def _others_s(self, measured: Measured, codecs: Collection[str]) -> float:
        """Return the predicted seconds of all codecs but `codecs`, and of copies between a GPU and the host."""
        free = {**measured.codec_costs, **dict.fromkeys(codecs, FREE)}
        return predict(replace(measured, codec_costs=free), self._groups).codec_s

    def learn_trial(self, codec: CodecSpec, measured: Measured) -> None:
        """Learn the times of `codec` from measuring steps with one layer under it."""
        others_s = self._others_s(measured, [str(codec)])
        predicted_s = predict(measured, self._groups).codec_s - others_s
        codec_s = median(step.codec_s for step in self.record.window) - others_s
        if predicted_s > 0:
            self.errors.learn_codecs([str(codec)], max(codec_s, MIN_CODEC_S) / predicted_s)

    def plan_s(self, measured: Measured, now_s: float) -> dict[tuple[PlannedGroup, ...], float]:
        """Return the seconds of a step of plans that ran: measured where conditions were like these; where they were
        better or worse, predicted within what it took."""
        return {
            groups: bounds.clamp(self.errors.step_s(predict(measured, groups)))
            for groups, bounds in self.plan_times.on(measured, now_s).items()
        }

    def beaten_s(self, measured: Measured, now_s: float) -> float | None:
        """Return the seconds of a step of the plan in force if another plan took MIN_IMPROVEMENT less for the same
        progress, under these conditions or worse ones. None if not, or if it was told of this plan before."""
        bounds = self.plan_times.on(measured, now_s)
        own = bounds.get(self._groups)
        if own is None or not own.is_measured or self._is_known_beaten:
            return None
        pace_s = {
            groups: one.most_s / (predict(measured, groups).efficiency or MIN_GAIN)
            for groups, one in bounds.items()
            if period_of(groups) <= measured.max_period
        }
        own_s = pace_s.get(self._groups)
        self._is_known_beaten = own_s is not None and min(pace_s.values()) < (1 - MIN_IMPROVEMENT) * own_s
        return own.most_s if self._is_known_beaten else None

    def _as_dense_ran(self, measured: Measured) -> Measured:
        """Return `measured` on the link that dense steps were predicted on, where only a guess differs from it.

        Else what they took would count as predicted, by a guess that is up to 3x too slow or too fast.
        """
        now, before = measured.network.between, self.baseline.link
        link = self._network.unless_guessed(now, before, self.baseline.num_changes) if before is not None else now
        return measured if link == now else on_link(measured, link)

    def _dense(self, measured: Measured) -> Evidence:
        """Return what is known of dense steps under `measured`."""
        return self.baseline.on(self._as_dense_ran(measured).network.between)

    def is_dense_measured(self, measured: Measured) -> bool:
        """Return whether dense steps were measured on the network of `measured`."""
        return self.baseline.is_of(self._as_dense_ran(measured).network.between)

    def dense_s(self, measured: Measured) -> float:
        """Return the seconds of a dense step under `measured`."""
        predicted = predict(self._as_dense_ran(measured), self.dense_groups)
        return math.exp(self._dense(measured).mean) * predicted.step_s

    def slowdown(self, record: PlanRecord, measured: Measured) -> Evidence:
        """Return the logarithm of the seconds per progress in `record` over those of dense."""
        return evidence([step.over_dense for step in record.window]).less(self._dense_error(measured))

    def speed_up(self, measured: Measured | None) -> float | None:
        """Return the seconds of a dense step over those of a step under the plan in force, None if unknown; 1 if dense.

        The only source of that number. It is the median over the newest steps, each beside a dense step with its own
        compute, as predicted and then corrected by measured dense steps. Neither has the time between steps.
        """
        if is_dense(self.plan):
            return 1.0
        if measured is None or not self.record.window:
            return None
        slower = median(step.over_dense + step.log_kept for step in self.record.window)
        return math.exp(self._dense(measured).mean - slower)

    def _dense_error(self, measured: Measured) -> Evidence:
        """Return the error of dense predictions beside the plan with `_options`; more dense steps make it smaller."""
        return self._dense(measured).also(self.errors.compute_slowdown.under(self._options).error)

    def grants_comparison(self, slowdown: Evidence, measured: Measured) -> bool:
        """Return whether to compare the plan with dense now, and count it.

        After a comparison without a verdict, twice as many new steps are waited for each time: so all of them together
        take little time.
        """
        window = self.record.window
        # A step unlike the others: something is changing, and the policy will soon be asked.
        if abs(window[-1].over_plan - median(step.over_plan for step in window)) > math.log(NOISE):
            return False
        if not is_worth_comparing(slowdown, self._dense_error(measured), len(window)):
            return False
        if self._num_comparisons and self.record.num_steps < MAX_STEPS * 2 ** (self._num_comparisons - 1):
            return False
        self._num_comparisons += 1
        return True
