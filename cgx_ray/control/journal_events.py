"""Lines of the journal beside outcomes: start and end, decisions, silent ranks, faults; most are logged too."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from cgx_ray.control.group_reports import GroupReports
from cgx_ray.control.history import Registration
from cgx_ray.control.joined_steps import AWAITED_S, JoinedStep
from cgx_ray.control.journal.lines import (
    Journal,
    drift_entry,
    end_entry,
    fault_entry,
    no_samples_entry,
    policy_error_entry,
    silence_entry,
    start_entry,
)
from cgx_ray.control.journal.sentences import decision_line
from cgx_ray.control.policies.policy import Policy
from cgx_ray.errors import listed
from cgx_ray.monitors.sample import Fault, NodeSample, NodeStep
from cgx_ray.plan import Plan

logger = logging.getLogger(__name__)

# Faults per worker group that are written down. One rank's error makes all others fail too, a moment later.
MAX_FAULTS = 8
# Growth of the difference of the ranks' weights between two lines.
DRIFT_GROWTH = 2.0
# Seconds without a sample of any rank that are worth a line: a checkpoint or an evaluation usually takes less.
NO_SAMPLES_S = 60.0


class JournalEvents:
    """Writes each of these lines once per cause. Times `time_s` are in seconds since 1970, `now_s` monotonic.

    num_faults  errors that ended the training on a rank, by rank and kind, over all worker groups
    """

    def __init__(self, journal: Journal, nodes: Sequence[str], num_faults: Mapping[tuple[int, str], int]) -> None:
        """
        nodes       address of each rank's node
        num_faults  those of the controllers before
        """
        self.num_faults: Counter[tuple[int, str]] = Counter(num_faults)
        self._journal = journal
        self._nodes = tuple(nodes)
        self._named_silent: frozenset[int] = frozenset()
        # When the last sample of a step came; at first, when samples were first waited for.
        self._sampled_s: float | None = None
        self._reported_s: dict[str, float] = {}
        self._is_quiet = False
        self.start_group()

    def start_group(self) -> None:
        """Begin with a new worker group."""
        self._is_started = False
        self._num_fault_lines = 0
        self._last_step = -1
        self._policy_errors: set[type[Exception]] = set()
        self._weight_drift = 0.0
        # Decisions whose plan no step has had yet, by its version, each with the codec that it times.
        self._coming: dict[int, tuple[dict[str, Any], str | None]] = {}
        # Ranks that share memory on the node that has reported last.
        self._num_local = 1

    def start(self, policy: Policy, state: GroupReports, registration: Registration, time_s: float) -> None:
        """Write the first line of a worker group, once."""
        if self._is_started:
            return
        self._is_started = True
        entry = start_entry(
            policy,
            state.layers,
            state.plan,
            registration.codec_costs,
            registration.encodes_on,
            nodes=self._nodes,
            link=registration.link_kind(self._nodes),
            on_one_node=self.is_on_one_node(state.plan),
            time_s=time_s,
        )
        self._journal.write(entry)

    def is_on_one_node(self, plan: Plan) -> bool:
        """Return whether all ranks of `plan` share memory."""
        return self._num_local == plan.world_size

    def decision(self, entry: dict[str, Any], codec: str | None) -> None:
        """Write a decision down. `codec`: timed by it. The log says it once, when its plan comes into force."""
        self._journal.write(entry)
        logger.debug("%s", decision_line(entry, codec))
        if entry["kind"] != "keep":
            self._coming[entry["new"]["version"]] = entry, codec

    def line(self, entry: dict[str, Any]) -> None:
        """Write a line of a trial down, a decision as `decision` does."""
        if entry["event"] == "decision":
            self.decision(entry, None)
        else:
            self._journal.write(entry)

    def plan_of(self, step: JoinedStep) -> None:
        """Log the decision for the plan of `step` if that is the first step under it."""
        if step.plan_version in self._coming:
            first_step = step.step - step.num_steps + 1
            logger.info("%s", decision_line(*self._coming[step.plan_version], first_step=first_step))
        # Of those before it, a later one has taken the place.
        self._coming = {version: one for version, one in self._coming.items() if version > step.plan_version}

    def silence(self, state: GroupReports, time_s: float) -> None:
        """Write down which ranks are silent now, and log each rank the first time."""
        self._journal.write(silence_entry(state.silent_ranks, step=state.last_step, time_s=time_s))
        new = state.silent_ranks - self._named_silent
        if new:
            self._named_silent |= new
            logger.warning(
                "no samples of ranks %s for %g s: decisions are made from the other ranks' until they report again. "
                "Their monitor, or its way to the controller, is slow or gone",
                listed([str(rank) for rank in sorted(new)]),
                AWAITED_S,
            )

    def report(self, sample: NodeSample, now_s: float) -> None:
        """Note that a node has reported."""
        self._reported_s[sample.node_id] = now_s
        if sample.steps:
            self._sampled_s = now_s
            self._num_local = sample.steps[-1].num_local
            self._last_step = max(self._last_step, *(step.step for step in sample.steps))

    def quiet(self, now_s: float, time_s: float) -> None:
        """Write down that no samples have come for NO_SAMPLES_S, once until they come again. Call it now and then."""
        if self._sampled_s is None:
            self._sampled_s = now_s
        seconds = now_s - self._sampled_s
        was_quiet, self._is_quiet = self._is_quiet, seconds >= NO_SAMPLES_S
        if was_quiet or not self._is_quiet:
            return
        nodes = sorted(node for node, seen_s in self._reported_s.items() if now_s - seen_s >= NO_SAMPLES_S)
        self._journal.write(no_samples_entry(seconds, nodes, step=self._last_step, time_s=time_s))
        logger.warning(
            "no samples for %.0f s: the plan in force stays until they come again. Either no rank trains, or the "
            "monitors do not report; nodes that have stopped to report: %s",
            seconds,
            listed(nodes) or "none",
        )

    def policy_error(self, error: Exception, step: int, time_s: float) -> None:
        """Write down and log that the policy has failed, once per type of error."""
        if type(error) in self._policy_errors:
            return
        self._policy_errors.add(type(error))
        self._journal.write(policy_error_entry(error, step=step, time_s=time_s))
        logger.error(
            "the policy has failed after step %d (%r): the plan in force stays, and the policy is asked again; later "
            "errors of this type are not logged",
            step,
            error,
            exc_info=error,
        )

    def drift(self, steps: Sequence[NodeStep], time_s: float) -> None:
        """Write down how much the ranks' weights differ, if that is much more than before."""
        for step in steps:
            if step.weight_drift and step.weight_drift >= DRIFT_GROWTH * self._weight_drift:
                self._weight_drift = step.weight_drift
                self._journal.write(drift_entry(step.weight_drift, step=step.step, time_s=time_s))

    def fault(self, fault: Fault, time_s: float) -> None:
        """Count an error that ended the training on a rank; write down the first MAX_FAULTS of a worker group."""
        self.num_faults[fault.rank, fault.kind] += 1
        self._num_fault_lines += 1
        if self._num_fault_lines <= MAX_FAULTS:
            self._journal.write(fault_entry(fault, time_s=time_s))

    def end(self, step: int | None, time_s: float) -> None:
        """Write the last line of a worker group, if it has a first one. `step`: the last one that was joined."""
        if self._is_started:
            self._journal.write(end_entry(step=step, newest_step=self._last_step, time_s=time_s))
