"""Work that the process of the control loop does: reports in, plans, answers and facts out. It uses no Ray."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cgx_ray.control.history import KEPT_PLANS, History, Snapshot
from cgx_ray.control.journal.facts import LoopFacts
from cgx_ray.control.journal.lines import Journal, QueuedJournal, no_samples_entry
from cgx_ray.control.live_state import LiveState
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.policy import Decision, Policy
from cgx_ray.errors import listed
from cgx_ray.monitors.sample import Fault, NodeSample
from cgx_ray.plan import Layer, Plan
from cgx_ray.planner.cost import Link
from cgx_ray.planner.legs import EncodesOn
from cgx_ray.planner.options import CodecCost

logger = logging.getLogger(__name__)

# Seconds without a sample of any rank that are worth a line: a checkpoint or an evaluation usually takes less.
NO_SAMPLES_S = 60.0


# Seconds between two snapshots of the history without a new plan: as much may be learned again after a crash.
SNAPSHOT_INTERVAL_S = 60.0
# Longest wait for the last lines of the journal, in seconds. They take milliseconds unless the file system hangs.
# Less than callers wait for an answer, see HISTORY_TIMEOUT_S and FAULT_S of `ray_train`.
FLUSH_S = 2.0
# Seconds between two settings of all metrics: as often as nodes report.
METRICS_INTERVAL_S = 1.0


class SampleWatch:
    """Knows when ranks and monitors have reported last. Any thread may use it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        # When the last sample of a step came; at first, when samples were first waited for.
        self._sampled_s: float | None = None
        self._last_step = -1
        self._reported_s: dict[str, float] = {}
        self._is_noted = False

    def add(self, sample: NodeSample, now_s: float) -> None:
        """Note that a node has reported."""
        self._reported_s[sample.node_id] = now_s
        if sample.steps:
            self._sampled_s = now_s
            self._last_step = max(self._last_step, *(step.step for step in sample.steps))

    def look(self, now_s: float, time_s: float) -> None:
        """Write down that no samples have come for NO_SAMPLES_S, once until they come again. Call it now and then."""
        if self._sampled_s is None:
            self._sampled_s = now_s
        seconds = now_s - self._sampled_s
        was_noted, self._is_noted = self._is_noted, seconds >= NO_SAMPLES_S
        if was_noted or not self._is_noted:
            return
        quiet = sorted(node for node, seen_s in dict(self._reported_s).items() if now_s - seen_s >= NO_SAMPLES_S)
        self._journal.write(no_samples_entry(seconds, quiet, step=self._last_step, time_s=time_s))
        logger.warning(
            "no samples for %.0f s: the plan in force stays until they come again. Either no rank trains, or the "
            "monitors do not report; nodes that have stopped to report: %s",
            seconds,
            listed(quiet) or "none",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Values that have changed since the news before.

    plans  in the snapshot, oldest first, if there is a new one
    facts  for the metrics, with the number of lines that the journal has lost
    """

    plans: tuple[Plan, ...] | None = None
    facts: tuple[LoopFacts, int] | None = None


class LoopWork:
    """Holds the control loop and its files. Methods are called one at a time, in the order in which work came.

    It uses no clock of its own. In all methods `now_s` is by the monotonic clock, `time_s` in seconds since 1970.
    """

    def __init__(
        self,
        policy: Policy,
        journal_path: str,
        run_name: str,
        snapshot_path: str,
        history: History | None,
        nodes: Sequence[str],
    ) -> None:
        """Go on from the snapshot, if there is one, else from `history`. Arguments are those of `Controller`."""
        self._journal = QueuedJournal(Path(journal_path))
        self._samples = SampleWatch(self._journal)
        self._snapshot = Snapshot(Path(snapshot_path))
        own = self._snapshot.read()
        self._loop = ControlLoop(policy, self._journal, own or history, nodes=nodes)
        self._live = LiveState(run_name, nodes)
        self._is_ended = False
        self._logged: set[type[Exception]] = set()
        # Newest plan in the snapshot, and when it was written.
        self._kept: tuple[int, float] = (-1, 0.0)
        self._facts_s = 0.0
        self._news = News(plans=tuple(self._loop.plans))
        if own is not None:
            logger.warning("the controller was started again and goes on with plan %d", own.plans[-1].version)
            self._loop.resume()

    def news(self) -> News:
        """Return what has changed since the last call."""
        news, self._news = self._news, News()
        return news

    def register(
        self,
        layers: Sequence[Layer],
        first_plan: Plan,
        codec_costs: Mapping[str, CodecCost],
        encodes_on: EncodesOn,
        step: int,
        bus: Link | None,
        now_s: float,
        time_s: float,
    ) -> Plan:
        """Start the worker group; return its first plan. See `ControlLoop.register`."""
        plan = self._loop.register(
            layers, first_plan, codec_costs, encodes_on, bus=bus, step=step, now_s=now_s, time_s=time_s
        )
        self._keep(now_s)
        return plan

    def history(self, time_s: float) -> History:
        """End the worker group. Reports that still come change nothing: the journal has its last line."""
        self._is_ended = True
        self._loop.end(time_s)
        self._journal.flush(FLUSH_S)
        return self._loop.history()

    def add_report(self, node_id: str, data: bytes, now_s: float) -> str | None:
        """Add a node's report, a pickled NodeSample received at `now_s`; return the node that it shall probe next.

        The first error of each type is logged, and all are raised.
        """
        if self._is_ended:
            return None
        try:
            self._add(pickle.loads(data), now_s)
            return self._loop.next_probe(node_id, now_s)
        except Exception as error:
            self._log_once(node_id, error)
            raise

    def add_fault(self, fault: Fault, time_s: float) -> None:
        """Count an error that has ended the training on a rank, and write it down."""
        self._loop.add_fault(fault, time_s)
        # This process may be ended as soon as it has answered.
        self._journal.flush(FLUSH_S)
        if self._loop.is_registered:
            self._tell_facts()

    def look(self) -> dict[str, Any] | None:
        """Return what `cgx-ray top` shows, see `LiveState.fields`; None before the worker group has registered."""
        return self._live.fields(self._loop, list(self._journal.recent)) if self._loop.is_registered else None

    def watch_samples(self, now_s: float, time_s: float) -> None:
        """Write it down if no samples have come for long. Called now and then, also when no monitor reports."""
        if self._loop.is_registered and not self._is_ended:
            self._samples.look(now_s, time_s)

    def _add(self, sample: NodeSample, now_s: float) -> None:
        self._live.add(sample)
        self._samples.add(sample, now_s)
        for decision in self._decide(sample, now_s):
            logger.info("%s: %s", decision.kind, decision.reason)
        if not self._loop.is_registered:
            return
        self._keep(now_s)
        if now_s >= self._facts_s + METRICS_INTERVAL_S:
            self._facts_s = now_s
            self._tell_facts()

    def _decide(self, sample: NodeSample, now_s: float) -> list[Decision]:
        return self._loop.observe(sample, now_s)

    def _keep(self, now_s: float) -> None:
        """Write a snapshot if there is a new plan, before any rank may hear of it, or if the last one is old."""
        if self._is_ended:
            # The snapshot's folder may have been removed.
            return
        newest, kept_s = self._loop.plans[-1].version, self._kept[1]
        is_new = newest != self._kept[0]
        if is_new or now_s >= kept_s + SNAPSHOT_INTERVAL_S:
            self._snapshot.write(self._loop.history())
            self._kept = newest, now_s
        if is_new:
            self._news = replace(self._news, plans=tuple(self._loop.plans[-KEPT_PLANS:]))

    def _tell_facts(self) -> None:
        self._news = replace(self._news, facts=(self._loop.facts(), self._journal.num_errors))

    def _log_once(self, node_id: str, error: Exception) -> None:
        """Log the first error of its type."""
        if type(error) in self._logged:
            return
        self._logged.add(type(error))
        logger.error(
            "a report of node %s could not be used (%r); training goes on, later errors of this type are told to the "
            "node only",
            node_id,
            error,
            exc_info=error,
        )
