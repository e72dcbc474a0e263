"""The control loop: samples in, decisions out. No Ray and no clock of its own, so tests can step it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeVar

from cgx_ray.control.gains import GAIN_CHANGE, GainWatch
from cgx_ray.control.journal import Journal
from cgx_ray.control.measured import (
    beside_dense,
    codecs_in_use,
    describe_measured,
    describe_plan,
    is_dense,
    latency_moved,
    layer_times,
    network_cause,
    network_of,
    slowed,
)
from cgx_ray.control.policy import MAX_SLOWDOWN, Decision, Disable, Keep, Pair, Policy, Replace, View
from cgx_ray.control.view import JoinedStep, StepBook
from cgx_ray.monitors.changes import SlowRanks
from cgx_ray.monitors.passive import Estimate, PassiveLink
from cgx_ray.monitors.probe_schedule import BUDGET_S, ProbeSchedule
from cgx_ray.monitors.sample import NodeSample
from cgx_ray.monitors.topology import SilentNodes
from cgx_ray.plan import CodecSpec, Layer, Plan, Scheme, make_plan
from cgx_ray.planner.cost import Link
from cgx_ray.planner.options import CodecCost, Option
from cgx_ray.planner.prediction import Measured, Prediction, groups_of, predict

# Steps of a plan before it is judged; the first one still has cold buffers.
WARM_UP_STEPS = 1
JUDGED_STEPS = 4
LINK_STEPS = 3
REVIEW_STEPS = 100
# Options that failed are left alone for so long. After a plan that was slower than dense, doubled with each of these,
# nothing else is tried for so long either.
BAN_STEPS = 500
# What a probe has found counts until the next but one may come.
PROBE_HOLDS_S = 2 * BUDGET_S
# Between workers of one host nobody measures latency: a loopback round trip.
DEFAULT_LATENCY_S = 50e-6


T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFacts:
    """What is known at the moment, for metrics; None if not yet.

    bandwidth         payload bytes a second of a worker's link, from the job's own messages or from probes
    slow_link_bits_per_s, slow_ranks
                      ranks whose link, or whose compute, is much slower than the others'
    silent_nodes      ids of nodes that have stopped to answer the others
    """

    bandwidth: Estimate | None
    latency_s: float | None
    num_link_changes: int
    slow_link_bits_per_s: Mapping[int, float]
    slow_ranks: frozenset[int]
    silent_nodes: frozenset[str]
    predicted_step_s: float | None
    measured_step_s: float | None

    @property
    def bandwidth_bits_per_s(self) -> float | None:
        return 8 * self.bandwidth.value if self.bandwidth is not None else None

    @property
    def bandwidth_error(self) -> float | None:
        """Half the width of its interval, as a share of it."""
        rate = self.bandwidth
        return (rate.high - rate.low) / (2 * rate.value) if rate is not None else None


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
        self._num_link_changes = 0
        self._slow_ranks = SlowRanks(first_plan.world_size)
        self._silent_nodes = SilentNodes()
        self._probed_s = DEFAULT_LATENCY_S
        self._probed_of_node: dict[str, tuple[float, float]] = {}
        # What each node has said of latencies at last. From when the link changed on: what it had said by then, of
        # those that have not measured all of it anew.
        self._said: dict[str, Mapping[str, float]] = {}
        self._outdated: dict[str, Mapping[str, float]] = {}
        self._outdated_s = -math.inf
        self._probes = ProbeSchedule()
        self._probed_rates: dict[str, tuple[float, Mapping[str, float]]] = {}
        self._gains = GainWatch(map(str, codecs_in_use(self.plans[-1])))
        self._decided: Measured | None = None
        self._first_step: int | None = None
        self._review_step = self._pause_step = 0
        self._trial: _Trial | None = None
        self._predicted_s: float | None = None
        self._dense_s: tuple[float, Measured] | None = None
        self._banned: dict[Pair, int] = {}
        self._num_failures = 0
        return self.plans[-1]

    def observe(self, sample: NodeSample, now_s: float) -> list[Decision]:
        """Take in a report of one node; returns the decisions it led to, already journalled.

        now_s  by this process's clock: what probes found is dropped by it, as a node may fall silent
        """
        if not self.is_registered:
            return []
        self._hear(sample, now_s)
        decisions = []
        for step in self._book.add(sample.steps):
            num_changes = self._link.num_changes
            self._link.add(step.seen, self._probed_s)
            if self._link.num_changes > num_changes:
                self._num_link_changes += self._link.num_changes - num_changes
                self._probed_rates.clear()
                self._probed_of_node.clear()
                self._outdated = {node: said for node, said in self._said.items() if said}
                self._outdated_s = now_s
            self._slow_ranks.add(step.slowness, step.step_s)
            if step.plan_version != self.plans[-1].version:
                continue
            self._first_step = step.step if self._first_step is None else self._first_step
            self._recent = [one for one in self._recent if one.plan_version == step.plan_version][1 - LINK_STEPS :]
            self._recent.append(step)
            self._gains.add(step.gain)
            decision = self._judge(step, sample.time_s) or self._decide(step, sample.time_s)
            if decision is not None:
                decisions.append(decision)
        return decisions

    def _hear(self, sample: NodeSample, now_s: float) -> None:
        """Take in what a node's probes say of the others."""
        self._silent_nodes.add(sample.node_id, sample.latency_s)
        was_probed = any(self._said.values())
        self._probed_of_node = _fresh(self._probed_of_node, now_s)
        self._probed_rates = _fresh(self._probed_rates, now_s)
        self._probed_of_node.pop(sample.node_id, None)
        self._said[sample.node_id] = sample.latency_s
        outdated = self._outdated.get(sample.node_id, {})
        anew = {node: said_s for node, said_s in sample.latency_s.items() if said_s != outdated.get(node)}
        if anew:
            self._probed_of_node[sample.node_id] = now_s, median(anew.values())
        if len(anew) == len(sample.latency_s):
            self._outdated.pop(sample.node_id, None)
        if now_s - self._outdated_s > PROBE_HOLDS_S:
            # Who has not reported for so long is not waited for.
            self._outdated.clear()
        if sample.bandwidth:
            self._probed_rates[sample.node_id] = now_s, sample.bandwidth
        known = [latency_s for _, latency_s in self._probed_of_node.values()]
        probed_s = median(known) if known and self._is_probed else self._probed_s
        if latency_moved(self._probed_s, probed_s) and self._link.latency_s is None:
            # Exchanges from before the change would be read with the wrong latency.
            self._recent = []
            self._link = PassiveLink()
            self._num_link_changes += was_probed
            self._probed_rates.clear()
        self._probed_s = probed_s

    def next_probe(self, node_id: str, now_s: float) -> str | None:
        """The node that `node_id` is to probe now, or None: messages tell enough, or it is not its turn.

        now_s  by this process's clock
        """
        if not self.is_registered or _is_sure(self._link.bandwidth):
            return None
        return self._probes.grant(node_id, self._silent_nodes.known - self._silent_nodes.node_ids, now_s)

    def facts(self) -> LoopFacts:
        """The network now, predicted and measured step time under the plan in force."""
        return LoopFacts(
            bandwidth=self._bandwidth(),
            latency_s=self._latency_s(),
            num_link_changes=self._num_link_changes,
            slow_link_bits_per_s={rank: 8 * rate for rank, rate in self._link.slow.items()},
            slow_ranks=self._slow_ranks.ranks,
            silent_nodes=self._silent_nodes.node_ids,
            predicted_step_s=self._predicted_s,
            measured_step_s=median(step.step_s for step in self._recent) if self._recent else None,
        )

    def _decide(self, step: JoinedStep, now_s: float) -> Decision | None:
        measured = self._measured()
        cause = self._cause(step, measured) if measured is not None else None
        if measured is None or cause is None:
            return None
        self._banned = {pair: until for pair, until in self._banned.items() if until > step.step}
        decision = self._policy.decide(
            View(cause=cause, plan=self.plans[-1], measured=measured, banned=frozenset(self._banned))
        )
        if isinstance(decision, Replace):
            # Its gain is only known while it is used: unused, the estimate would bring it straight back.
            fallen = self._fallen(measured)
            self._ban(((codec, scheme) for codec in fallen for scheme in Scheme), until=step.step + BAN_STEPS)
        if decision is not None:
            self._act(decision, step, measured, now_s)
        return decision

    def _act(self, decision: Decision, step: JoinedStep, measured: Measured, now_s: float) -> None:
        old = self.plans[-1]
        # The first step has cold buffers and caches, the second may: in doubt for dense, as the promise is.
        warm = [one.step_s for one in self._recent if one.step != self._first_step]
        if is_dense(old) and warm:
            self._dense_s = min(warm), measured
        self._gains.look()
        if not isinstance(decision, Keep):
            self.plans.append(decision.plan)
            self._gains.enter(map(str, codecs_in_use(decision.plan)))
        new = self.plans[-1]
        self._decided = measured
        # A pause outlasts looks that change nothing.
        self._pause_step = self._pause_step if is_dense(new) else 0
        self._review_step = max(step.step + REVIEW_STEPS, self._pause_step)
        self._predicted_s = decision.predicted.step_s
        self._trial = _Trial(decision=decision, options=beside_dense(new), steps=[])
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
        # Plans of nothing but hierarchical groups may leave the link unseen: then it is as it was.
        measured = self._measured() or self._decided
        assert measured is not None
        plan, dense = self._dense_plan(measured)
        dense_s, source = self._dense_now(measured, dense)
        if measured_s <= MAX_SLOWDOWN * dense_s:
            return None
        pause = BAN_STEPS << self._num_failures
        self._num_failures += 1
        # Twice the pause, so that what is tried after it is something else.
        self._ban(((option.codec, option.scheme) for option in trial.options), until=step.step + 2 * pause)
        decision = Disable(
            plan=plan,
            reason=f"{trial.decision.predicted.describe()} took {measured_s:.3f} s a step, dense {source} "
            f"{dense_s:.3f} s on this network; nothing else is tried for {pause} steps, its options for {2 * pause}",
            predicted=dense,
            dense_s=dense.step_s,
        )
        self._pause_step = step.step + pause
        self._act(decision, step, measured, now_s)
        return decision

    def _ban(self, pairs: Iterable[Pair], *, until: int) -> None:
        self._banned |= {pair: max(until, self._banned.get(pair, 0)) for pair in pairs}

    def _dense_now(self, measured: Measured, predicted: Prediction) -> tuple[float, str]:
        """Seconds of a dense step, and how they are known.

        On the network that its steps were measured on, what they took, with what compute has changed since; on another
        one as `predicted`.
        """
        if self._dense_s is None:
            return predicted.step_s, "is predicted to take"
        seconds, then = self._dense_s
        if network_cause(then.network.between, measured.network.between) is not None:
            return predicted.step_s, "is predicted to take"
        before = predict(replace(measured, backward_s=then.backward_s, after_s=then.after_s), predicted.groups)
        return max(seconds + predicted.step_s - before.step_s, measured.compute_s), "takes"

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
        cause = network_cause(self._decided.network.between, measured.network.between)
        if cause is not None:
            return cause
        if step.step < self._pause_step:
            return None
        cause = self._gains.cause(self._decided.gain)
        if cause is None and step.step >= self._review_step:
            return f"{REVIEW_STEPS} steps or more since the last look"
        return cause

    def _fallen(self, measured: Measured) -> set[CodecSpec]:
        """Codecs in use that keep a good deal less of the gradient than when the plan was chosen."""
        before = self._decided.gain if self._decided is not None else {}
        return {
            codec
            for codec in codecs_in_use(self.plans[-1])
            if measured.gain.get(str(codec), math.inf) < before.get(str(codec), 0.0) - GAIN_CHANGE
        }

    def _bandwidth(self) -> Estimate | None:
        """What messages say; what probes say, where messages are not sure and nothing has changed since."""
        rates = [rate for _, found in self._probed_rates.values() for rate in found.values()]
        if _is_sure(self._link.bandwidth) or not rates:
            return self._link.bandwidth
        return Estimate(value=median(rates), low=min(rates), high=max(rates), source="probes")

    @property
    def _is_probed(self) -> bool:
        """All nodes that answer have measured latencies since the link changed."""
        return not self._outdated.keys() - self._silent_nodes.node_ids

    def _latency_s(self) -> float | None:
        """One way: the shorter of what messages and probes say, as full links and busy processors only add to it."""
        views = [self._link.latency_s.value] if self._link.latency_s is not None else []
        if self._is_probed and self._probed_of_node:
            views.append(self._probed_s)
        return min(views, default=None)

    def _measured(self) -> Measured | None:
        """What is known now, in the planner's terms; None while something is missing."""
        recent, rate = self._recent, self._bandwidth()
        if len(recent) < LINK_STEPS or rate is None or not self._gains.gain:
            return None
        between = Link(alpha_s=self._latency_s() or self._probed_s, beta_s_per_byte=1 / rate.value)
        ready_s = [median(times) for times in zip(*(one.ready_s for one in recent), strict=True)]
        backward_s = layer_times(self.layers, self.plans[-1], ready_s)
        return Measured(
            layers=self.layers,
            backward_s=backward_s,
            after_s=max(0.0, median(one.compute_s for one in recent) - sum(backward_s)),
            network=network_of(self.plans[-1].world_size, recent[-1].num_local, between),
            codec_costs={name: slowed(cost, self._codec_slowdown) for name, cost in self._codec_costs.items()},
            gain=self._gains.gain,
        )


def _fresh(found: Mapping[str, tuple[float, T]], now_s: float) -> dict[str, tuple[float, T]]:
    """Of what nodes have probed, at what time, that which still counts."""
    return {node: (found_s, what) for node, (found_s, what) in found.items() if now_s - found_s <= PROBE_HOLDS_S}


def _is_sure(estimate: Estimate | None) -> bool:
    return estimate is not None and estimate.is_sure
