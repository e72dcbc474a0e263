"""Measure the controller of thousands of ranks that are simulated, and the agreement of real processes.

The controller is the real actor in a real Ray, with the process of its loop. Another actor sends it the reports of all
nodes, each with its own turn in the second, and gets the plans of all nodes.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import psutil
import ray

from bench.network.monitor_cost import local_ray
from bench.scale.timed_loop import TimedLoop
from bench.shared.runner import BenchRun, OnPart, bench_command
from bench.shared.simulated_cluster import GBPS, LATER_GBPS, OPTIONS, LargeCluster, Reports
from cgx_ray.control.controller import ACTOR_OPTIONS, Controller
from cgx_ray.control.history import Registration
from cgx_ray.control.network.estimate import quantile
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.errors import CGXError
from cgx_ray.plan import Plan
from cgx_ray.report.result import Row

# Seconds before anything is measured: the first reports find a process that imports and registers metrics.
WARM_UP_S = 5.0
# Memory is judged in runs that are longer than its windows: ten seconds of steps, a minute of links.
JUDGED_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOptions:
    """Sizes of the bench. `num_agreeing`: processes that agree. `has_goals`: these are the sizes that goals are for."""

    num_nodes: int = 512
    ranks_per_node: int = 8
    seconds: float = 60.0
    num_agreeing: int = 256
    has_goals: bool = True


QUICK = ScaleOptions(num_nodes=20, ranks_per_node=2, seconds=10.0, num_agreeing=20, has_goals=False)


@bench_command(quick="A short check: 20 nodes of 2 ranks, 20 processes, no goals.")
@click.option("--minutes", default=1.0, show_default=True, type=click.FloatRange(0.5, 60), help="Time of the reports.")
@click.option("--nodes", default=512, show_default=True, type=click.IntRange(2), help="Nodes; the goals are for 512.")
@click.option("--ranks-per-node", default=8, show_default=True, type=click.IntRange(1), help="The goals are for 8.")
@click.option("--agreeing", default=256, show_default=True, type=click.IntRange(2), help="Processes that agree.")
def scale(run: BenchRun, minutes: float, nodes: int, ranks_per_node: int, agreeing: int) -> Iterable[Row]:
    """Load one controller with the reports of thousands of ranks.

    The controller is real, and so are its Ray and the processes that agree, whose baseline is that each sends to all;
    the nodes that report are simulated, one report per second each. Half-way their links become ten times slower.
    Memory is judged from two minutes on.
    """
    options = ScaleOptions(num_nodes=nodes, ranks_per_node=ranks_per_node, seconds=60 * minutes, num_agreeing=agreeing)
    whole = ScaleOptions()
    is_whole = replace(options, seconds=whole.seconds) == whole
    options = QUICK if run.quick else replace(options, has_goals=is_whole)
    num_ranks = options.num_nodes * options.ranks_per_node
    run.title += f": {num_ranks:,} ranks on {options.num_nodes:,} nodes; {options.num_agreeing} processes agree"
    with local_ray():
        return measure_scale(options, run.on_part).rows(options)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleNumbers:
    """Measured numbers of one run.

    cores       processor seconds of the controller's two processes per second
    decision_s  seconds of its loop for each report that led to a decision
    longest_s   the same for the longest report of all
    observe_s   seconds until each report was answered, as its sender saw it
    memory      MiB of the controller's two processes, once per second
    agreement   milliseconds of a rank's processor per agreement: as it is, and if each rank sends to all
    """

    cores: float
    decision_s: list[float]
    longest_s: float
    observe_s: list[float]
    memory: list[float]
    agreement: tuple[float, float]

    def rows(self, options: ScaleOptions) -> list[Row]:
        def goal(text: str) -> str | None:
            return text if options.has_goals else None

        third = len(self.memory) // 3
        before, after = fmean(self.memory[third : 2 * third]), fmean(self.memory[2 * third :])
        is_long = options.has_goals and options.seconds >= JUDGED_S
        return [
            Row(name="controller", value=self.cores, unit="cores", goal=goal("<= 0.5")),
            Row(name="longest_decision", value=max(self.decision_s, default=None), unit="s", goal=goal("<= 1")),
            Row(name="decisions", value=len(self.decision_s), unit="", goal=">= 1"),
            Row(name="longest_report_in_loop", value=self.longest_s, unit="s"),
            Row(name="observe_p50", value=1e3 * quantile(self.observe_s, 0.5), unit="ms"),
            Row(name="observe_p99", value=1e3 * quantile(self.observe_s, 0.99), unit="ms", goal=goal("<= 50")),
            Row(
                name="memory",
                value=after,
                unit="MiB",
                baseline=before,
                ratio=after / before,
                goal="<= 1.05" if is_long else None,
            ),
            Row(
                name="agreement",
                value=self.agreement[0],
                unit="ms",
                baseline=self.agreement[1],
                goal=goal("<= 1"),
            ),
        ]


class TimedController(Controller):
    """A controller whose loop notes how long reports take."""

    _loop_type = TimedLoop

    def timed(self) -> tuple[list[float], float]:
        """See `TimedLoop.timed`."""
        timed: tuple[list[float], float] = self._loop.ask("timed").result()
        return timed

    def pids(self) -> tuple[int, int]:
        """Return the ids of this process and of the loop's."""
        return os.getpid(), self._loop.pid


class Nodes:
    """All agents in one actor: each sends one report per second, and takes plans.

    As in a training, a plan is in force two steps after the last node has it.
    """

    def __init__(self, controller: Any, cluster: LargeCluster) -> None:
        self._controller, self._cluster = controller, cluster
        self._reports = Reports(cluster)
        self._plans = {0: cluster.first_plan()}
        self._newest = [0] * cluster.num_nodes
        self._in_force: dict[int, Plan] = {}
        self._observe_s: list[float] = []

    async def run(self, seconds: float) -> list[float]:
        """Report for so long. Return the seconds until each report was answered."""
        start_s = time.monotonic()
        reports = [self._report(node, start_s, int(seconds)) for node in range(self._cluster.num_nodes)]
        await asyncio.gather(*reports)
        return self._observe_s

    async def _report(self, node: int, start_s: float, num_steps: int) -> None:
        for step in range(num_steps):
            due_s = start_s + step + node / self._cluster.num_nodes
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            gbps = GBPS if step < num_steps / 2 else LATER_GBPS
            sample = self._reports.make(node, step, self._plan_of(step), gbps, time.time())
            sent_s = time.perf_counter()
            report = pickle.dumps(sample, pickle.HIGHEST_PROTOCOL)
            answer = await self._controller.observe.remote(sample.node_id, report, self._newest[node])
            if answer is not None:
                self._take(node, answer[1])
            if step >= WARM_UP_S:
                self._observe_s.append(time.perf_counter() - sent_s)

    def _plan_of(self, step: int) -> Plan:
        """Return the plan of a step, the same for all nodes."""
        if step not in self._in_force:
            plan = self._plans[min(self._newest)]
            if plan.lease is not None and step > plan.lease.last_step:
                plan = plan.lease.fallback
            self._in_force[step] = plan
        return self._in_force[step]

    def _take(self, node: int, plans: Sequence[Plan]) -> None:
        for plan in plans:
            self._plans[plan.version] = plan
            self._newest[node] = max(self._newest[node], plan.version)


def measure_scale(options: ScaleOptions, on_turn: OnPart) -> ScaleNumbers:
    """Measure the agreement, then a controller in this process's Ray cluster.

    `on_turn` gets what runs, and the share of it that is done.
    """
    agreement = measure_agreement(options.num_agreeing, on_turn)
    cluster = LargeCluster(options.num_nodes, options.ranks_per_node)
    with tempfile.TemporaryDirectory() as folder:
        controller = ray.remote(**ACTOR_OPTIONS)(TimedController).remote(
            Adaptive(candidates=OPTIONS, min_gain=0.8),
            str(Path(folder) / "decisions.jsonl"),
            "bench",
            "bench",
            str(Path(folder) / "snapshot"),
        )
        plan = cluster.first_plan()
        layers = tuple(cluster.truth(GBPS).layers)
        registration = Registration(layers=layers, first_plan=plan, codec_costs=cluster.costs)
        ray.get(controller.register.remote(registration))
        processes = [psutil.Process(pid) for pid in ray.get(controller.pids.remote())]
        nodes = ray.remote(Nodes).options(num_cpus=0).remote(controller, cluster)
        run = nodes.run.remote(WARM_UP_S + options.seconds)
        memory, began = _watch(run, processes, WARM_UP_S + options.seconds, on_turn)
        used_s, passed_s = _cpu_s(processes) - began[0], time.monotonic() - began[1]
        observe_s = ray.get(run)
        decision_s, longest_s = ray.get(controller.timed.remote())
        for actor in (nodes, controller):
            ray.kill(actor)
    return ScaleNumbers(
        cores=used_s / passed_s,
        decision_s=decision_s,
        longest_s=longest_s,
        observe_s=observe_s,
        memory=memory,
        agreement=agreement,
    )


def _watch(
    run: Any, processes: Sequence[psutil.Process], seconds: float, on_turn: OnPart
) -> tuple[list[float], tuple[float, float]]:
    """Wait for `run`. Return the memory of `processes` each second after the warm-up, and their processor time and the
    time at the end of the warm-up."""
    start_s = time.monotonic()
    memory: list[float] = []
    began = _cpu_s(processes), start_s
    while not ray.wait([run], timeout=1.0)[0]:
        passed_s = time.monotonic() - start_s
        on_turn("reports of all nodes", min(passed_s / seconds, 1.0))
        if passed_s < WARM_UP_S:
            began = _cpu_s(processes), time.monotonic()
        else:
            memory.append(sum(process.memory_info().rss for process in processes) / 2**20)
    return memory, began


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(one.user + one.system for one in times)


def measure_agreement(num_ranks: int, on_turn: OnPart) -> tuple[float, float]:
    """Return a rank's processor milliseconds per agreement of `num_ranks` processes, and if each sends to all."""
    on_turn(f"agreement of {num_ranks} processes", 0.0)
    argv = [sys.executable, "-m", "bench.scale.agreeing_ranks", str(num_ranks)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CGXError(f"the processes that agree have failed: {done.stderr.strip()}")
    found = json.loads(done.stdout)
    return found["in_rounds_ms"], found["to_all_ms"]
