"""The controller: one actor a run. Holds the control loop and hands out plans."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cgx_ray.control.journal import Journal
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policy import Policy
from cgx_ray.monitors.export import ControllerMetrics
from cgx_ray.monitors.sample import NodeSample
from cgx_ray.plan import Layer, Plan
from cgx_ray.planner.options import CodecCost

logger = logging.getLogger(__name__)

History = tuple[Sequence[Layer], Sequence[Plan]]


class Controller:
    """Made an actor by `ray.remote`; its methods run on one event loop, one at a time between awaits.

    It lives as long as one group of workers; `history` is what the one of the group before knew.
    """

    def __init__(
        self, policy: Policy, journal_path: str, group_bytes: int, run_name: str, history: History | None = None
    ) -> None:
        logging.basicConfig(level=logging.INFO)
        self._journal = Journal(Path(journal_path))
        layers, plans = history or ((), ())
        self._loop = ControlLoop(policy, self._journal, group_bytes=group_bytes, layers=layers, plans=plans)
        self._metrics = ControllerMetrics(run_name)
        self._changed = asyncio.Event()

    async def register(self, layers: Sequence[Layer], first_plan: Plan, codec_costs: Mapping[str, CodecCost]) -> Plan:
        """A group of workers starts; returns its first plan. See `ControlLoop.register`."""
        return self._loop.register(layers, first_plan, codec_costs)

    async def history(self) -> History:
        """Layers and plans so far, for the controller of the next group of workers."""
        return self._loop.layers, self._loop.plans

    async def observe(self, sample: NodeSample) -> str | None:
        """Take in a node's report; decide if it gives cause to. Returns the node it is to probe now, or None."""
        now_s = time.monotonic()
        for decision in self._loop.observe(sample, now_s):
            logger.info("%s: %s", type(decision).__name__.lower(), decision.reason)
            self._metrics.count_decision(type(decision).__name__.lower())
        if self._loop.is_registered:
            self._metrics.export(self._loop.facts(), self._journal.num_errors)
        self._changed.set()
        self._changed = asyncio.Event()
        return self._loop.next_probe(sample.node_id, now_s)

    async def plans_after(self, version: int, timeout_s: float) -> list[Plan]:
        """Plans newer than `version`, oldest first; waits up to `timeout_s` for one, then returns none."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._newer(version):
                    await self._changed.wait()
        except TimeoutError:
            return []
        return self._newer(version)

    def _newer(self, version: int) -> list[Plan]:
        return [plan for plan in self._loop.plans if plan.version > version]
