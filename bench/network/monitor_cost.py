"""Cost of metrics and journal, and of a node's monitor: its time and memory, less those of an idle Ray actor."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray

from cgx_ray.control.history import Registration
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.policy import Static
from cgx_ray.monitors.agent import ACTOR_OPTIONS, NodeAgent
from cgx_ray.monitors.controller_metrics import ControllerMetrics
from cgx_ray.monitors.node_metrics import NodeMetrics
from cgx_ray.monitors.ray_sink import RaySink
from cgx_ray.monitors.sample import Burst, HostLoad, StepSample, Transfer
from cgx_ray.plan import Layer, make_plan
from cgx_ray.report.result import Row

_HOST = "127.0.0.1"
_NUM_RANKS, _STEPS_PER_S, _REPORT_S = 2, 5, 0.5
_FAST_STEPS_PER_S, _NUM_GROUPS = 100, 8


class _Idle:
    def pid(self) -> int:
        return os.getpid()


class _Agent(NodeAgent):
    def pid(self) -> int:
        return os.getpid()


class _Controller:
    """Accepts reports and orders no probes: a probe sends 1 % of what its link carries, which is a lot on loopback."""

    def observe(self, node_id: str, report: bytes, newest: int) -> None: ...


def monitor_rows(seconds: float, *, warm_up_s: float = 3.0) -> list[Row]:
    """Measure an agent in this process's Ray cluster that has two ranks with five steps per second and two peers."""
    idle = ray.remote(_Idle).options(num_cpus=0).remote()
    agents = [ray.remote(_Agent).options(**ACTOR_OPTIONS).remote(name, "bench", _HOST) for name in "abc"]
    addresses = dict(zip("abc", ray.get([agent.address.remote() for agent in agents]), strict=True))
    controller = ray.remote(_Controller).options(num_cpus=0, enable_task_events=False).remote()
    ray.get([agent.start.remote(addresses, controller) for agent in agents])
    watched, bare = (psutil.Process(ray.get(actor.pid.remote())) for actor in (agents[0], idle))
    _report(agents[0], warm_up_s)
    start_s, start = time.monotonic(), (_cpu_s(watched), _cpu_s(bare))
    _report(agents[0], seconds)
    passed_s = time.monotonic() - start_s
    share, bare_share = ((_cpu_s(p) - s) / passed_s for p, s in zip((watched, bare), start, strict=True))
    rss, bare_rss = (process.memory_info().rss / 2**20 for process in (watched, bare))
    for actor in (idle, controller, *agents):
        ray.kill(actor)
    return [
        Row(name="agent_cpu", value=share, unit="cores", baseline=bare_share, ratio=share - bare_share, goal="<= 0.01"),
        Row(name="agent_memory", value=rss, unit="MiB", baseline=bare_rss, ratio=rss - bare_rss, goal="<= 100"),
    ]


def publishing_row(num_rounds: int = 30) -> Row:
    """Measure what metrics and journal of a training with 100 steps per second take, as a share of its time.

    Each round publishes one second of a node with two ranks and writes one decision, which is far more often than a
    controller decides. Needs a Ray cluster in this process.
    """
    node, run = NodeMetrics(RaySink(), "bench"), ControllerMetrics(RaySink(), "bench", journal="decisions.jsonl")
    host = HostLoad(sent_bytes_per_s=1e6, received_bytes_per_s=1e6, neighbour_bytes_per_s=0.0)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "decisions.jsonl")
        loop = ControlLoop(Static(), journal)
        layers = [Layer(name=f"layer {index}", numel=1 << 19, ndim=2) for index in range(_NUM_GROUPS)]
        loop.register(
            Registration(layers=tuple(layers), first_plan=make_plan(layers, version=0, world_size=_NUM_RANKS))
        )
        inputs = {str(index): 0.5 for index in range(40)}
        entry = {"event": "decision", "kind": "keep", "reason": "x" * 300, "inputs": inputs, "old": {}, "new": {}}
        spent_s = 0.0
        for number in range(-3, num_rounds):
            steps = [
                replace(_STEP, rank=rank, step=100 * number + step)
                for step in range(_FAST_STEPS_PER_S)
                for rank in range(_NUM_RANKS)
            ]
            start_s = time.process_time()
            node.export(steps, {"b": 1e-3}, host)
            run.export(loop.facts(), journal.num_errors)
            journal.write(entry)
            # The first rounds register the metrics.
            spent_s += time.process_time() - start_s if number >= 0 else 0.0
    return Row(name="metrics_and_journal", value=spent_s / num_rounds, unit="cores", goal="<= 0.005")


@contextmanager
def local_ray() -> Iterator[None]:
    """Start a Ray cluster on this machine, and end it with the body."""
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=128 << 20)
    # Ray's own one ends the process inside its C++ code, which aborts.
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _report(agent: Any, seconds: float) -> None:
    """Report steps of all ranks every half second, as workers do."""
    start_s, num_reported = time.monotonic(), 0
    while num_reported < int(seconds * _STEPS_PER_S):
        time.sleep(_REPORT_S)
        steps = range(num_reported, int((time.monotonic() - start_s) * _STEPS_PER_S))
        for rank in range(_NUM_RANKS):
            ray.get(agent.report.remote([replace(_STEP, rank=rank, step=step) for step in steps]))
        num_reported += len(steps)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


_STEP = StepSample(
    rank=0,
    step=0,
    plan_version=0,
    step_s=0.2,
    compute_s=0.1,
    encode_s=0.01,
    exchange_s=0.1,
    decode_s=0.01,
    wire_bytes=1 << 20,
    dense_bytes=20 << 20,
    ready_s=(0.05,) * 8,
    transfers=(
        Transfer(
            group=0,
            scheme="sra",
            codec="qsgd:bits=4,bucket_size=128",
            numel=1 << 19,
            wire_bytes=1 << 17,
            sent_bytes=1 << 17,
            dense_bytes=1 << 21,
            seconds=0.01,
        ),
    )
    * _NUM_GROUPS,
    bursts=(Burst(1 << 20, 0.05),) * 4,
    rate_from={1: 1e8},
    lag_s={1: 0.01},
)
