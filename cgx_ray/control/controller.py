"""The controller: one actor per worker group that holds the control loop and hands out plans."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cgx_ray.control.history import History, Snapshot
from cgx_ray.control.journal import Journal
from cgx_ray.control.live_state import LiveState
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policy import Policy
from cgx_ray.control.step_ring import StepRing
from cgx_ray.monitors.controller_metrics import ControllerMetrics
from cgx_ray.monitors.ray_sink import RaySink
from cgx_ray.monitors.sample import Fault, NodeSample
from cgx_ray.plan import Layer, Plan
from cgx_ray.planner.legs import EncodesOn
from cgx_ray.planner.options import CodecCost

logger = logging.getLogger(__name__)

# Seconds between two snapshots of the history without a new plan: as much may be learned again after a crash.
SNAPSHOT_INTERVAL_S = 60.0


class Controller:
    """Made an actor by `ray.remote`. Its methods run on one event loop, one at a time between awaits.

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
        self._journal = Journal(Path(journal_path))
        self._snapshot = Snapshot(Path(snapshot_path))
        own = self._snapshot.read()
        ring = StepRing(Path(journal_path).parent, ring_bytes) if ring_bytes else None
        self._loop = ControlLoop(policy, self._journal, own or history, nodes=nodes, ring=ring)
        if own is not None:
            logger.warning("the controller was started again and goes on with plan %d", own.plans[-1].version)
            self._loop.resume()
        self._live = LiveState(run_name, nodes)
        self._metrics = ControllerMetrics(RaySink(), run_name, run_id)
        self._changed = asyncio.Event()
        # Newest plan in the snapshot, and when it was written.
        self._kept: tuple[int, float] = (-1, 0.0)

    async def register(
        self,
        layers: Sequence[Layer],
        first_plan: Plan,
        codec_costs: Mapping[str, CodecCost],
        encodes_on: EncodesOn,
        step: int,
    ) -> Plan:
        """Start the worker group; return its first plan. See `ControlLoop.register`."""
        now_s = time.monotonic()
        plan = self._loop.register(
            layers, first_plan, codec_costs, encodes_on, step=step, now_s=now_s, time_s=time.time()
        )
        self._keep(now_s)
        return plan

    async def history(self) -> History:
        """Return all that the controller of the next worker group shall start with. Called last."""
        self._loop.end(time.time())
        return self._loop.history()

    def _keep(self, now_s: float) -> None:
        """Write a snapshot if there is a new plan, before any rank may hear of it, or if the last one is old."""
        newest, kept_s = self._loop.plans[-1].version, self._kept[1]
        if newest != self._kept[0] or now_s >= kept_s + SNAPSHOT_INTERVAL_S:
            self._kept = newest, now_s
            self._snapshot.write(self._loop.history())

    async def observe(self, sample: NodeSample) -> str | None:
        """Add a node's report and decide if there is a cause. Return the node that it shall probe now, or None."""
        now_s = time.monotonic()
        self._live.add(sample)
        for decision in self._loop.observe(sample, now_s):
            logger.info("%s: %s", type(decision).__name__.lower(), decision.reason)
        if self._loop.is_registered:
            self._keep(now_s)
        # Wake the ranks first: they need the plan, and nobody waits for metrics.
        self._changed.set()
        self._changed = asyncio.Event()
        if self._loop.is_registered:
            self._metrics.export(self._loop.facts(), self._journal.num_errors)
        return self._loop.next_probe(sample.node_id, now_s)

    async def report_fault(self, fault: Fault) -> None:
        """Count an error that has ended the training on a rank, and write it down."""
        self._loop.add_fault(fault, time.time())
        if self._loop.is_registered:
            self._metrics.export(self._loop.facts(), self._journal.num_errors)

    async def look(self) -> dict[str, Any] | None:
        """Return what `cgx-ray top` shows, see `LiveState.fields`; None before the worker group has registered."""
        if not self._loop.is_registered:
            return None
        return self._live.fields(self._loop, list(self._journal.recent))

    async def plans_after(self, version: int, timeout_s: float) -> list[Plan]:
        """Return the plans newer than `version`, oldest first; wait up to `timeout_s` for one, then return none."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._newer(version):
                    await self._changed.wait()
        except TimeoutError:
            return []
        return self._newer(version)

    def _newer(self, version: int) -> list[Plan]:
        return [plan for plan in self._loop.plans if plan.version > version]
