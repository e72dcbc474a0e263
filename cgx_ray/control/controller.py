"""The controller: one actor per worker group that holds the control loop and hands out plans."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cgx_ray.control.history import KEPT_PLANS, History, Snapshot
from cgx_ray.control.journal import QueuedJournal
from cgx_ray.control.live_state import LiveState
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policy import Decision, Policy
from cgx_ray.control.sample_watch import SampleWatch
from cgx_ray.control.step_ring import StepRing
from cgx_ray.monitors.controller_metrics import ControllerMetrics
from cgx_ray.monitors.ray_sink import RaySink
from cgx_ray.monitors.sample import Fault, NodeSample
from cgx_ray.plan import Layer, Plan
from cgx_ray.planner.cost import Link
from cgx_ray.planner.legs import EncodesOn
from cgx_ray.planner.options import CodecCost

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between two snapshots of the history without a new plan: as much may be learned again after a crash.
SNAPSHOT_INTERVAL_S = 60.0
# Longest wait for the last lines of the journal, in seconds. They take milliseconds unless the file system hangs.
# Less than callers wait for an answer, see HISTORY_TIMEOUT_S and FAULT_S of `ray_train`.
FLUSH_S = 2.0
# Seconds between two settings of all metrics: as often as nodes report.
METRICS_INTERVAL_S = 1.0
# Reports that may wait for the thread before their senders wait too: four seconds of 512 nodes, about 100 MB.
MAX_WAITING_REPORTS = 2048
# Seconds for which reports are gathered before the thread takes them together. To hand over each by itself cost the
# controller of 512 nodes as much as what the thread does with it.
GATHER_S = 0.02
# Longest turn of a thread while another one waits for the interpreter, in seconds; Python's own is 5 ms. The event loop
# needs several turns per report, so beside a search for plans it would answer no more than some dozens per second.
TURN_S = 5e-4
# Objects made between two collections, and collections between two of older objects. Reports of thousands of ranks make
# a million objects in ten seconds, hardly any of them in a cycle; Python's own 700 cost a third of the thread's time.
GC_THRESHOLDS = 50_000, 20, 20


class _Answer(NamedTuple):
    """Answer to a node's report: the node to probe, None, or an error."""

    node_id: str
    found: str | BaseException | None


class Controller:
    """Made an actor by `ray.remote`. Its methods run on one event loop, one at a time between awaits.

    The loop's work, with the search for plans, is done by one thread in the order in which it came. So decisions are
    the same however long each takes, and the event loop answers meanwhile. Everything that the thread uses is its own;
    the event loop has the plans that are in the snapshot, and what reports were answered.

    It lives as long as one worker group. Ray starts it again if its process dies. Then it goes on with the last
    snapshot of its history. Meanwhile ranks keep their plan, or return from a trial.
    """

    def __init__(
        self,
        policy: Policy,
        journal_path: str,
        run_name: str,
        run_id: str,
        snapshot_path: str,
        history: History | None = None,
        nodes: Sequence[str] = (),
        ring_bytes: int = 0,
    ) -> None:
        """
        snapshot_path  of a file that no other controller uses
        history        that of the previous worker group's controller, None for the first
        nodes          address of each rank's node
        ring_bytes     of the files beside the journal that keep joined steps for a replay; 0 keeps none
        """
        logging.basicConfig(level=logging.INFO)
        self._journal = QueuedJournal(Path(journal_path))
        self._samples = SampleWatch(self._journal)
        self._snapshot = Snapshot(Path(snapshot_path))
        own = self._snapshot.read()
        ring = StepRing(Path(journal_path).parent, ring_bytes) if ring_bytes else None
        self._loop = ControlLoop(policy, self._journal, own or history, nodes=nodes, ring=ring)
        self._plans = tuple(self._loop.plans)
        if own is not None:
            logger.warning("the controller was started again and goes on with plan %d", own.plans[-1].version)
            self._loop.resume()
        self._live = LiveState(run_name, nodes)
        self._metrics = ControllerMetrics(RaySink(), run_name, run_id)
        self._metrics_s = 0.0
        # Newest plan in the snapshot, and when it was written.
        self._kept: tuple[int, float] = (-1, 0.0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cgx-ray-loop")
        self._is_ended = False
        # Of the event loop: the newest plan that long polls were told of, what wakes them, the reports that the thread
        # has not been given yet, and by node the answer to its report before.
        self._told = self._plans
        self._changed = asyncio.Event()
        self._num_waiting = 0
        self._gathered: list[tuple[NodeSample, float]] = []
        self._orders: dict[str, str] = {}
        self._errors: dict[str, BaseException] = {}
        self._logged: set[type[BaseException]] = set()
        sys.setswitchinterval(TURN_S)
        # What Ray and numpy have made by now stays. Collections that go through it hold up all threads meanwhile.
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)

    async def register(
        self,
        layers: Sequence[Layer],
        first_plan: Plan,
        codec_costs: Mapping[str, CodecCost],
        encodes_on: EncodesOn,
        step: int,
        bus: Link | None = None,
    ) -> Plan:
        """Start the worker group; return its first plan. See `ControlLoop.register`."""
        now_s = time.monotonic()

        def work() -> Plan:
            plan = self._loop.register(
                layers, first_plan, codec_costs, encodes_on, bus=bus, step=step, now_s=now_s, time_s=time.time()
            )
            self._keep(now_s)
            return plan

        plan = await self._in_thread(work)
        self._tell()
        return plan

    async def history(self) -> History:
        """Return all that the controller of the next worker group shall start with. Called last.

        Reports that still come change nothing: the journal has its last line, and the snapshot's folder is about to be
        removed.
        """

        def work() -> History:
            self._is_ended = True
            self._loop.end(time.time())
            self._journal.flush(FLUSH_S)
            return self._loop.history()

        return await self._in_thread(work)

    async def observe(self, sample: NodeSample) -> str | None:
        """Have the thread add a node's report, and decide if there is a cause.

        Returns the node that this one shall probe now, or None. Raises the error that the thread met. Both are about
        the node's report before: this one waits for its turn, and only its sender waits with it if too many do.
        """
        if not self._gathered:
            asyncio.get_running_loop().call_later(GATHER_S, self._hand_over)
        self._gathered.append((sample, time.monotonic()))
        self._num_waiting += 1
        if self._num_waiting > MAX_WAITING_REPORTS:
            await asyncio.wait([self._hand_over()])
        if (error := self._errors.pop(sample.node_id, None)) is not None:
            raise error
        return self._orders.pop(sample.node_id, None)

    async def report_fault(self, fault: Fault) -> None:
        """Count an error that has ended the training on a rank, and write it down."""

        def work() -> None:
            self._loop.add_fault(fault, time.time())
            # This process may be ended as soon as it has answered.
            self._journal.flush(FLUSH_S)
            if self._loop.is_registered:
                self._metrics.export(self._loop.facts(), self._journal.num_errors)

        await self._in_thread(work)

    async def look(self) -> dict[str, Any] | None:
        """Return what `cgx-ray top` shows, see `LiveState.fields`; None before the worker group has registered."""

        def work() -> dict[str, Any] | None:
            return self._live.fields(self._loop, list(self._journal.recent)) if self._loop.is_registered else None

        return await self._in_thread(work)

    async def plans_after(self, version: int, timeout_s: float) -> list[Plan]:
        """Return the plans newer than `version`, oldest first; wait up to `timeout_s` for one, then return none."""
        # Ranks ask here every few seconds, also when no monitor reports.
        self._samples.look(time.monotonic(), time.time())
        try:
            async with asyncio.timeout(timeout_s):
                while not self._newer(version):
                    await self._changed.wait()
        except TimeoutError:
            return []
        return self._newer(version)

    def _newer(self, version: int) -> list[Plan]:
        return [plan for plan in self._told if plan.version > version]

    def _in_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """Have `work` done after all that was given to the thread before."""
        self._hand_over()
        return asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _hand_over(self) -> asyncio.Future[list[_Answer]]:
        """Give the thread the reports that were gathered."""
        reports, self._gathered = self._gathered, []
        work = asyncio.get_running_loop().run_in_executor(self._thread, self._add_reports, reports)
        work.add_done_callback(self._end_reports)
        return work

    def _end_reports(self, work: asyncio.Future[list[_Answer]]) -> None:
        """Tell the ranks of new plans, and keep the answers for the nodes' next reports."""
        self._tell()
        for answer in work.result():
            self._num_waiting -= 1
            if isinstance(answer.found, BaseException):
                self._errors[answer.node_id] = answer.found
                self._log_once(answer.node_id, answer.found)
            elif answer.found is not None:
                self._orders[answer.node_id] = answer.found

    def _log_once(self, node_id: str, error: BaseException) -> None:
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

    def _tell(self) -> None:
        """Wake the long polls if there is a new plan in the snapshot."""
        if self._told is not self._plans:
            self._told = self._plans
            self._changed.set()
            self._changed = asyncio.Event()

    # Called by the thread.

    def _add_reports(self, reports: Sequence[tuple[NodeSample, float]]) -> list[_Answer]:
        """Add reports, each with the time at which it was received."""
        return [_Answer(sample.node_id, self._answer(sample, now_s)) for sample, now_s in reports]

    def _answer(self, sample: NodeSample, now_s: float) -> str | BaseException | None:
        """Return the node that a report's sender shall probe next, or None; or the error that the report has met."""
        try:
            return self._add_report(sample, now_s)
        except Exception as error:  # noqa: BLE001 - told to the sender, and logged
            return error

    def _add_report(self, sample: NodeSample, now_s: float) -> str | None:
        """Add a node's report, received at `now_s`; return the node that it shall probe next."""
        if self._is_ended:
            return None
        self._live.add(sample)
        self._samples.add(sample, now_s)
        for decision in self._decide(sample, now_s):
            logger.info("%s: %s", type(decision).__name__.lower(), decision.reason)
        if self._loop.is_registered:
            self._keep(now_s)
            if now_s >= self._metrics_s + METRICS_INTERVAL_S:
                self._metrics_s = now_s
                self._metrics.export(self._loop.facts(), self._journal.num_errors)
        return self._loop.next_probe(sample.node_id, now_s)

    def _decide(self, sample: NodeSample, now_s: float) -> list[Decision]:
        return self._loop.observe(sample, now_s)

    def _keep(self, now_s: float) -> None:
        """Write a snapshot if there is a new plan, before any rank may hear of it, or if the last one is old."""
        if self._is_ended:
            return
        newest, kept_s = self._loop.plans[-1].version, self._kept[1]
        if newest != self._kept[0] or now_s >= kept_s + SNAPSHOT_INTERVAL_S:
            self._snapshot.write(self._loop.history())
            if newest != self._kept[0]:
                self._plans = tuple(self._loop.plans[-KEPT_PLANS:])
            self._kept = newest, now_s
