"""The session of a bench's rank whose control loop is at the other end of its pipes, in place of Ray.

The rank writes pickles: the arguments of `ControlLoop.register` (rank 0 only), then NodeSamples. It reads lines, each a
plan as JSON or the id of a node to probe.
"""

from __future__ import annotations

import pickle
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

import cgx_ray
from cgx_ray.monitors.agent import LATENCY_INTERVAL_S
from cgx_ray.monitors.guarded_server import Address
from cgx_ray.monitors.host import HostMonitor
from cgx_ray.monitors.node_step import node_steps
from cgx_ray.monitors.probe import Prober, measure_beside_training
from cgx_ray.monitors.round_trip import Peers
from cgx_ray.monitors.sample import Bandwidth, NodeSample
from cgx_ray.plan import Layer, Plan
from cgx_ray.session.calibrate import measure_codecs
from cgx_ray.session.settings import Settings

# Seconds between reports; in a real training samples take as long on average, from rank to agent to controller.
_REPORT_INTERVAL_S = 0.5

_writing = threading.Lock()


class PipeSession:
    """A `Session` whose controller is at the other end of this process's pipes. It may serve attachments in turn."""

    def __init__(self, settings: Settings, rank: int, address: str) -> None:
        """Start to measure latencies. A collective call. `address`: of this rank's host."""
        self.settings = settings
        self._rank = rank
        self._prober = Prober(address)
        self._peers, self._bulk = _meet_peers(rank, self._prober)
        self._host = HostMonitor()
        self._attachment: cgx_ray.Attachment | None = None
        self._reporting = threading.Lock()
        self._targets: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[tuple[str, Bandwidth]] = queue.SimpleQueue()
        for work in (self._report_always, self._measure, self._probe):
            threading.Thread(target=work, daemon=True).start()

    def first_plan(self, layers: Sequence[Layer], world_size: int, bucket_bytes: int) -> Plan:
        plan = self.settings.first_plan(layers, world_size, bucket_bytes)
        send((layers, plan, measure_codecs(self.settings, torch.device("cpu"))))
        return plan

    def start(self, attachment: cgx_ray.Attachment) -> None:
        self._attachment = attachment

    def end(self) -> None:
        """Report the last steps of the attachment, and no more."""
        self._report()
        self._attachment = None

    def receive(self, line: str) -> None:
        """Hold a plan, or probe a node."""
        if not line.startswith("{"):
            self._targets.put(line.strip())
        elif self._attachment is not None:
            self._attachment.hold(Plan.from_json(line))

    def _report_always(self) -> None:
        while True:
            self._report()
            time.sleep(_REPORT_INTERVAL_S)

    def _report(self) -> None:
        # One report at a time, so that steps are sent in their order.
        with self._reporting:
            if self._attachment is None:
                return
            steps = tuple(self._attachment.take_samples())
            send(
                NodeSample(
                    node_id=f"host {self._rank}",
                    time_s=time.time(),
                    steps=node_steps(steps),
                    latency_s=self._peers.latency_s,
                    host=self._host.read(sum(step.wire_bytes for step in steps)),
                    bandwidth=dict(self._found.get() for _ in range(self._found.qsize())),
                )
            )

    def _measure(self) -> None:
        while True:
            self._peers.measure(threading.Event())
            time.sleep(LATENCY_INTERVAL_S)

    def _probe(self) -> None:
        while True:
            target = self._targets.get()
            try:
                found = measure_beside_training(self._bulk[target])
            except OSError as error:
                print(f"{target} could not be probed: {error}", file=sys.stderr)
                continue
            self._found.put((target, found))


def send(message: Any) -> None:
    """Write `message` for the process that has started this rank."""
    with _writing:
        pickle.dump(message, sys.stdout.buffer)
        sys.stdout.buffer.flush()


def _meet_peers(rank: int, prober: Prober) -> tuple[Peers, Mapping[str, Address]]:
    """Return the other ranks' echo servers, and the bulk servers of all by node id. A collective call."""
    addresses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, prober.addresses())
    peers = Peers({f"host {peer}": echo for peer, (echo, _) in enumerate(addresses) if peer != rank})
    return peers, {f"host {peer}": bulk for peer, (_, bulk) in enumerate(addresses)}
