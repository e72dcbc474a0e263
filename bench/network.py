"""`cgx-ray bench network`: do the monitors see what the lab has set, while a training job runs?

Four hosts train the demo's GPT with adaptive plans; `ControlLoop` gets their samples as it would in a Ray run and says
what it knows. Truth is what the lab has set: the rate less the headers of IP and TCP, and the one-way latency.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console

from cgx_ray.bench.monitor_cost import local_ray, monitor_rows
from cgx_ray.bench.network_job import Job, NetworkBenchError
from cgx_ray.control.loop import LoopFacts
from cgx_ray.lab.link import MTU_BYTES, Direction, LinkChange
from cgx_ray.lab.namespaces import Lab
from cgx_ray.report.result import Row, write_result
from cgx_ray.units import compact_rate

_NUM_HOSTS = 4
_RATES = (1e8, 5e8, 1e9, 2e9)
_LATENCIES_S = (0.1e-3, 1e-3, 10e-3, 50e-3)
# Of IP packets, which is what the lab's rates count: less IP and TCP headers, with time stamps.
_PAYLOAD = 1 - 52 / MTU_BYTES
_NOTICE_TIMEOUT_S = 15.0
_MONITOR_S = 30.0
_SETTLE_S = 6.0
# Steps that began on the link before are over.
_DRAIN_S = 2.0
_MIN_STEPS = 6
# Within this a host that is slow or cut off has to be named.
_SLOW_S = 15.0
_CUT_S = 8.0
# Within this messages that are not sure are joined by a probe.
_PROBE_S = 15.0
# Where changes, slow hosts, neighbours and cuts are tried: fast enough to be usual, slow enough for two cores.
_BASE_RATE = 2e8
_BASE_LATENCY_S = 5e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """minutes: beside a bursty neighbour; quick: one link and no more, to see whether it works."""

    minutes: float = 1.0
    quick: bool = False


def measure_network(options: NetworkOptions, on_line: Callable[[str], None]) -> list[Row]:
    """All rows, some 8 minutes. Raises NetworkBenchError if the job ends early, LabError if there can be no lab."""
    rates, latencies_s = ((1e8,), (1e-3,)) if options.quick else (_RATES, _LATENCIES_S)
    rows: list[Row] = []

    def add(*new: Row) -> None:
        for row in new:
            rows.append(row)
            met = {None: "", True: "met", False: "NOT met"}[row.met]
            on_line(f"{row.name}: {row.value if row.value is None else round(row.value, 4)} {row.unit} {met}")

    if not options.quick:
        with local_ray():
            add(*monitor_rows(_MONITOR_S))
    points = [(rate, latency_s) for rate in rates for latency_s in latencies_s]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        lab = stack.enter_context(Lab(_NUM_HOSTS, rate_bit_per_s=_BASE_RATE, latency_s=_BASE_LATENCY_S))
        for row in _active(lab, points):
            add(row)
        job = Job(lab, folder)
        stack.callback(job.close)
        job.wait_registered()
        for point in points:
            add(*_passive(lab, job, *point))
        if not options.quick:
            add(*_changes(lab, job))
            add(*_neighbour(lab, job, options.minutes))
            add(*_odd_hosts(lab, job))
            add(*_cut(lab, job))
    return rows


def network_command(options: NetworkOptions, console: Console, json_path: str | None) -> None:
    """Measure, print each row when it is known, and write them all if `json_path` is given."""
    rows = measure_network(options, lambda line: console.print(line, highlight=False))
    if json_path:
        write_result("network", rows, json_path)


def _active(lab: Lab, points: list[tuple[float, float]]) -> Iterator[Row]:
    """Probes from host 0 to host 1 over links that nobody else uses."""
    with _in_host(lab, 0, "prober") as (orders, answers), _in_host(lab, 1, "prober") as (_, target):
        answers.readline()
        where = target.readline()
        for rate, latency_s in points:
            lab.set(rate_bit_per_s=rate, latency_s=latency_s)
            orders.write(where)
            orders.flush()
            line = answers.readline()
            if not line:
                raise NetworkBenchError("the probe from host 0 to host 1 failed; what it said is above")
            found_s, bytes_per_s = map(float, line.split())
            yield from _errors("active", rate, latency_s, 8 * bytes_per_s, found_s, goal="<= 0.05")


def _passive(lab: Lab, job: Job, rate: float, latency_s: float) -> list[Row]:
    """What the loop knows of one link after _SETTLE_S, or six steps, or, where messages are not sure, a probe.

    It is granted as in a run, by a clock that is fast (`network_job`), and shares the link with the job.
    """
    lab.set(rate_bit_per_s=rate, latency_s=latency_s)
    time.sleep(_DRAIN_S)
    lab.clear_counters()
    job.start_over()
    job.wait_for(lambda facts: job.num_steps >= _MIN_STEPS, _SLOW_S)
    time.sleep(_SETTLE_S)
    job.wait_for(lambda facts: _is_probed(facts) or (facts.bandwidth is not None and facts.bandwidth.is_sure), _PROBE_S)
    facts, name = job.facts(), _name(rate, latency_s)
    return [
        *_errors("known", rate, latency_s, facts.bandwidth_bits_per_s, facts.latency_s, goal="<= 0.1"),
        Row(name=f"was_probed_{name}", value=int(_is_probed(facts)), unit=""),
        Row(name=f"late_p99_{name}", value=lab.counters().late_p99_ms, unit="ms"),
    ]


def _is_probed(facts: LoopFacts) -> bool:
    return facts.bandwidth is not None and facts.bandwidth.source == "probes"


def _errors(
    how: str, rate: float, latency_s: float, found_rate: float | None, found_s: float | None, goal: str | None = None
) -> Iterator[Row]:
    """Rows of one point: relative error of the rate; error of the latency over what is allowed, 20 % or 0.2 ms."""
    name, truth = _name(rate, latency_s), rate * _PAYLOAD
    yield Row(
        name=f"{how}_bandwidth_{name}",
        value=found_rate and found_rate / 1e6,
        unit="Mbit/s",
        limit=truth / 1e6,
        ratio=None if found_rate is None else abs(found_rate / truth - 1),
        goal=goal,
    )
    yield Row(
        name=f"{how}_latency_{name}",
        value=found_s and found_s * 1e3,
        unit="ms",
        limit=latency_s * 1e3,
        ratio=None if found_s is None else abs(found_s - latency_s) / max(0.2 * latency_s, 2e-4),
        goal="<= 1",
    )


def _name(rate: float, latency_s: float) -> str:
    return f"{compact_rate(rate)}_{latency_s * 1e3:g}ms"


def _settle(lab: Lab, job: Job) -> None:
    lab.set(rate_bit_per_s=_BASE_RATE, latency_s=_BASE_LATENCY_S)
    _look_anew(job)


def _look_anew(job: Job) -> None:
    """Once what began on the link before is over, and until the estimates stand."""
    time.sleep(_DRAIN_S)
    job.start_over()
    time.sleep(_SETTLE_S)


def _changes(lab: Lab, job: Job) -> Iterator[Row]:
    """Seconds from a change by 2x until the loop counts it and its estimate is nearer to the new link than the old."""
    _settle(lab, job)
    rate, latency_s = _BASE_RATE * _PAYLOAD / math.sqrt(2), _BASE_LATENCY_S * math.sqrt(2)
    changes: dict[str, tuple[LinkChange, Callable[[LoopFacts], bool]]] = {
        "bandwidth_halved": ({"rate_bit_per_s": _BASE_RATE / 2}, lambda f: (f.bandwidth_bits_per_s or math.inf) < rate),
        "bandwidth_doubled": ({"rate_bit_per_s": _BASE_RATE}, lambda f: (f.bandwidth_bits_per_s or 0) > rate),
        "latency_doubled": ({"latency_s": 2 * _BASE_LATENCY_S}, lambda f: (f.latency_s or 0) > latency_s),
        "latency_halved": ({"latency_s": _BASE_LATENCY_S}, lambda f: (f.latency_s or math.inf) < latency_s),
    }
    for name, (change, has_moved) in changes.items():
        lab.set(**change)
        yield Row(name=f"notice_{name}", value=_notice_s(job, has_moved), unit="s", goal="<= 3")
        time.sleep(_SETTLE_S)


def _notice_s(job: Job, has_moved: Callable[[LoopFacts], bool]) -> float | None:
    before = job.facts().num_link_changes
    return job.wait_for(lambda facts: facts.num_link_changes > before and has_moved(facts), _NOTICE_TIMEOUT_S)


def _neighbour(lab: Lab, job: Job, minutes: float) -> list[Row]:
    """Changes that the loop sees on a constant link that another program uses in bursts."""
    _settle(lab, job)
    address = lab.hosts[1].address
    with _in_host(lab, 1, "sink") as (_, sink), _in_host(lab, 0, "neighbour", address, sink.readline().strip()):
        job.start_over()
        job.wait_for(lambda facts: False, minutes * 60)
        return [
            Row(name="neighbour_minutes", value=minutes, unit="min"),
            Row(name="neighbour_false_alarms", value=job.facts().num_link_changes, unit="alarms", goal="<= 0"),
            Row(name="neighbour_seen", value=(job.neighbour_bytes_per_s or 0) * 8e-6, unit="Mbit/s"),
        ]


def _odd_hosts(lab: Lab, job: Job) -> Iterator[Row]:
    """One slow uplink, one slow downlink: whom does the view name? Then all uplinks slower than all downlinks.

    Its bandwidth has no goal: a receiver sees what its own link brings, up to twice what each sender can keep up.
    """
    yield from _slow_host(lab, job, 2, "up")
    yield from _slow_host(lab, job, 1, "down")
    _settle(lab, job)
    lab.set(direction="up", rate_bit_per_s=_BASE_RATE / 2)
    _look_anew(job)
    facts = job.facts()
    yield next(_errors("asymmetric", _BASE_RATE / 2, _BASE_LATENCY_S, facts.bandwidth_bits_per_s, None))
    yield Row(name="asymmetric_hosts_named", value=len(facts.slow_link_bits_per_s), unit="hosts", goal="<= 0")


def _slow_host(lab: Lab, job: Job, host: int, way: Direction) -> Iterator[Row]:
    _settle(lab, job)
    lab.set(host=host, direction=way, rate_bit_per_s=_BASE_RATE / 4)
    name = f"slow_{way}link_of_host_{host}"
    seconds = job.wait_for(lambda facts: set(facts.slow_link_bits_per_s) == {host}, _SLOW_S)
    yield Row(name=f"{name}_named_after", value=seconds, unit="s", goal=f"<= {_SLOW_S:g}")
    time.sleep(_SETTLE_S)
    is_right = set(job.facts().slow_link_bits_per_s) == {host}
    yield Row(name=f"{name}_still_named", value=int(is_right), unit="", goal="== 1")


def _cut(lab: Lab, job: Job) -> Iterator[Row]:
    """Host 3 is cut off for some seconds: is it named, and does training go on when it is back?"""
    _settle(lab, job)
    lab.cut(3)
    cut_s = time.monotonic()
    seconds = job.wait_for(lambda facts: facts.silent_nodes == {"host 3"}, _SLOW_S)
    yield Row(name="cut_host_named_after", value=seconds, unit="s", goal=f"<= {_SLOW_S:g}")
    time.sleep(max(0.0, _CUT_S - (time.monotonic() - cut_s)))
    lab.reconnect(3)
    steps = job.num_steps
    # TCP tries again after as long as it has waited.
    seconds = job.wait_for(lambda facts: job.num_steps > steps and not facts.silent_nodes, 3 * _SLOW_S)
    yield Row(name="cut_host_back_after", value=seconds, unit="s", goal=f"<= {3 * _SLOW_S:g}")


@contextmanager
def _in_host(lab: Lab, host: int, role: str, *arguments: str) -> Iterator[tuple[IO[str], IO[str]]]:
    """Input and output of a process of `network_host` in a host, ended with the body.

    arguments  after the role; left out, the host's own address
    """
    argv = [sys.executable, "-m", "cgx_ray.bench.network_host", role, *(arguments or (lab.hosts[host].address,))]
    process = lab.popen(host, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with process.stdin, process.stdout:
            yield process.stdin, process.stdout
    finally:
        process.kill()
        process.wait()
