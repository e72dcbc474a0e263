"""The control loop: samples in, decisions out. No Ray and no clock of its own, so tests can step it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from cgx_ray.control.changes import SlowRanks
from cgx_ray.control.gains import GAIN_CHANGE, GainWatch
from cgx_ray.control.joined_steps import JoinedStep, StepBook
from cgx_ray.control.journal import Journal
from cgx_ray.control.known_network import KnownNetwork
from cgx_ray.control.link_estimate import Estimate
from cgx_ray.control.measured import (
    beside_dense,
    codecs_in_use,
    describe_measured,
    describe_plan,
    is_dense,
    layer_times,
    network_cause,
    network_of,
    slowed,
)
from cgx_ray.control.policy import MAX_SLOWDOWN, Decision, Disable, Keep, Policy, Replace, View
from cgx_ray.monitors.sample import NodeSample
from cgx_ray.plan import CodecSpec, Layer, Option, Plan, make_plan, options_of
from cgx_ray.planner.cost import Link
from cgx_ray.planner.options import CodecCost
from cgx_ray.planner.prediction import Measured, Prediction, groups_of, predict

# Steps of a plan before it is judged; the first one still has cold buffers.
WARM_UP_STEPS = 1
JUDGED_STEPS = 4
LINK_STEPS = 3
REVIEW_STEPS = 100
# Options that failed are left alone for so long. After a plan that was slower than dense, doubled with each of these,
# nothing else is tried for so long either.
BAN_STEPS = 500


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
        self._network = KnownNetwork()
        self._slow_ranks = SlowRanks(first_plan.world_size)
        self._gains = GainWatch(map(str, codecs_in_use(self.plans[-1])))
        self._decided: Measured | None = None
        self._first_step: int | None = None
        self._review_step = self._pause_step = 0
        self._trial: _Trial | None = None
        self._predicted_s: float | None = None
        self._dense_s: tuple[float, Measured] | None = None
        self._banned: dict[Option, int] = {}
        self._num_failures = 0
        return self.plans[-1]

    def observe(self, sample: NodeSample, now_s: float) -> list[Decision]:
        """Take in a report of one node; returns the decisions it led to, already journalled.

        now_s  by this process's clock: what probes found is dropped by it, as a node may fall silent
        """
        if not self.is_registered:
            return []
        if self._network.hear(sample, now_s):
            self._recent = []
        decisions = []
        for step in self._book.add(sample.steps):
            self._network.add(step.seen, now_s)
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

    def next_probe(self, node_id: str, now_s: float) -> str | None:
        """The node that `node_id` is to probe now, or None: messages tell enough, or it is not its turn.

        now_s  by this process's clock
        """
        return self._network.next_probe(node_id, now_s) if self.is_registered else None

    def facts(self) -> LoopFacts:
        """The network now, predicted and measured step time under the plan in force."""
        return LoopFacts(
            bandwidth=self._network.bandwidth,
            latency_s=self._network.latency_s,
            num_link_changes=self._network.num_changes,
            slow_link_bits_per_s={rank: 8 * rate for rank, rate in self._network.slow.items()},
            slow_ranks=self._slow_ranks.ranks,
            silent_nodes=self._network.silent_nodes,
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
            fallen = self._fallen(measured)
            self._ban((option for codec in fallen for option in options_of(codec)), until=step.step + BAN_STEPS)
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
        self._ban(trial.options, until=step.step + 2 * pause)
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

    def _ban(self, options: Iterable[Option], *, until: int) -> None:
        self._banned |= {flat: max(until, self._banned.get(flat, 0)) for flat in (each.flat() for each in options)}

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

    def _measured(self) -> Measured | None:
        """What is known now, in the planner's terms; None while something is missing."""
        recent, rate = self._recent, self._network.bandwidth
        if len(recent) < LINK_STEPS or rate is None or not self._gains.gain:
            return None
        between = Link(alpha_s=self._network.latency_s or self._network.probed_s, beta_s_per_byte=1 / rate.value)
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
