"""The controller: one actor per worker group that takes reports, has the control loop decide, and hands out plans."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import ray

from cgx_ray.control.history import History, Registration
from cgx_ray.control.journal.facts import LoopFacts
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.loop_process import LoopProcess, LoopStart, News
from cgx_ray.control.policies.policy import Policy
from cgx_ray.logs import show_lines
from cgx_ray.monitors.controller_metrics import ControllerMetrics
from cgx_ray.monitors.ray_sink import RaySink
from cgx_ray.monitors.sample import Fault
from cgx_ray.plan import Plan

logger = logging.getLogger(__name__)

# Calls without an answer from the loop, nearly all of them reports, beyond which senders wait: four seconds of 512
# nodes, about 100 MB.
MAX_WAITING_REPORTS = 2048
# Reports have a thread of their own, so that no other call holds them up. Other calls share a few.
_REPORTS = "reports"
_OTHER_THREADS = 8
# Options of the actor. An event per report would cost the controller of many nodes a tenth of its time, and fill Ray's
# list of tasks.
ACTOR_OPTIONS: Mapping[str, Any] = {
    "num_cpus": 0,
    "max_concurrency": _OTHER_THREADS,
    "concurrency_groups": {_REPORTS: 1},
    "enable_task_events": False,
}


class Controller:
    """Made an actor by `ray.remote` with ACTOR_OPTIONS. Its methods run on threads.

    The control loop, with the search for plans, is in a process of its own (`loop_process`), which takes work in the
    order in which it came. So decisions are the same however long each takes, and this process answers meanwhile: it
    has the plans that are in the snapshot, and what reports were answered.

    It lives as long as one worker group. Ray starts it again if one of the two processes dies. Then it goes on with
    the last snapshot of its history. Meanwhile ranks keep their plan, or return from a trial.
    """

    _loop_type: ClassVar[type[ControlLoop]] = ControlLoop

    def __init__(
        self,
        policy: Policy,
        journal_path: str,
        run_name: str,
        run_id: str,
        snapshot_path: str,
        history: History | None = None,
        nodes: Sequence[str] = (),
    ) -> None:
        """Arguments are those of `LoopStart`."""
        show_lines()
        self._metrics = ControllerMetrics(RaySink(), run_name, run_id, journal=journal_path)
        self._plans: tuple[Plan, ...] = ()
        # By node, what its reports were answered since the last one: the node to probe, or an error.
        self._orders: dict[str, str] = {}
        self._errors: dict[str, BaseException] = {}
        self._has_logged = False
        start = LoopStart(
            policy=policy,
            journal_path=Path(journal_path),
            snapshot_path=Path(snapshot_path),
            run_name=run_name,
            history=history,
            nodes=nodes,
            loop_type=self._loop_type,
        )
        self._loop = LoopProcess(start, self._take, self._end)

    def register(self, registration: Registration) -> Plan:
        """Start the worker group; return its first plan. See `ControlLoop.register`."""
        plan: Plan = self._loop.ask("register", registration, time.monotonic(), time.time()).result()
        return plan

    def end(self) -> History:
        """End the worker group; return all that the controller of the next one shall start with. Called last."""
        history: History = self._loop.ask("end", time.time()).result()
        return history

    @ray.method(concurrency_group=_REPORTS)
    def observe(self, node_id: str, report: bytes, newest: int) -> tuple[str | None, list[Plan]] | None:
        """Have the loop add a node's report, and decide if there is a cause.

        report  a pickled NodeSample; the loop's process unpickles it
        newest  version of the newest plan that the node's agent holds, -1 for none

        Returns the node that this one shall probe now, or None, and the plans that its agent lacks; None for neither,
        which Ray does not pickle. Raises CGXError if the loop has met an error. Order and error are about the node's
        report before: this one waits for its turn. If too many do, all senders wait until the loop has taken this one.
        """
        call = self._loop.ask("add_report", node_id, report, time.monotonic())
        call.add_done_callback(partial(self._keep_answer, node_id))
        if self._loop.num_waiting > MAX_WAITING_REPORTS:
            concurrent.futures.wait([call])
        plans = self.plans_after(newest)
        # An error waits for the next report while there are plans: an answer has one or the other.
        if not plans and (error := self._errors.pop(node_id, None)) is not None:
            raise error
        order = self._orders.pop(node_id, None)
        return (order, plans) if order is not None or plans else None

    def report_fault(self, fault: Fault) -> None:
        """Count an error that has ended the training on a rank, and write it down."""
        self._loop.ask("add_fault", fault, time.time()).result()

    def look(self) -> dict[str, Any] | None:
        """Return what `cgx-ray top` shows, see `LiveState.fields`; None before the worker group has registered."""
        fields: dict[str, Any] | None = self._loop.ask("look").result()
        return fields

    def plans_after(self, version: int) -> list[Plan]:
        """Return the plans newer than `version`, oldest first."""
        return [plan for plan in self._plans if plan.version > version]

    def _keep_answer(self, node_id: str, call: Future[str | None]) -> None:
        """Keep the loop's answer for the node's next report."""
        if (error := call.exception()) is not None:
            self._errors[node_id] = error
        elif (order := call.result()) is not None:
            self._orders[node_id] = order

    def _take(self, news: News) -> None:
        """Keep new plans for the answers to reports, and set the metrics."""
        if news.plans is not None:
            self._plans = news.plans
        if news.facts is not None:
            self._set_metrics(*news.facts)

    def _set_metrics(self, facts: LoopFacts, num_journal_errors: int) -> None:
        """Set the metrics. Decisions go on without them: the first error is logged."""
        try:
            self._metrics.export(facts, num_journal_errors)
        except Exception as error:
            if not self._has_logged:
                self._has_logged = True
                logger.error("metrics of the run could not be set (%r); decisions go on", error, exc_info=error)

    def _end(self) -> None:
        """End this process, as the loop's process has ended."""
        os._exit(1)
