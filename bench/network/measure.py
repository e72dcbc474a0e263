"""`python -m bench network`: compares the monitors' view of the network with the lab's settings during a training.

Four hosts train the demo's GPT with adaptive plans, decided without Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass

import click

from bench.network.events import (
    BASE_LATENCY_S,
    BASE_RATE,
    change_rows,
    cut_rows,
    neighbour_rows,
    slow_host_rows,
)
from bench.network.job import WatchedJob
from bench.network.link import delivered_row, estimate_rows, probe_rows
from bench.network.monitor_cost import local_ray, monitor_rows, publishing_row
from bench.shared.ranks import started_ranks
from bench.shared.runner import BenchRun, bench_command
from cgx_ray.lab.namespaces import Lab
from cgx_ray.report.result import Row

_NUM_HOSTS = 4
_RATES = (1e8, 5e8, 1e9, 2e9)
_LATENCIES_S = (0.1e-3, 1e-3, 10e-3, 50e-3)
# From this rate on the lab itself may be slower than its links, so that is measured first. Two cores deliver 1 Gbit/s.
_CHECKED_RATE = 2e9
# Seconds over which an agent's processor time is measured.
_MONITOR_S = 30.0


@bench_command(quick="A short check on one link.")
@click.option("--minutes", default=1.0, show_default=True, help="Time beside a bursty neighbour; the goals are for 10.")
def network(run: BenchRun, minutes: float) -> Iterable[Row]:
    """Compare the monitors' estimates with the lab's links.

    A training job runs meanwhile. Also measures the processor time and memory of the monitors.
    """
    return measure_network(NetworkOptions(minutes=minutes, quick=run.quick), run.print_text)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """Options of the benchmark.

    minutes  time beside a bursty neighbour
    quick    measure one link only, to check that everything works
    """

    minutes: float = 1.0
    quick: bool = False


def measure_network(options: NetworkOptions, on_line: Callable[[str], None]) -> list[Row]:
    """Return all rows after some 8 minutes. `on_line` gets a line per row as soon as it is measured.

    Raises BenchError if the job ends early, LabError if the lab cannot run here.
    """
    rates, latencies_s = ((1e8,), (1e-3,)) if options.quick else (_RATES, _LATENCIES_S)
    rows: list[Row] = []

    def add_rows(*new: Row) -> None:
        for row in new:
            rows.append(row)
            met = {None: "", True: "met", False: "NOT met"}[row.met]
            on_line(f"{row.name}: {row.value if row.value is None else round(row.value, 4)} {row.unit} {met}")

    if not options.quick:
        with local_ray():
            add_rows(*monitor_rows(_MONITOR_S), publishing_row())
    points = [(rate, latency_s) for rate in rates for latency_s in latencies_s]
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(_NUM_HOSTS, rate_bit_per_s=BASE_RATE, latency_s=BASE_LATENCY_S))
        for row in probe_rows(lab, points):
            add_rows(row)
        delivered = {rate: delivered_row(lab, rate) for rate in rates if rate >= _CHECKED_RATE}
        add_rows(*delivered.values())
        ranks = started_ranks("bench.network.rank", {}, name="bench network", num_ranks=_NUM_HOSTS, lab=lab)
        job = WatchedJob(stack.enter_context(ranks))
        job.start_over()
        for point in points:
            add_rows(*estimate_rows(lab, job, *point, delivered.get(point[0])))
        if not options.quick:
            add_rows(*change_rows(lab, job))
            add_rows(*neighbour_rows(lab, job, options.minutes))
            add_rows(*slow_host_rows(lab, job))
            add_rows(*cut_rows(lab, job))
    return rows
