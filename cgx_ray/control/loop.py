"""The control loop: samples in, decisions out. It uses no Ray and no clock of its own, so tests can step it.

After each step of all ranks the loop does one of two things:

1. If the last decision has no outcome yet, it waits for WARM_UP_STEPS + JUDGED_STEPS steps. Then it writes the outcome
   to the journal and corrects the codecs' times. If the plan is more than 3 % slower than dense, it goes back to dense
   (`Disable`).
2. Else it asks the policy if there is a cause: the first measurements, another bandwidth or latency (`network_change`),
   another gain (`gains`), or a regular review after REVIEW_STEPS.

The time of a dense step is the fastest of the last steps under a dense plan, without the very first step of the worker
group, plus the change of compute since then. On another network (bandwidth or latency) it is the planner's prediction.

After a plan slower than dense the loop stays dense for a pause of BAN_STEPS, which doubles with each further failure.
Only another network ends the pause early. The codecs and schemes of the failed plan, flat or hierarchical, are banned
for twice as long. An option whose gain fell by more than GAIN_CHANGE while it was in use is banned for BAN_STEPS, twice
as long each time (`setbacks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cgx_ray.control.facts import LoopFacts
from cgx_ray.control.joined_steps import JoinedStep
from cgx_ray.control.journal import Journal, decision_entry, outcome_entry
from cgx_ray.control.network_change import network_cause
from cgx_ray.control.outcome import PendingOutcome
from cgx_ray.control.policy import (
    MAX_SLOWDOWN,
    Decision,
    Disable,
    Keep,
    Policy,
    Replace,
    Situation,
    describe_options,
)
from cgx_ray.control.worker_group import WorkerGroupState
from cgx_ray.monitors.sample import NodeSample
from cgx_ray.plan import Layer, Plan, make_plan
from cgx_ray.planner.legs import EncodesOn
from cgx_ray.planner.options import CodecCost
from cgx_ray.planner.prediction import Measured, Prediction, groups_of, predict

# Steps after a decision before the policy is asked again without any other cause. Rare enough to cost nothing, frequent
# enough to follow slow trends.
REVIEW_STEPS = 100


class ControlLoop:
    """Decides for one training.

    layers, plans  of the model; all plans so far, the newest last
    gain_ratios    learned so far, see `GainWatch`

    All of them outlive a worker group.
    """

    def __init__(
        self,
        policy: Policy,
        journal: Journal,
        *,
        group_bytes: int,
        layers: Sequence[Layer] = (),
        plans: Sequence[Plan] = (),
        gain_ratios: Mapping[str, float] | None = None,
    ) -> None:
        """`layers` to `gain_ratios` are those of the controller before a restart of the workers."""
        self._policy = policy
        self._journal = journal
        self._group_bytes = group_bytes
        self.layers = tuple(layers)
        self.plans = list(plans)
        self._earlier_ratios = dict(gain_ratios or {})
        self._state: WorkerGroupState | None = None

    @property
    def gain_ratios(self) -> dict[str, float]:
        return self._state.gains.ratios if self._state is not None else self._earlier_ratios

    def register(
        self,
        layers: Sequence[Layer],
        first_plan: Plan,
        codec_costs: Mapping[str, CodecCost],
        encodes_on: EncodesOn = "thread",
    ) -> Plan:
        """Start a worker group, the first one or one after a restart; return its plan.

        That is the newest plan if it still fits layers and world size, else `first_plan` under the next version.
        """
        fits = bool(self.plans) and self.layers == tuple(layers) and self.plans[-1].world_size == first_plan.world_size
        if not fits:
            version = self.plans[-1].version + 1 if self.plans else first_plan.version
            self.plans.append(replace(first_plan, version=version))
        self.layers = tuple(layers)
        self._state = WorkerGroupState(layers, self.plans[-1], codec_costs, encodes_on, self.gain_ratios)
        return self.plans[-1]

    def observe(self, sample: NodeSample, now_s: float) -> list[Decision]:
        """Add a node's report; return the decisions that it causes, which are in the journal by then.

        now_s  by this process's clock. A node may fall silent, so its probe results expire by this clock
        """
        state = self._state
        if state is None:
            return []
        decisions = []
        for step in state.add_report(sample, now_s):
            if not state.add_step(step, now_s):
                continue
            decision = self._judge(state, step, sample.time_s) or self._decide(state, step, sample.time_s)
            if decision is not None:
                decisions.append(decision)
        return decisions

    def next_probe(self, node_id: str, now_s: float) -> str | None:
        """Return the node that `node_id` shall probe now; None if messages suffice or it is not its turn.

        now_s  by this process's clock
        """
        return self._state.network.next_probe(node_id, now_s) if self._state is not None else None

    @property
    def is_registered(self) -> bool:
        return self._state is not None

    def facts(self) -> LoopFacts:
        """Return the network and the step times as they are known now. Call `register` before."""
        assert self._state is not None
        return self._state.facts()

    def _decide(self, state: WorkerGroupState, step: JoinedStep, time_s: float) -> Decision | None:
        """Ask the policy if there is a cause."""
        measured = state.measured()
        cause = _cause(state, step.step, measured) if measured is not None else None
        if measured is None or cause is None:
            return None
        banned = state.setbacks.banned(step.step)
        decision = self._policy.decide(Situation(cause=cause, plan=state.plan, measured=measured, banned=banned))
        if isinstance(decision, Replace):
            # What an option really keeps is only known while it is in use.
            state.setbacks.add_gain_fall(state.fallen_options(measured), step.step)
        if decision is not None:
            self._apply(state, decision, step.step, measured, time_s)
        return decision

    def _judge(self, state: WorkerGroupState, step: JoinedStep, time_s: float) -> Decision | None:
        """Compare the last decision's prediction with its outcome, once enough steps are measured."""
        outcome = state.pending
        if outcome is None or not outcome.add(step):
            return None
        state.pending = None
        self._journal.write(outcome_entry(outcome, version=step.plan_version, step=step.step, time_s=time_s))
        if not outcome.options:
            return None
        state.correct_codec_times(measured_s=outcome.codec_s, predicted_s=outcome.decision.predicted.codec_s)
        return self._disable_if_slow(state, outcome, step.step, time_s)

    def _disable_if_slow(
        self, state: WorkerGroupState, outcome: PendingOutcome, step: int, time_s: float
    ) -> Decision | None:
        """Go back to dense if the measured steps are more than 3 % slower."""
        # A plan with nothing but hierarchical groups may leave the link unmeasured. Then the last measurements count.
        measured = state.measured() or state.decided
        assert measured is not None
        plan, dense = self._dense_plan(state, measured)
        dense_s = state.measured_dense_s(measured, dense)
        verb = "takes"
        if dense_s is None:
            dense_s, verb = dense.step_s, "is predicted to take"
        if outcome.step_s <= MAX_SLOWDOWN * dense_s:
            return None
        pause_steps = state.setbacks.add_slow_plan(outcome.options, step)
        decision = Disable(
            plan=plan,
            reason=f"{describe_options(outcome.decision.predicted)} took {outcome.step_s:.3f} s per step, dense {verb} "
            f"{dense_s:.3f} s on this network; only dense for {pause_steps} steps, these options banned for "
            f"{2 * pause_steps}",
            predicted=dense,
            dense_s=dense.step_s,
        )
        self._apply(state, decision, step, measured, time_s)
        return decision

    def _apply(self, state: WorkerGroupState, decision: Decision, step: int, measured: Measured, time_s: float) -> None:
        old = state.plan
        state.apply(decision, measured, step)
        if not isinstance(decision, Keep):
            self.plans.append(decision.plan)
        self._journal.write(
            decision_entry(decision, old=old, new=state.plan, measured=measured, step=step, time_s=time_s)
        )

    def _dense_plan(self, state: WorkerGroupState, measured: Measured) -> tuple[Plan, Prediction]:
        """Return the next plan if it is dense, and its prediction.

        Its groups are those of the last dense plan, since their steps were measured.
        """
        version = state.plan.version + 1
        plan = state.last_dense_plan
        if plan is None:
            world_size = state.plan.world_size
            plan = make_plan(self.layers, version=version, world_size=world_size, group_bytes=self._group_bytes)
        return replace(plan, version=version), predict(measured, groups_of(plan, self.layers))


def _cause(state: WorkerGroupState, step: int, measured: Measured) -> str | None:
    """Return in words why to decide after `step`, or None."""
    if state.pending is not None:
        return None
    if state.decided is None:
        return "first measurements"
    cause = network_cause(state.decided.network.between, measured.network.between)
    if cause is not None:
        return cause
    if step < state.setbacks.pause_end:
        return None
    cause = state.gain_cause()
    if cause is None and step >= state.decision_step + REVIEW_STEPS:
        return "regular review"
    return cause
