"""The control loop: reports in, decisions out. It uses no Ray and no clock of its own, so tests can step it.

Each step of all ranks is compared with the predictions for its own compute, of its plan and of dense
(`steps_beside_predictions`).
Then the loop does the first of these that has a cause:

1. A plan that is surely more than 3 % slower than dense for the same progress (`evidence`) is taken back (`disable`).
   It is not chosen again as long as its errors are remembered (`learned_errors`).
2. The policy is asked if there is a cause: the first measurements, another bandwidth or latency, another compute
   (`network.changes`), another gain (`gains`), a loss that got worse (`loss_trend`), an outcome unlike its
   prediction, a failure, or a regular review. If it changes nothing, a codec may be timed in a few steps with one layer
   (`measuring_steps`). Another link counts at any time, also while a plan is on its way to the ranks or on trial.
3. Where the steps do not show whether a plan is slower than dense, a few dense steps are measured (`measuring_steps`).
   Right after these one standard error instead of three is enough for 1.

WARM_UP_STEPS + FEW steps after a decision its outcome goes to the journal. Then and after MAX_STEPS the errors of the
plan's options and codecs are learned (`learned_errors`), and it is compared with plans that ran before (`plan_times`).
Plans are chosen with these errors. If the link goes back and forth too fast to follow (`recent_links`), one plan is
chosen for all its recent states, and not judged any more.
An option whose gain fell by more than GAIN_CHANGE while it was in use is banned, twice as long each time. So is the
option that kept the least of a plan under which the loss got worse, and all that keep less.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cgx_ray.control.guard import beside_dense, disable, replace_by_dense, return_home
from cgx_ray.control.history import KEPT_PLANS, History, Registration
from cgx_ray.control.joined_steps import JoinedStep
from cgx_ray.control.journal.facts import CauseKind, LoopFacts, When
from cgx_ray.control.journal.lines import Journal, MadeBy, decision_entry, report_hint
from cgx_ray.control.journal.progress import Progress, earlier_losses
from cgx_ray.control.journal_events import JournalEvents
from cgx_ray.control.learned.evidence import Evidence, Verdict, verdict
from cgx_ray.control.live_state import LiveState
from cgx_ray.control.network.estimate import FEW
from cgx_ray.control.policies.policy import MAX_SLOWDOWN, Decision, Policy, Situation
from cgx_ray.control.trial.measuring_steps import COMPARED, MeasuringSteps, codec_trial
from cgx_ray.control.trial.tried_codecs import TriedCodecs
from cgx_ray.control.worker_group import WorkerGroupState
from cgx_ray.monitors.sample import Fault, NodeSample
from cgx_ray.plan import Layer, Plan
from cgx_ray.planner.prediction import Measured

logger = logging.getLogger(__name__)


class ControlLoop:
    """Decides for one training.

    plans     so far, the newest last
    is_ended  the worker group has ended, see `end`
    """

    def __init__(
        self,
        policy: Policy,
        journal: Journal,
        history: History | None = None,
        *,
        run_name: str = "",
        nodes: Sequence[str] = (),
    ) -> None:
        """
        history  that of the controller before
        nodes    address of each rank's node, for the journal
        """
        self._policy = policy
        self._journal = journal
        self._earlier = history or History()
        journal.totals = self._earlier.totals
        self.plans = list(self._earlier.plans)
        self._registration = self._earlier.registration
        self._events = JournalEvents(journal, nodes, self._earlier.num_faults)
        self._live = LiveState(run_name, nodes)
        self.is_ended = False
        self._logged: set[type[Exception]] = set()
        self._state: WorkerGroupState | TriedCodecs | None = None
        self._progress = Progress()
        self._last_step: int | None = None

    def history(self) -> History:
        """Return what the next controller, or the next worker group, shall start with."""
        learned = self._state.learned() if self._state is not None else None
        return History(
            plans=tuple(self.plans[-KEPT_PLANS:]),
            gain_ratios=dict(self._state.gain_ratios if self._state is not None else self._earlier.gain_ratios),
            learned=learned or self._earlier.learned,
            registration=self._registration,
            num_faults=dict(self._events.num_faults),
            totals=self._journal.totals,
        )

    def register(self, registration: Registration, now_s: float = 0.0, time_s: float = 0.0) -> Plan:
        """Start a worker group, the first one or one after a restart; return its plan.

        That is the newest plan if it still fits layers and world size. For another number of workers it is the
        policy's, by what was learned before. Else, and for a sharded model, of which nothing is learned, it is the
        first plan of `registration` under the next version.

        now_s   monotonic clock of the controller
        time_s  seconds since 1970
        """
        first_plan, is_same_model = registration.first_plan, self.layers == registration.layers
        self._earlier = self.history() if is_same_model else History(gain_ratios=self.history().gain_ratios)
        before = self.plans[-1].world_size if self.plans else first_plan.world_size
        fits = bool(self.plans) and is_same_model and before == first_plan.world_size
        if not fits:
            version = self.plans[-1].last_version + 1 if self.plans else first_plan.version
            self.plans.append(replace(first_plan, version=version))
        elif (lease := self.plans[-1].lease) is not None:
            self.plans.append(lease.fallback)
        self._registration = registration
        state = self._new_state(registration)
        again = "the workers were started again" if fits else f"{before} workers became {first_plan.world_size}"
        if not isinstance(state, WorkerGroupState):
            if self._earlier.plans:
                state.note(again)
            return self.plans[-1]
        if state.decided is not None and not fits:
            at = When(registration.step, now_s, time_s)
            asked = state.situation(again, state.plan, state.decided, now_s)
            decision = self._ask(state, asked, at)
            if decision is not None:
                self._start_journal(state, time_s)
                self._apply(state, decision, state.decided, at, "policy", "restart", asked=asked)
        elif state.decided is not None:
            state.note(again)
        return self.plans[-1]

    def resume(self) -> None:
        """Go on with the worker group of the history: this controller has taken the place of one that has crashed."""
        assert self._registration is not None
        self._new_state(self._registration).note("the controller was started again")

    def _new_state(self, registration: Registration) -> WorkerGroupState | TriedCodecs:
        """Start to measure, with what was learned before."""
        plan, before = self.plans[-1], self._earlier
        if registration.is_sharded:
            self._state = TriedCodecs(plan, registration, self._policy)
        else:
            link = registration.link_kind(self._live.nodes)
            self._state = WorkerGroupState(plan, registration, self._policy, link, before.gain_ratios, before.learned)
            if before.learned is None:
                # Of a run that goes on from a checkpoint, in the same folder.
                for loss, num_steps in earlier_losses(self._journal.path):
                    self._state.loss_fall.add_mean(loss, num_steps)
        self._progress, self._last_step = Progress(), None
        self._events.start_group()
        return self._state

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Layers of the model; empty before the first worker group."""
        return self._registration.layers if self._registration is not None else ()

    def _start_journal(self, state: WorkerGroupState | TriedCodecs, time_s: float) -> None:
        """Write the first line of a worker group, once."""
        assert self._registration is not None
        self._events.start(self._policy, state, self._registration, time_s)

    def add_report(self, node_id: str, report: bytes, now_s: float) -> str | None:
        """Add a node's report, a pickled NodeSample received at `now_s`; return the node that it shall probe next.

        The first error of each type is logged, and all are raised.
        """
        if self.is_ended:
            return None
        try:
            sample = pickle.loads(report)
            self._live.add_sample(sample)
            self.observe(sample, now_s)
            return self.next_probe(node_id, now_s)
        except Exception as error:
            if type(error) not in self._logged:
                self._logged.add(type(error))
                logger.error(
                    "a report of node %s could not be used (%r); training goes on, later errors of this type go to "
                    "the node only",
                    node_id,
                    error,
                    exc_info=error,
                )
            raise

    def observe(self, sample: NodeSample, now_s: float) -> list[Decision]:
        """Add a node's report; return the decisions that it causes, which are in the journal by then.

        now_s  by the controller's clock. A node may fall silent, so its probe results expire by this clock
        """
        state = self._state
        self._events.report(sample, now_s)
        if state is None:
            return []
        if sample.steps:
            self._start_journal(state, sample.time_s)
        self._events.drift(sample.steps, sample.time_s)
        silent_before = state.silent_ranks
        steps = state.join(sample.steps, now_s)
        if state.silent_ranks != silent_before:
            self._events.silence(state, sample.time_s)
        state.add_report(sample, now_s)
        made = [self._add_step(state, step, When(step.step, now_s, sample.time_s)) for step in steps]
        for line in self._progress.due_lines(now_s, sample.time_s, state.facts):
            self._journal.write(line)
        return [decision for decision in made if decision is not None]

    def _add_step(self, state: WorkerGroupState | TriedCodecs, step: JoinedStep, at: When) -> Decision | None:
        """Take a joined step; return the decision that it causes, None for a sharded model."""
        self._last_step = step.step
        self._events.plan_of(step)
        if isinstance(state, TriedCodecs):
            self._add_to_trial(state, step, at)
            return None
        is_current = state.add_step(step, at.now_s)
        self._progress.add_step(step, state.speed_up if is_current else None, at.now_s)
        if not is_current:
            # A plan is on its way to the ranks. If the link changes meanwhile, it may be none for this link.
            return self._decide(state, at)
        self._write_outcome(state, step, at)
        guarded = self._policy.is_guarded
        decision = (self._guard(state, at) if guarded else None) or self._decide(state, at)
        decision = decision or (self._compare(state, at) if guarded else None)
        if state.may_accept:
            self.plans.append(state.accept())
        return decision

    def _add_to_trial(self, state: TriedCodecs, step: JoinedStep, at: When) -> None:
        before = state.plan
        for line in state.add_step(step, at):
            self._events.line(line)
        self._progress.add_step(step, state.speed_up if step.plan_version == before.version else None, at.now_s)
        if state.plan is not before:
            self.plans.append(state.plan)

    def add_fault(self, fault: Fault, time_s: float) -> None:
        """Note an error that ended the training on a rank. `time_s`: seconds since 1970."""
        if self._state is not None:
            self._start_journal(self._state, time_s)
        self._events.fault(fault, time_s)

    def end(self, time_s: float) -> History:
        """End the worker group at `time_s`, in seconds since 1970; return its history. Log the verdict.

        Reports that still come change nothing: the journal has its last line.
        """
        if not self.is_ended and self._state is not None:
            for line in self._progress.last_lines(time_s, self._state.facts):
                self._journal.write(line)
            if self._journal.totals.num_all:
                logger.info("%s. %s", self._journal.totals.verdict(), report_hint(self._journal))
        self.is_ended = True
        self._events.end(self._last_step, time_s)
        return self.history()

    def watch_samples(self, now_s: float, time_s: float) -> None:
        """Write it down if no samples have come for long. Called now and then, also when no monitor reports."""
        if self.is_registered and not self.is_ended:
            self._events.quiet(now_s, time_s)

    def look(self) -> dict[str, Any] | None:
        """Return what `cgx-ray top` shows, see `LiveState.fields`; None before the worker group has registered."""
        if not self.is_registered:
            return None
        is_on_one_node = self._events.is_on_one_node(self.plans[-1])
        newest, lines = self.plans[-KEPT_PLANS:], list(self._journal.recent)
        assert self._registration is not None
        link = self._registration.link_kind(self._live.nodes)
        return self._live.fields(self.facts(), newest, lines, link=link, is_on_one_node=is_on_one_node)

    def next_probe(self, node_id: str, now_s: float) -> str | None:
        """Return the node that `node_id` shall probe now; None if messages suffice or it is not its turn.

        now_s  by the controller's clock
        """
        return self._state.network.next_probe(node_id, now_s) if self._state is not None else None

    @property
    def is_registered(self) -> bool:
        return self._state is not None

    def facts(self) -> LoopFacts:
        """Return the network and the step times as they are known now. Call `register` before."""
        assert self._state is not None
        return replace(self._state.facts(), num_faults=dict(self._events.num_faults))

    def _write_outcome(self, state: WorkerGroupState, step: JoinedStep, at: When) -> None:
        """Compare the last decision's prediction with measured steps, once there are enough, and learn from them."""
        outcome = state.pending
        if outcome is None or not outcome.add_step(step):
            return
        self._journal.write(outcome.line(step.plan_version, at))
        state.end_outcome(outcome, at.now_s)

    def _guard(self, state: WorkerGroupState, at: When) -> Decision | None:
        """Keep the promise: leave a plan that is slower than dense. End measuring steps that are enough."""
        if state.measuring is not None:
            return self._end_measuring(state, state.measuring, at)
        slowdown = state.slowdown()
        if slowdown is None or not state.is_slow_for_long(slowdown):
            return None
        state.learn(at.now_s)
        return self._disable(state, state.plan, slowdown, at)

    def _compare(self, state: WorkerGroupState, at: When) -> Decision | None:
        """Measure some dense steps if those so far do not show whether the plan is slower than dense."""
        slowdown = state.slowdown()
        if slowdown is None or not state.steps.grants_comparison(slowdown, state.known()):
            return None
        state.learn(at.now_s)
        decision = replace_by_dense(state, f"compare with dense: measured {beside_dense(slowdown)}")
        state.measuring = MeasuringSteps(home=state.plan, record=state.steps.record)
        return self._apply(state, decision, state.known(), at, "dense_trial", "compare_with_dense")

    def _end_measuring(self, state: WorkerGroupState, measuring: MeasuringSteps, at: When) -> Decision | None:
        """Return to the plan before the measuring steps, or leave it for good, once there are enough of them."""
        measured = state.measured()
        if len(state.steps.record.window) < FEW or measured is None:
            return None
        state.measuring = None
        if measuring.codec is not None:
            state.steps.learn_trial(measuring.codec, measured)
            measured = state.known()
            asked = state.situation(f"{measuring.codec.describe()} is timed", measuring.home, measured, at.now_s)
            decision = self._ask(state, asked, at)
            if decision is not None and decision.kind == "replace":
                return self._apply(state, decision, measured, at, "policy", "trial_ended", asked=asked)
        # If the slowdown of compute has changed, the steps of the plan at home are first paired again; then the guard
        # judges them.
        elif not state.steps.has_old_pairs:
            slowdown = state.steps.slowdown(measuring.record, measured)
            if verdict(slowdown, MAX_SLOWDOWN, COMPARED) is Verdict.SLOW:
                return self._disable(state, measuring.home, slowdown, at)
        home = return_home(state, measuring)
        return self._apply(state, home, measured, at, "return", "trial_ended", ended=measuring)

    def _disable(self, state: WorkerGroupState, failed: Plan, slowdown: Evidence, at: When) -> Decision:
        """Go back to dense, and remember the errors of `failed` for longer."""
        state.steps.errors.remember_longer()
        # A plan with nothing but hierarchical groups may leave the link unmeasured. Then the last measurements count.
        measured = state.known()
        state.failed = failed.describe()
        reason = f"{state.failed} was {beside_dense(slowdown)}"
        state.counts.add_revert("slower_than_dense")
        return self._apply(state, disable(state, reason), measured, at, "guard", "slower_than_dense")

    def _decide(self, state: WorkerGroupState, at: When) -> Decision | None:
        """Ask the policy if there is a cause, and time a codec if it changes nothing."""
        if not self._policy.decides:
            return None
        own = state.measured()
        measured = own or state.on_link_of_now()
        cause = state.cause(at.now_s, measured, self._policy.review_s) if measured is not None else None
        # Before a plan's own steps are measured, only another link is a reason to leave it.
        if measured is None or cause is None or (own is None and cause.kind != "network"):
            return None
        state.learn(at.now_s)
        measured = state.known()
        if self._policy.is_guarded:
            if state.measuring is None:
                state.bans.add(state.costly_options(measured, self._policy.options), at.now_s)
            measured = replace(measured, max_period=state.max_period)
        # On another link measuring steps say nothing.
        measuring, state.measuring = state.measuring, None
        home = measuring.home if measuring is not None else state.plan
        asked = state.situation(cause.text, home, measured, at.now_s)
        decision = self._ask(state, asked, at)
        if measuring is not None and (decision is None or decision.kind == "keep"):
            return self._apply(state, return_home(state, measuring, cause.text), measured, at, "return", cause.kind)
        if decision is None:
            return None
        trial = codec_trial(self._policy, asked, decision) if decision.kind == "keep" else None
        if trial is not None:
            codec, decision = trial
            state.measuring = MeasuringSteps(home=state.plan, record=state.steps.record, codec=codec)
            return self._apply(state, decision, measured, at, "codec_trial", cause.kind, asked=asked)
        return self._apply(state, decision, measured, at, "policy", cause.kind, asked=asked)

    def _ask(self, state: WorkerGroupState, situation: Situation, at: When) -> Decision | None:
        """Return the policy's decision, None if it fails: then the plan in force stays."""
        try:
            decision = self._policy.decide(situation)
            if decision is not None:
                situation.check(decision)
        except Exception as error:  # noqa: BLE001 - of a policy that anyone may have written: training goes on
            self._events.policy_error(error, at.step, at.time_s)
            return None
        if decision is not None and decision.kind == "replace" and self._policy.is_guarded:
            # Only steps under an option show how much it really keeps.
            state.bans.add(state.fallen_options(situation.planner_input.now), at.now_s)
        return decision

    def _apply(
        self,
        state: WorkerGroupState,
        decision: Decision,
        measured: Measured,
        at: When,
        made_by: MadeBy,
        cause: CauseKind,
        *,
        asked: Situation | None = None,
        ended: MeasuringSteps | None = None,
    ) -> Decision:
        """Put `decision` in force and write it down.

        asked  given to the policy, if the policy was asked
        ended  as in `WorkerGroupState.apply`
        """
        old, is_planned = state.plan, made_by in ("policy", "codec_trial")
        situation = asked or state.situation(decision.reason, old, measured, at.now_s)
        if decision.kind == "replace":
            decision = replace(decision, plan=state.leased(decision.plan, at.step, decision.step_s))
        state.apply(decision, measured, at.now_s, is_planned=is_planned, ended=ended)
        if state.plan is not old:
            self.plans.append(state.plan)
        state.counts.add_decision(decision.kind, cause, at.time_s)
        entry = decision_entry(
            decision,
            old=old,
            new=state.plan,
            measured=measured,
            situation=situation,
            made_by=made_by,
            on_one_node=self._events.is_on_one_node(state.plan),
            step=at.step,
            time_s=at.time_s,
        )
        codec = state.measuring.codec if state.measuring is not None else None
        self._events.decision(entry, codec.describe() if codec is not None else None)
        return decision
