"""The controller's knowledge of one worker group: its plan in force, its measurements and its last decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from cgx_ray.control.changes import SlowRanks
from cgx_ray.control.facts import LoopFacts
from cgx_ray.control.gains import GAIN_CHANGE, GainWatch
from cgx_ray.control.joined_steps import JoinedStep, StepJoiner
from cgx_ray.control.known_network import KnownNetwork
from cgx_ray.control.learning_phase import LEARNING_GAIN, LearningPhase
from cgx_ray.control.measured import is_dense, layer_times, network_of, non_dense_options
from cgx_ray.control.network_change import network_cause
from cgx_ray.control.outcome import PendingOutcome
from cgx_ray.control.policy import Decision, Keep
from cgx_ray.control.setbacks import Setbacks
from cgx_ray.monitors.sample import NodeSample
from cgx_ray.plan import Layer, Option, Plan
from cgx_ray.planner.cost import Link
from cgx_ray.planner.legs import EncodesOn
from cgx_ray.planner.options import CodecCost
from cgx_ray.planner.prediction import Measured, Prediction, predict

# Steps whose median is measured, and the least number of steps before the first decision: a median needs three.
LINK_STEPS = 3
# Bounds on the factor by which one outcome corrects the codecs' times, so that a disturbed outcome cannot ruin them.
MIN_CODEC_CORRECTION = 0.5
MAX_CODEC_CORRECTION = 4.0


class WorkerGroupState:
    """All that is known about one worker group; a restart of the workers makes a new object.

    plan             in force
    last_dense_plan  the last dense plan that was in force, None if there was none
    decided          measurements that the last decision was made on, None before the first
    pending          the last decision until its outcome is measured, else None
    decision_step    step after which the last decision was made
    setbacks         bans and pauses after failures
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        plan: Plan,
        codec_costs: Mapping[str, CodecCost],
        encodes_on: EncodesOn,
        gain_ratios: Mapping[str, float] | None = None,
    ) -> None:
        """`gain_ratios`: learned in earlier worker groups, see `GainWatch`."""
        self.layers = tuple(layers)
        self.plan = plan
        self.last_dense_plan = plan if is_dense(plan) else None
        self.decided: Measured | None = None
        self.pending: PendingOutcome | None = None
        self.decision_step = 0
        self.setbacks = Setbacks()
        self.network = KnownNetwork()
        self.gains = GainWatch(map(str, non_dense_options(plan)), gain_ratios)
        self._learning = LearningPhase()
        self._plan_step: int | None = None
        # Names of the gains that a decision has known.
        self._offered: frozenset[str] = frozenset()
        self._codec_costs = dict(codec_costs)
        self._codec_slowdown = 1.0
        self._encodes_on: EncodesOn = encodes_on
        self._joiner = StepJoiner(plan.world_size)
        self._slow_ranks = SlowRanks(plan.world_size)
        self._recent: list[JoinedStep] = []
        self._first_step: int | None = None
        self._predicted_s: float | None = None
        # Seconds of a dense step as measured, and the measurements at that time.
        self._dense_s: tuple[float, Measured] | None = None

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
        self._first_step = step.step if self._first_step is None else self._first_step
        self._recent = [one for one in self._recent if one.plan_version == step.plan_version][1 - LINK_STEPS :]
        self._recent.append(step)
        self._plan_step = step.step if self._plan_step is None else self._plan_step
        self._learning.add(step.norm)
        self.gains.add(step.gain, step.kept, self._settled(step.step - self._plan_step))
        return True

    def _settled(self, num_steps: int) -> set[str]:
        """Return the options in use whose residuals no longer grow after `num_steps` under the plan in force."""
        # Each element has been sent once, on average.
        return {
            str(option) for option in non_dense_options(self.plan) if num_steps * (option.codec.density or 1.0) >= 1
        }

    def apply(self, decision: Decision, measured: Measured, step: int) -> None:
        """Record `decision`, which was made after `step` on `measured`, and put its plan in force."""
        # The first step still allocates buffers and fills caches, and the second may do so too. Take the fastest one:
        # when unsure favour dense, since the promise is "never slower".
        warm_s = [one.step_s for one in self._recent if one.step != self._first_step]
        if is_dense(self.plan) and warm_s:
            self._dense_s = min(warm_s), measured
        self.gains.acknowledge()
        self._offered |= measured.gain.keys()
        if not isinstance(decision, Keep):
            self.plan = decision.plan
            self.gains.start_plan(map(str, non_dense_options(self.plan)))
            self._plan_step = None
        if is_dense(self.plan):
            self.last_dense_plan = self.plan
        else:
            self.setbacks.pause_end = 0
        self.decided, self.decision_step = measured, step
        self._predicted_s = decision.predicted.step_s
        self.pending = PendingOutcome(decision=decision, options=non_dense_options(self.plan))

    def correct_codec_times(self, *, measured_s: float, predicted_s: float) -> None:
        """Scale the codecs' times, which were measured while nothing else ran, to those of real steps."""
        if predicted_s > 0:
            self._codec_slowdown *= min(max(measured_s / predicted_s, MIN_CODEC_CORRECTION), MAX_CODEC_CORRECTION)

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
            codec_costs={name: cost.slowed(self._codec_slowdown) for name, cost in self._codec_costs.items()},
            gain=self._usable_gains(),
            encodes_on=self._encodes_on,
        )

    def gain_cause(self) -> str | None:
        """Return in words which gain calls for a new decision, or None. Call after the first decision."""
        assert self.decided is not None
        cause = self.gains.cause(self.decided.gain)
        usable = self._usable_gains().keys() - self._offered
        new = sorted(name for name in usable if not self.gains.is_in_use(name))
        return f"gain of {new[0]} is known now" if cause is None and new else cause

    def _usable_gains(self) -> dict[str, float]:
        """Return the gains that plans may be made with; in a learning phase those in use, and large ones."""
        usable = self.gains.usable
        if not self._learning.is_on:
            return usable
        return {name: gain for name, gain in usable.items() if gain >= LEARNING_GAIN or self.gains.is_in_use(name)}

    def measured_dense_s(self, measured: Measured, predicted: Prediction) -> float | None:
        """Return seconds of a dense step under `measured`, from dense steps in the past; None if there is none to use.

        predicted  of the dense plan, under `measured`

        Dense steps count only if the network is still the same. The change of compute since then is added.
        """
        if self._dense_s is None:
            return None
        seconds, then = self._dense_s
        if network_cause(then.network.between, measured.network.between) is not None:
            return None
        before = predict(replace(measured, backward_s=then.backward_s, after_s=then.after_s), predicted.groups)
        return max(seconds + predicted.step_s - before.step_s, measured.compute_s)

    def fallen_options(self, measured: Measured) -> set[Option]:
        """Return the options in use whose gain is more than GAIN_CHANGE under the one that the plan was chosen on."""
        if self.decided is None:
            return set()
        fallen = set()
        for option in non_dense_options(self.plan):
            before, now = self.decided.gain_of(option), measured.gain_of(option)
            if before is not None and now is not None and now < before - GAIN_CHANGE:
                fallen.add(option)
        return fallen

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
