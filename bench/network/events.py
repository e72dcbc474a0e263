"""Rows of `bench network` for events: changed links, a bursty neighbour, slow hosts, a host that is cut off."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator

from bench.network.host import process_in_host
from bench.network.job import WatchedJob
from bench.network.link import PAYLOAD, PROBE_S, SETTLE_S, error_rows, restart_estimates
from cgx_ray.control.journal.facts import LoopFacts
from cgx_ray.lab.link import Direction, LinkChange
from cgx_ray.lab.namespaces import Lab
from cgx_ray.report.result import Row

# Link on which events happen, in bits per second and seconds: fast enough to be realistic, slow enough for two cores.
BASE_RATE = 2e8
BASE_LATENCY_S = 5e-3
_NOTICE_TIMEOUT_S = 15.0
# Seconds within which a slow or cut host must be named.
_NAMED_S = 10.0
# Seconds for which a host is cut off.
_CUT_S = 8.0


def change_rows(lab: Lab, job: WatchedJob) -> Iterator[Row]:
    """Measure seconds from a change by 2x until the loop counts it and its estimate is nearer to the new link."""
    _reset(lab, job)
    rate, latency_s = BASE_RATE * PAYLOAD / math.sqrt(2), BASE_LATENCY_S * math.sqrt(2)
    changes: dict[str, tuple[LinkChange, Callable[[LoopFacts], bool]]] = {
        "bandwidth_halved": ({"rate_bit_per_s": BASE_RATE / 2}, lambda f: (f.bandwidth_bits_per_s or math.inf) < rate),
        "bandwidth_doubled": ({"rate_bit_per_s": BASE_RATE}, lambda f: (f.bandwidth_bits_per_s or 0) > rate),
        "latency_doubled": ({"latency_s": 2 * BASE_LATENCY_S}, lambda f: (f.latency_s or 0) > latency_s),
        "latency_halved": ({"latency_s": BASE_LATENCY_S}, lambda f: (f.latency_s or math.inf) < latency_s),
    }
    for name, (change, has_moved) in changes.items():
        lab.set(**change)
        yield Row(name=f"notice_{name}", value=_notice_s(job, has_moved), unit="s", goal="<= 5")
        time.sleep(SETTLE_S)


def neighbour_rows(lab: Lab, job: WatchedJob, minutes: float) -> list[Row]:
    """Count the changes that the loop notices on a constant link that another program uses in bursts."""
    _reset(lab, job)
    address = lab.hosts[1].address
    with (
        process_in_host(lab, 1, "sink") as (_, sink),
        process_in_host(lab, 0, "neighbour", address, sink.readline().strip()),
    ):
        job.start_over()
        job.wait_for(lambda facts: False, minutes * 60)
        return [
            Row(name="neighbour_minutes", value=minutes, unit="min"),
            Row(name="neighbour_false_alarms", value=job.facts().num_link_changes, unit="alarms", goal="<= 0"),
            Row(name="neighbour_seen", value=(job.watched().neighbour_bytes_per_s or 0) * 8e-6, unit="Mbit/s"),
        ]


def slow_host_rows(lab: Lab, job: WatchedJob) -> Iterator[Row]:
    """Check that the loop names a slow uplink and a slow downlink, and none if all uplinks are slower than downlinks.

    In the last case receivers observe up to twice what each sender can sustain, so probes measure the bandwidth.
    """
    yield from _slow_host(lab, job, 2, "up")
    yield from _slow_host(lab, job, 1, "down")
    _reset(lab, job)
    lab.set(direction="up", rate_bit_per_s=BASE_RATE / 2)
    restart_estimates(job)
    job.wait_for(lambda facts: facts.is_link_known, PROBE_S)
    facts = job.facts()
    yield next(error_rows("asymmetric", BASE_RATE / 2, BASE_LATENCY_S, facts.bandwidth_bits_per_s, None, goal="<= 0.2"))
    yield Row(name="asymmetric_hosts_named", value=len(facts.slow_link_bits_per_s), unit="hosts", goal="<= 0")


def cut_rows(lab: Lab, job: WatchedJob) -> Iterator[Row]:
    """Cut host 3 off for some seconds: the loop must name it, and training must go on when it is back."""
    _reset(lab, job)
    lab.cut(3)
    cut_s = time.monotonic()
    seconds = job.wait_for(lambda facts: _addresses(facts.silent_nodes) == {lab.hosts[3].address}, _NAMED_S)
    yield Row(name="cut_host_named_after", value=seconds, unit="s", goal=f"<= {_NAMED_S:g}")
    time.sleep(max(0.0, _CUT_S - (time.monotonic() - cut_s)))
    lab.reconnect(3)
    steps = job.num_steps
    # TCP waits before it tries again, as long as the link was down.
    seconds = job.wait_for(lambda facts: job.num_steps > steps and not facts.silent_nodes, 3 * _NAMED_S)
    yield Row(name="cut_host_back_after", value=seconds, unit="s", goal=f"<= {3 * _NAMED_S:g}")


def _addresses(node_ids: Collection[str]) -> set[str]:
    return {node_id.rpartition(" ")[2] for node_id in node_ids}


def _reset(lab: Lab, job: WatchedJob) -> None:
    lab.set(rate_bit_per_s=BASE_RATE, latency_s=BASE_LATENCY_S)
    restart_estimates(job)


def _notice_s(job: WatchedJob, has_moved: Callable[[LoopFacts], bool]) -> float | None:
    before = job.facts().num_link_changes
    return job.wait_for(lambda facts: facts.num_link_changes > before and has_moved(facts), _NOTICE_TIMEOUT_S)


def _slow_host(lab: Lab, job: WatchedJob, host: int, direction: Direction) -> Iterator[Row]:
    _reset(lab, job)
    lab.set(host=host, direction=direction, rate_bit_per_s=BASE_RATE / 4)
    name = f"slow_{direction}link_of_host_{host}"
    seconds = job.wait_for(lambda facts: set(facts.slow_link_bits_per_s) == {host}, _NAMED_S)
    yield Row(name=f"{name}_named_after", value=seconds, unit="s", goal=f"<= {_NAMED_S:g}")
    time.sleep(SETTLE_S)
    is_right = set(job.facts().slow_link_bits_per_s) == {host}
    yield Row(name=f"{name}_still_named", value=int(is_right), unit="", goal="== 1")
