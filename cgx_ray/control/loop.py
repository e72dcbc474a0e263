"""The control loop: samples in, decisions out. No Ray and no clock of its own, so tests can step it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from cgx_ray.control.journal import Journal
from cgx_ray.control.policy import MAX_SLOWDOWN, Decision, Disable, Keep, Policy, Replace, View, next_plan, option_of
from cgx_ray.control.view import JoinedStep, StepBook
from cgx_ray.monitors.changes import SlowRanks
from cgx_ray.monitors.passive import Estimate, PassiveLink
from cgx_ray.monitors.probe_schedule import BUDGET_S, ProbeSchedule
from cgx_ray.monitors.sample import NodeSample
from cgx_ray.monitors.topology import SilentNodes
from cgx_ray.plan import CodecSpec, Layer, Plan, Scheme, make_plan
from cgx_ray.planner.cost import Link
from cgx_ray.planner.options import DENSE, CodecCost, GroupSize, Option, StepInputs, estimate

# Steps of a plan before it is judged; the first one still has cold buffers.
WARM_UP_STEPS = 1
JUDGED_STEPS = 4
LINK_STEPS = 3
REVIEW_STEPS = 100
BAN_STEPS = 500
# What a probe has found counts until the next but one may come.
PROBE_HOLDS_S = 2 * BUDGET_S
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
    silent_nodes      ids of nodes that have stopped to answer the others
    """

    bandwidth_bits_per_s: float | None
    bandwidth_error: float | None
    latency_s: float | None
    num_link_changes: int
    slow_link_bits_per_s: Mapping[int, float]
    slow_ranks: frozenset[int]
    silent_nodes: frozenset[str]
    predicted_step_s: float | None
    measured_step_s: float | None


@dataclass(slots=True, kw_only=True)
class _Trial:
    """A decision whose prediction has not met reality yet."""

    decision: Decision
    option: Option
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
        self.is_registered = True
        self.layers = tuple(layers)
        self._layout = _layout(self.layers, self._group_bytes)
        self._codec_costs = dict(codec_costs)
        self._codec_slowdown = 1.0
        self._book = StepBook(first_plan.world_size)
        self._recent: list[JoinedStep] = []
        self._link = PassiveLink()
        self._slow_ranks = SlowRanks(first_plan.world_size)
        self._silent_nodes = SilentNodes()
        self._probed_s = DEFAULT_LATENCY_S
        self._probed_of_node: dict[str, float] = {}
        self._probes = ProbeSchedule()
        self._probed_rates: dict[str, tuple[float, Mapping[str, float]]] = {}
        self._gain: dict[str, float] = {}
        self._decided: StepInputs | None = None
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
        self._silent_nodes.add(sample.node_id, sample.latency_s)
        self._probed_of_node[sample.node_id] = median(sample.latency_s.values()) if sample.latency_s else 0.0
        if sample.bandwidth:
            self._probed_rates[sample.node_id] = sample.time_s, sample.bandwidth
        elif sample.time_s > self._probed_rates.get(sample.node_id, (math.inf, {}))[0] + PROBE_HOLDS_S:
            del self._probed_rates[sample.node_id]
        known = [latency for latency in self._probed_of_node.values() if latency > 0]
        probed_s = median(known) if known else DEFAULT_LATENCY_S
        if _latency_moved(self._probed_s, probed_s) and self._link.latency_s is None:
            # Exchanges from before the change would be read with the wrong latency.
            self._recent = []
            self._link = PassiveLink()
        self._probed_s = probed_s
        decisions = []
        for step in self._book.add(sample.steps):
            num_changes = self._link.num_changes
            self._link.add(step.seen, self._probed_s)
            if self._link.num_changes > num_changes:
                self._probed_rates.clear()
            self._slow_ranks.add(step.slowness, step.step_s)
            self._gain.update({codec: gain for codec, gain in step.gain.items() if gain > 0})
            if step.plan_version != self.plans[-1].version:
                continue
            self._recent = [one for one in self._recent if one.plan_version == step.plan_version][1 - LINK_STEPS :]
            self._recent.append(step)
            decision = self._judge(step, sample.time_s) or self._decide(step, sample.time_s)
            if decision is not None:
                decisions.append(decision)
        return decisions

    def next_probe(self, node_id: str, now_s: float) -> str | None:
        """The node that `node_id` is to probe now, or None: messages tell enough, or it is not its turn.

        now_s  by this process's clock
        """
        if not self.is_registered or _is_sure(self._link.bandwidth):
            return None
        return self._probes.grant(node_id, self._silent_nodes.known - self._silent_nodes.node_ids, now_s)

    def facts(self) -> LoopFacts:
        """The network now, predicted and measured step time under the plan in force."""
        rate = self._bandwidth()
        return LoopFacts(
            bandwidth_bits_per_s=8 * rate.value if rate is not None else None,
            bandwidth_error=(rate.high - rate.low) / (2 * rate.value) if rate is not None else None,
            latency_s=self._latency_s(),
            num_link_changes=self._link.num_changes,
            slow_link_bits_per_s={rank: 8 * rate for rank, rate in self._link.slow.items()},
            slow_ranks=self._slow_ranks.ranks,
            silent_nodes=self._silent_nodes.node_ids,
            predicted_step_s=self._predicted_s,
            measured_step_s=median(step.step_s for step in self._recent) if self._recent else None,
        )

    def _decide(self, step: JoinedStep, now_s: float) -> Decision | None:
        inputs = self._inputs()
        cause = self._cause(step, inputs) if inputs is not None else None
        if inputs is None or cause is None:
            return None
        self._banned = {option: until for option, until in self._banned.items() if until > step.step}
        view = View(
            cause=cause,
            layers=self.layers,
            plan=self.plans[-1],
            inputs=inputs,
            banned=frozenset(self._banned),
        )
        decision = self._policy.decide(view)
        in_use = option_of(self.plans[-1])
        if isinstance(decision, Replace) and self._gain_fell(inputs, in_use):
            # Its gain is only known while it is used: unused, the estimate would bring it straight back.
            self._banned[in_use] = step.step + BAN_STEPS
        if decision is not None:
            self._act(decision, step, inputs, now_s)
        return decision

    def _act(self, decision: Decision, step: JoinedStep, inputs: StepInputs, now_s: float) -> None:
        old = self.plans[-1]
        if option_of(old) == DENSE:
            self._dense_s = (median(one.step_s for one in self._recent), inputs.link.beta_s_per_byte)
        if not isinstance(decision, Keep):
            self.plans.append(decision.plan)
        new = self.plans[-1]
        self._decided, self._decided_step = inputs, step.step
        self._predicted_s = decision.predicted.step_s
        self._trial = _Trial(decision=decision, option=option_of(new), steps=[])
        self._journal.write(
            {
                "event": "decision",
                "time": now_s,
                "step": step.step,
                "kind": type(decision).__name__.lower(),
                "old": {"version": old.version, "plan": old.describe()},
                "new": {"version": new.version, "plan": new.describe()},
                "reason": decision.reason,
                "inputs": describe_inputs(inputs),
                "predicted_step_s": decision.predicted.step_s,
                "predicted_dense_s": estimate(inputs, DENSE).step_s,
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
        if trial.option == DENSE:
            return None
        if predicted.codec_s > 0:
            measured_codec_s = median(one.codec_s for one in judged)
            self._codec_slowdown *= min(max(measured_codec_s / predicted.codec_s, 0.5), 4.0)
        return self._keep_promise(trial, step, measured_s, now_s)

    def _keep_promise(self, trial: _Trial, step: JoinedStep, measured_s: float, now_s: float) -> Decision | None:
        inputs = self._inputs()
        if inputs is None:
            return None
        dense_s, source = estimate(inputs, DENSE).step_s, "is predicted to take"
        if self._dense_s is not None:
            seconds, beta = self._dense_s
            if 1 / LINK_CHANGE < inputs.link.beta_s_per_byte / beta < LINK_CHANGE:
                dense_s, source = seconds, "took"
        if measured_s <= MAX_SLOWDOWN * dense_s:
            return None
        self._banned[trial.option] = step.step + BAN_STEPS
        decision = Disable(
            plan=next_plan(self.plans[-1], self.layers, DENSE, self._group_bytes),
            reason=f"{trial.option} took {measured_s:.3f} s a step, dense {source} {dense_s:.3f} s on this network; "
            f"not tried again for {BAN_STEPS} steps",
            predicted=estimate(inputs, DENSE),
        )
        self._act(decision, step, inputs, now_s)
        return decision

    def _cause(self, step: JoinedStep, inputs: StepInputs) -> str | None:
        """Why to decide now, or None."""
        if self._trial is not None:
            return None
        if self._decided is None:
            return "first measurements"
        old_s, new_s = self._decided.link.alpha_s, inputs.link.alpha_s
        if _latency_moved(old_s, new_s):
            return f"latency {old_s * 1e3:.1f} -> {new_s * 1e3:.1f} ms"
        old, new = self._decided.link.bandwidth_gbps, inputs.link.bandwidth_gbps
        if not 1 / LINK_CHANGE < new / old < LINK_CHANGE:
            return f"bandwidth {_rate(old)} -> {_rate(new)}"
        in_use = option_of(self.plans[-1])
        if self._gain_fell(inputs, in_use):
            codec = str(in_use.codec)
            return f"gain of {codec} {self._decided.gain[codec]:.2f} -> {inputs.gain[codec]:.2f}"
        if step.step - self._decided_step >= REVIEW_STEPS:
            return f"{REVIEW_STEPS} steps since the last look"
        return None

    def _gain_fell(self, inputs: StepInputs, option: Option) -> bool:
        """The codec keeps a good deal less of the gradient than when it was chosen."""
        before = self._decided.gain.get(str(option.codec)) if self._decided is not None else None
        now = inputs.gain.get(str(option.codec))
        return before is not None and now is not None and now < (1 - GAIN_CHANGE) * before

    def _bandwidth(self) -> Estimate | None:
        """What messages say; what probes say, where messages are not sure and nothing has changed since."""
        rates = [rate for _, found in self._probed_rates.values() for rate in found.values()]
        if _is_sure(self._link.bandwidth) or not rates:
            return self._link.bandwidth
        return Estimate(value=median(rates), low=min(rates), high=max(rates), source="probes")

    def _latency_s(self) -> float | None:
        """One way: the shorter of what messages and probes say, as full links and busy processors only add to it."""
        views = [self._link.latency_s.value] if self._link.latency_s is not None else []
        if any(self._probed_of_node.values()):
            views.append(self._probed_s)
        return min(views, default=None)

    def _inputs(self) -> StepInputs | None:
        """What is known now, in the planner's terms; None while something is missing."""
        recent, rate = self._recent, self._bandwidth()
        if len(recent) < LINK_STEPS or rate is None or not self._gain:
            return None
        alpha_s = self._latency_s() or self._probed_s
        planned = self.plans[-1].groups
        measured = [median(times) for times in zip(*(one.ready_s for one in recent), strict=True)]
        ready_s = {name: ready for group, ready in zip(planned, measured, strict=True) for name in group.layers}
        return StepInputs(
            world_size=self.plans[-1].world_size,
            groups=tuple(size for size, _ in self._layout),
            ready_s=tuple(max(ready_s[name] for name in names) for _, names in self._layout),
            compute_s=median(one.compute_s for one in recent),
            link=Link(alpha_s=alpha_s, beta_s_per_byte=1 / rate.value),
            codec_costs={name: _slowed(cost, self._codec_slowdown) for name, cost in self._codec_costs.items()},
            gain=dict(self._gain),
        )


def describe_inputs(inputs: StepInputs) -> dict[str, Any]:
    """The inputs of a decision as they are journalled."""
    return {
        "world_size": inputs.world_size,
        "bandwidth_gbps": inputs.link.bandwidth_gbps,
        "latency_ms": inputs.link.alpha_s * 1e3,
        "compute_s": inputs.compute_s,
        "num_groups": len(inputs.groups),
        "dense_bytes": sum(group.dense_bytes for group in inputs.groups),
        "gain": dict(inputs.gain),
    }


def _layout(layers: Sequence[Layer], group_bytes: int) -> list[tuple[GroupSize, tuple[str, ...]]]:
    """Groups of every plan that compresses, whatever the codec: sizes and names of their layers."""
    by_name = {layer.name: layer for layer in layers}
    plan = make_plan(
        layers, version=0, world_size=1, codec=CodecSpec(name="bf16"), scheme=Scheme.SRA, group_bytes=group_bytes
    )
    sizes = []
    for group in plan.groups:
        members = [by_name[name] for name in group.layers]
        numel, dense_bytes = sum(layer.numel for layer in members), sum(layer.dense_bytes for layer in members)
        sizes.append((GroupSize(numel, dense_bytes, group.scheme is not Scheme.DENSE), group.layers))
    return sizes


def _slowed(cost: CodecCost, factor: float) -> CodecCost:
    return CodecCost(**{name: getattr(cost, name) * factor for name in CodecCost.__slots__})


def _is_sure(estimate: Estimate | None) -> bool:
    return estimate is not None and estimate.is_sure


def _latency_moved(old_s: float, new_s: float) -> bool:
    return abs(new_s - old_s) > MIN_LATENCY_CHANGE_S and not 1 / LATENCY_CHANGE < new_s / old_s < LATENCY_CHANGE


def _rate(gbps: float) -> str:
    return f"{gbps:.2f} Gbit/s" if gbps >= 1 else f"{gbps * 1e3:.0f} Mbit/s"
