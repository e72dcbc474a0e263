"""An adaptive run without Ray: rank 0 runs the control loop, fed by collective calls between steps."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import cgx_ray
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.loop import ControlLoop
from cgx_ray.monitors.host import HostMonitor
from cgx_ray.monitors.node_step import node_steps
from cgx_ray.monitors.sample import NodeSample
from cgx_ray.plan import Layer, Plan
from cgx_ray.session.attachment import process
from cgx_ray.session.calibrate import measure_codecs
from cgx_ray.session.settings import Settings, make_policy

# Steps between two reports to the loop. In a Ray run a report comes once per second.
REPORT_STEPS = 5


class GatheredControl:
    """A `Session` with policy "adaptive" or "cgx" that decides on rank 0. All ranks call `after_step` after each step.

    Every rank counts as a node. No probes run: messages alone tell the network.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._host = HostMonitor()
        self._folder = tempfile.TemporaryDirectory()
        self._loop = ControlLoop(make_policy(settings), Journal(Path(self._folder.name) / "decisions.jsonl"))
        self._num_told = 0
        self._attachment: cgx_ray.Attachment | None = None

    def first_plan(self, layers: Sequence[Layer], world_size: int, bucket_bytes: int) -> Plan:
        fresh = self.settings.first_plan(layers, world_size, bucket_bytes)
        costs = measure_codecs(self.settings, torch.device("cpu"))
        self._num_told = 1
        return self._loop.register(layers, fresh, costs, "backward")

    def start(self, attachment: cgx_ray.Attachment) -> None:
        self._attachment = attachment

    def after_step(self, step: int) -> None:
        """Report this rank's steps to the loop and hold its new plans, after every REPORT_STEPS-th step."""
        if (step + 1) % REPORT_STEPS:
            return
        assert self._attachment is not None
        steps = tuple(self._attachment.take_samples())
        sample = NodeSample(
            node_id=f"rank {dist.get_rank()}",
            time_s=time.time(),
            steps=node_steps(steps),
            latency_s={},
            host=self._host.read(sum(one.wire_bytes for one in steps)),
        )
        samples: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(samples, sample)
        plans: list[Any] = [None]
        if dist.get_rank() == 0:
            for one in samples:
                self._loop.observe(one, time.monotonic())
            plans = [[plan.to_json() for plan in self._loop.plans[self._num_told :]]]
            self._num_told = len(self._loop.plans)
        dist.broadcast_object_list(plans)
        for text in plans[0]:
            self._attachment.hold(Plan.from_json(text))

    def __enter__(self) -> GatheredControl:
        # The attachment of a model that was trained before.
        process.session, process.attachment = self, None
        return self

    def __exit__(self, *error: object) -> None:
        process.session = process.attachment = None
        self._folder.cleanup()
