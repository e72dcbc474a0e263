"""The control loop: samples in, decisions out. No Ray and no clock of its own, so tests can step it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from cgx_ray.control.journal import Journal
from cgx_ray.control.measured import (
    compressing,
    describe_measured,
    describe_plan,
    is_dense,
    layer_times,
    network_of,
    slowed,
)
from cgx_ray.control.policy import MAX_SLOWDOWN, Decision, Disable, Keep, Policy, Replace, View
from cgx_ray.control.view import JoinedStep, StepBook
from cgx_ray.monitors.changes import SlowRanks
from cgx_ray.monitors.passive import PassiveLink
from cgx_ray.monitors.sample import NodeSample
from cgx_ray.plan import Layer, Plan, make_plan
from cgx_ray.planner.cost import Link
from cgx_ray.planner.options import CodecCost, Option
from cgx_ray.planner.prediction import Measured, Prediction, groups_of, predict

# Steps of a plan before it is judged; the first one still has cold buffers.
WARM_UP_STEPS = 1
JUDGED_STEPS = 4
LINK_STEPS = 3
REVIEW_STEPS = 100
BAN_STEPS = 500
# What counts as another network, and as another gradient.
LINK_CHANGE = 1.5
GAIN_CHANGE = 0.1
LATENCY_CHANGE = 2.0
MIN_LATENCY_CHANGE_S = 1e-3
# Between workers of one host nobody measures latency: a loopback round trip.
DEFAULT_LATENCY_S = 50e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFacts:
    """What is known at the moment, for metrics; None if not yet.

    bandwidth_error   half the width of its 95 % interval, as a share of it
    slow_link_bits_per_s, slow_ranks
                      ranks whose link, or whose compute, is much slower than the others'
    """

    bandwidth_bits_per_s: float | None
    bandwidth_error: float | None
    latency_s: float | None
    num_link_changes: int
    slow_link_bits_per_s: Mapping[int, float]
    slow_ranks: frozenset[int]
    predicted_step_s: float | None
    measured_step_s: float | None


@dataclass(slots=True, kw_only=True)
class _Trial:
    """A decision whose prediction has not met reality yet."""

    decision: Decision
    options: frozenset[Option]
    steps: list[JoinedStep]


class ControlLoop:
    """Decides for one run. `plans` holds every plan so far, the newest last."""

    def __init__(
        self,
        policy: Policy,
        journal: Journal,
        *,
        group_bytes: int,
        layers: Sequence[Layer] = (),
        plans: Sequence[Plan] = (),
    ) -> None:
        """`layers` and `plans` are those of the run before its workers were restarted."""
        self._policy = policy
        self._journal = journal
        self._group_bytes = group_bytes
        self.layers = tuple(layers)
        self.plans = list(plans)
        self.is_registered = False

    def register(self, layers: Sequence[Layer], first_plan: Plan, codec_costs: Mapping[str, CodecCost]) -> Plan:
        """A group of workers starts, the first or one after a restart; returns the plan to start with.

        That is the newest plan if it still fits, else `first_plan` under the next version.
        """
        fits = bool(self.plans) and self.layers == tuple(layers) and self.plans[-1].world_size == first_plan.world_size
        if not fits:
            version = self.plans[-1].version + 1 if self.plans else first_plan.version
            self.plans.append(replace(first_plan, version=version))
        self._num_earlier = len(self.plans) - 1
        self.is_registered = True
        self.layers = tuple(layers)
        self._codec_costs = dict(codec_costs)
        self._codec_slowdown = 1.0
        self._book = StepBook(first_plan.world_size)
        self._recent: list[JoinedStep] = []
        self._link = PassiveLink()
        self._slow_ranks = SlowRanks(first_plan.world_size)
        self._probed_s = DEFAULT_LATENCY_S
        self._probed_of_node: dict[str, float] = {}
        self._gain: dict[str, float] = {}
        self._decided: Measured | None = None
        self._first_step: int | None = None
        self._decided_step = 0
        self._trial: _Trial | None = None
        self._predicted_s: float | None = None
        self._dense_s: tuple[float, float] | None = None
        self._banned: dict[Option, int] = {}
        return self.plans[-1]

    def observe(self, sample: NodeSample) -> list[Decision]:
        """Take in a report of one node; returns the decisions it led to, already journalled."""
        if not self.is_registered:
            return []
        self._probed_of_node[sample.node_id] = median(sample.latency_s.values()) if sample.latency_s else 0.0
        known = [latency for latency in self._probed_of_node.values() if latency > 0]
        probed_s = median(known) if known else DEFAULT_LATENCY_S
        if _latency_moved(self._probed_s, probed_s) and self._link.latency_s is None:
            # Exchanges from before the change would be read with the wrong latency.
            self._recent = []
            self._link = PassiveLink()
        self._probed_s = probed_s
        decisions = []
        for step in self._book.add(sample.steps):
            self._link.add(step.seen, self._probed_s)
            self._slow_ranks.add(step.slowness, step.step_s)
            self._gain.update({codec: gain for codec, gain in step.gain.items() if gain > 0})
            if step.plan_version != self.plans[-1].version:
                continue
            self._first_step = step.step if self._first_step is None else self._first_step
            self._recent = [one for one in self._recent if one.plan_version == step.plan_version][1 - LINK_STEPS :]
            self._recent.append(step)
            decision = self._judge(step, sample.time_s) or self._decide(step, sample.time_s)
            if decision is not None:
                decisions.append(decision)
        return decisions

    def facts(self) -> LoopFacts:
        """The network now, predicted and measured step time under the plan in force."""
        rate, latency = self._link.bandwidth, self._link.latency_s
        return LoopFacts(
            bandwidth_bits_per_s=8 * rate.value if rate is not None else None,
            bandwidth_error=(rate.high - rate.low) / (2 * rate.value) if rate is not None else None,
            latency_s=latency.value if latency is not None else None,
            num_link_changes=self._link.num_changes,
            slow_link_bits_per_s={rank: 8 * rate for rank, rate in self._link.slow.items()},
            slow_ranks=self._slow_ranks.ranks,
            predicted_step_s=self._predicted_s,
            measured_step_s=median(step.step_s for step in self._recent) if self._recent else None,
        )

    def _decide(self, step: JoinedStep, now_s: float) -> Decision | None:
        measured = self._measured()
        cause = self._cause(step, measured) if measured is not None else None
        if measured is None or cause is None:
            return None
        self._banned = {option: until for option, until in self._banned.items() if until > step.step}
        decision = self._policy.decide(
            View(cause=cause, plan=self.plans[-1], measured=measured, banned=frozenset(self._banned))
        )
        if isinstance(decision, Replace):
            # Its gain is only known while it is used: unused, the estimate would bring it straight back.
            self._banned |= dict.fromkeys(self._fallen(measured), step.step + BAN_STEPS)
        if decision is not None:
            self._act(decision, step, measured, now_s)
        return decision

    def _act(self, decision: Decision, step: JoinedStep, measured: Measured, now_s: float) -> None:
        old = self.plans[-1]
        # The first step has cold buffers and caches, the second may: in doubt for dense, as the promise is.
        warm = [one.step_s for one in self._recent if one.step != self._first_step]
        if is_dense(old) and warm:
            self._dense_s = (min(warm), measured.network.between.beta_s_per_byte)
        if not isinstance(decision, Keep):
            self.plans.append(decision.plan)
        new = self.plans[-1]
        self._decided, self._decided_step = measured, step.step
        self._predicted_s = decision.predicted.step_s
        self._trial = _Trial(decision=decision, options=compressing(new), steps=[])
        self._journal.write(
            {
                "event": "decision",
                "time": now_s,
                "step": step.step,
                "kind": type(decision).__name__.lower(),
                "old": describe_plan(old),
                "new": describe_plan(new),
                "reason": decision.reason,
                "inputs": describe_measured(measured),
                "predicted_step_s": decision.predicted.step_s,
                "predicted_dense_s": decision.dense_s,
                "bound_by": decision.predicted.bound_by,
            }
        )

    def _judge(self, step: JoinedStep, now_s: float) -> Decision | None:
        """Hold a prediction against what came true, once there is enough of it."""
        trial = self._trial
        if trial is None:
            return None
        trial.steps.append(step)
        if len(trial.steps) < WARM_UP_STEPS + JUDGED_STEPS:
            return None
        self._trial = None
        judged = trial.steps[WARM_UP_STEPS:]
        measured_s = median(one.step_s for one in judged)
        predicted = trial.decision.predicted
        self._journal.write(
            {
                "event": "outcome",
                "time": now_s,
                "step": step.step,
                "version": step.plan_version,
                "applied_step": trial.steps[0].step,
                "predicted_step_s": predicted.step_s,
                "measured_step_s": measured_s,
            }
        )
        if not trial.options:
            return None
        if predicted.codec_s > 0:
            measured_codec_s = median(one.codec_s for one in judged)
            self._codec_slowdown *= min(max(measured_codec_s / predicted.codec_s, 0.5), 4.0)
        return self._keep_promise(trial, step, measured_s, now_s)

    def _keep_promise(self, trial: _Trial, step: JoinedStep, measured_s: float, now_s: float) -> Decision | None:
        measured = self._measured()
        if measured is None:
            return None
        plan, dense = self._dense_plan(measured)
        dense_s, source = dense.step_s, "is predicted to take"
        if self._dense_s is not None:
            seconds, beta = self._dense_s
            if 1 / LINK_CHANGE < measured.network.between.beta_s_per_byte / beta < LINK_CHANGE:
                dense_s, source = seconds, "took"
        if measured_s <= MAX_SLOWDOWN * dense_s:
            return None
        self._banned |= dict.fromkeys(trial.options, step.step + BAN_STEPS)
        decision = Disable(
            plan=plan,
            reason=f"{trial.decision.predicted.describe()} took {measured_s:.3f} s a step, dense {source} "
            f"{dense_s:.3f} s on this network; its options are not tried again for {BAN_STEPS} steps",
            predicted=dense,
            dense_s=dense.step_s,
        )
        self._act(decision, step, measured, now_s)
        return decision

    def _dense_plan(self, measured: Measured) -> tuple[Plan, Prediction]:
        """The last dense plan, whose steps were measured, under the next version."""
        version, world_size = self.plans[-1].version + 1, self.plans[-1].world_size
        last = next((plan for plan in reversed(self.plans[self._num_earlier :]) if is_dense(plan)), None)
        if last is None:
            last = make_plan(self.layers, version=version, world_size=world_size, group_bytes=self._group_bytes)
        return replace(last, version=version), predict(measured, groups_of(last, self.layers))

    def _cause(self, step: JoinedStep, measured: Measured) -> str | None:
        """Why to decide now, or None."""
        if self._trial is not None:
            return None
        if self._decided is None:
            return "first measurements"
        old_s, new_s = self._decided.network.between.alpha_s, measured.network.between.alpha_s
        if _latency_moved(old_s, new_s):
            return f"latency {old_s * 1e3:.1f} -> {new_s * 1e3:.1f} ms"
        old, new = self._decided.network.between.bandwidth_gbps, measured.network.between.bandwidth_gbps
        if not 1 / LINK_CHANGE < new / old < LINK_CHANGE:
            return f"bandwidth {_rate(old)} -> {_rate(new)}"
        for option in self._fallen(measured):
            codec = str(option.codec)
            return f"gain of {codec} {self._decided.gain[codec]:.2f} -> {measured.gain[codec]:.2f}"
        if step.step - self._decided_step >= REVIEW_STEPS:
            return f"{REVIEW_STEPS} steps since the last look"
        return None

    def _fallen(self, measured: Measured) -> list[Option]:
        """Options in use whose codec keeps a good deal less of the gradient than when the plan was chosen."""
        before = self._decided.gain if self._decided is not None else {}
        return [
            option
            for option in sorted(compressing(self.plans[-1]), key=str)
            if (codec := str(option.codec)) in before
            and codec in measured.gain
            and measured.gain[codec] < (1 - GAIN_CHANGE) * before[codec]
        ]

    def _measured(self) -> Measured | None:
        """What is known now, in the planner's terms; None while something is missing."""
        recent, rate, latency = self._recent, self._link.bandwidth, self._link.latency_s
        if len(recent) < LINK_STEPS or rate is None or not self._gain:
            return None
        between = Link(alpha_s=latency.value if latency is not None else self._probed_s, beta_s_per_byte=1 / rate.value)
        ready_s = [median(times) for times in zip(*(one.ready_s for one in recent), strict=True)]
        backward_s = layer_times(self.layers, self.plans[-1], ready_s)
        return Measured(
            layers=self.layers,
            backward_s=backward_s,
            after_s=max(0.0, median(one.compute_s for one in recent) - sum(backward_s)),
            network=network_of(self.plans[-1].world_size, recent[-1].num_local, between),
            codec_costs={name: slowed(cost, self._codec_slowdown) for name, cost in self._codec_costs.items()},
            gain=dict(self._gain),
        )


def _latency_moved(old_s: float, new_s: float) -> bool:
    return abs(new_s - old_s) > MIN_LATENCY_CHANGE_S and not 1 / LATENCY_CHANGE < new_s / old_s < LATENCY_CHANGE


def _rate(gbps: float) -> str:
    return f"{gbps:.2f} Gbit/s" if gbps >= 1 else f"{gbps * 1e3:.0f} Mbit/s"
