"""One rank of the job that `cgx-ray bench network` watches: the demo's GPT, trained in a host of the lab until killed.

Pipes replace Ray: the rank writes pickles, first the arguments of `ControlLoop.register` (rank 0 only) and then
NodeSamples. It reads lines, each a plan as JSON or the id of a node to probe.
"""

from __future__ import annotations

import itertools
import json
import pickle
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.demo.gpt import StdlibBytes, build_gpt
from cgx_ray.monitors.agent import LATENCY_INTERVAL_S
from cgx_ray.monitors.guarded_server import Address
from cgx_ray.monitors.host import HostMonitor
from cgx_ray.monitors.node_step import node_steps
from cgx_ray.monitors.probe import Prober, measure_bulk
from cgx_ray.monitors.round_trip import Peers
from cgx_ray.monitors.sample import NodeSample
from cgx_ray.plan import Layer, Plan
from cgx_ray.session.attachment import process
from cgx_ray.session.calibrate import measure_codecs
from cgx_ray.session.settings import Settings

# Seconds between reports; in a real training samples take as long on average, from rank to agent to controller.
_REPORT_INTERVAL_S = 0.5


class _PipeSession:
    """A `Session` whose controller is at the other end of this process's pipes."""

    def __init__(self, settings: Settings, rank: int, peers: Peers, bulk: Mapping[str, Address]) -> None:
        """`bulk`: addresses of the nodes' bulk servers, by node id."""
        self.settings = settings
        self._rank, self._peers, self._bulk = rank, peers, bulk
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._found: queue.SimpleQueue[tuple[str, float]] = queue.SimpleQueue()

    def first_plan(self, layers: Sequence[Layer], world_size: int, bucket_bytes: int) -> Plan:
        plan = self.settings.first_plan(layers, world_size, bucket_bytes)
        _send((layers, plan, measure_codecs(self.settings, torch.device("cpu"))))
        return plan

    def start(self, attachment: cgx_ray.Attachment) -> None:
        for work in (self._report, self._receive):
            threading.Thread(target=work, args=(attachment,), daemon=True).start()
        for measure in (self._measure, self._probe):
            threading.Thread(target=measure, daemon=True).start()

    def _report(self, attachment: cgx_ray.Attachment) -> None:
        host = HostMonitor()
        while True:
            steps = tuple(attachment.take_samples())
            _send(
                NodeSample(
                    node_id=f"host {self._rank}",
                    time_s=time.time(),
                    steps=node_steps(steps),
                    latency_s=self._peers.latency_s,
                    host=host.read(sum(step.wire_bytes for step in steps)),
                    bandwidth=dict(self._found.get() for _ in range(self._found.qsize())),
                )
            )
            time.sleep(_REPORT_INTERVAL_S)

    def _receive(self, attachment: cgx_ray.Attachment) -> None:
        for line in sys.stdin:
            if line.startswith("{"):
                attachment.hold(Plan.from_json(line))
            else:
                self._orders.put(line.strip())

    def _measure(self) -> None:
        while True:
            self._peers.measure(threading.Event())
            time.sleep(LATENCY_INTERVAL_S)

    def _probe(self) -> None:
        while True:
            target = self._orders.get()
            try:
                _, found = measure_bulk(self._bulk[target])
            except OSError as error:
                print(f"{target} could not be probed: {error}", file=sys.stderr)
                continue
            self._found.put((target, max(one.bytes_per_s for one in found)))


def _send(message: Any) -> None:
    pickle.dump(message, sys.stdout.buffer)
    sys.stdout.buffer.flush()


def main() -> None:
    job = json.loads(sys.argv[1])
    rank, world_size = job["rank"], job["world_size"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(job["store"], world_size), rank=rank, world_size=world_size)
    prober = Prober(job["address"])
    addresses: list[Any] = [None] * world_size
    dist.all_gather_object(addresses, prober.addresses())
    peers = Peers({f"host {peer}": echo for peer, (echo, _) in enumerate(addresses) if peer != rank})
    bulk = {f"host {peer}": at for peer, (_, at) in enumerate(addresses)}
    process.session = _PipeSession(Settings(policy="adaptive"), rank, peers, bulk)
    model = DistributedDataParallel(build_gpt(0), bucket_cap_mb=4)
    cgx_ray.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = StdlibBytes()
    for step in itertools.count():
        model(*data.train_batch(seed=0, step=step, rank=rank, batch_size=1)).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
