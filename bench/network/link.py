"""Rows of `python -m bench network` for one constant link: probes on an idle link, estimates under a training.

The truth is the lab's setting: the rate without the headers of IP and TCP, and the one-way latency.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

from bench.network.host import process_in_host
from bench.network.job import WatchedJob
from bench.shared.ranks import BenchError
from cgx_ray.control.journal.facts import LoopFacts
from cgx_ray.lab.link import MTU_BYTES
from cgx_ray.lab.namespaces import Lab
from cgx_ray.report.result import Row
from cgx_ray.units import compact_rate

# Payload bytes per byte of an IP packet, which is what the lab's rates count: 52 bytes are IP and TCP headers with time
# stamps.
PAYLOAD = 1 - 52 / MTU_BYTES
# Seconds until steps that began on the previous link are over.
DRAIN_S = 2.0
# Seconds until estimates of a new link have settled.
SETTLE_S = 6.0
# Steps that estimates need at least.
MIN_STEPS = 6
STEPS_TIMEOUT_S = 15.0
# Share of a rate that the lab must deliver among all hosts before estimates are held against that rate.
MIN_DELIVERED = 0.95
# Latency of the links while that is measured, seconds.
_CHECK_LATENCY_S = 1e-3
# Seconds until a probe that the loop awaits must have come.
PROBE_S = 15.0


def probe_rows(lab: Lab, points: list[tuple[float, float]]) -> Iterator[Row]:
    """Probe from host 0 to host 1 over idle links, each with a (rate, latency) of `points`."""
    with process_in_host(lab, 0, "prober") as (orders, answers), process_in_host(lab, 1, "prober") as (_, target):
        answers.readline()
        addresses = target.readline()
        for rate, latency_s in points:
            lab.set(rate_bit_per_s=rate, latency_s=latency_s)
            orders.write(addresses)
            orders.flush()
            line = answers.readline()
            if not line:
                raise BenchError("the probe from host 0 to host 1 failed; its message is above")
            found_s, bytes_per_s = map(float, line.split())
            yield from error_rows("active", rate, latency_s, 8 * bytes_per_s, found_s, goal="<= 0.05")


def delivered_row(lab: Lab, rate: float) -> Row:
    """Measure what the lab delivers while every host sends at `rate` to the next one, as in a training.

    The slowest link counts. On few cores the lab's switch may be slower than fast links.
    """
    lab.set(rate_bit_per_s=rate, latency_s=_CHECK_LATENCY_S)
    with ExitStack() as stack:
        probers = [stack.enter_context(process_in_host(lab, host, "prober")) for host in range(len(lab.hosts))]
        addresses = [answers.readline() for _, answers in probers]
        for host, (orders, _) in enumerate(probers):
            orders.write(addresses[(host + 1) % len(probers)])
            orders.flush()
        found = [answers.readline().split() for _, answers in probers]
    if not all(found):
        raise BenchError("a probe between neighbouring hosts failed; its message is above")
    delivered, truth = min(8 * float(bytes_per_s) for _, bytes_per_s in found), rate * PAYLOAD
    name = f"lab_delivers_{compact_rate(rate)}"
    return Row(name=name, value=delivered / 1e6, unit="Mbit/s", limit=truth / 1e6, ratio=delivered / truth)


def estimate_goal(delivered: Row | None) -> str | None:
    """Return the goal of a known bandwidth; None where the lab itself does not deliver the rate (`delivered_row`)."""
    is_delivered = delivered is None or (delivered.ratio is not None and delivered.ratio >= MIN_DELIVERED)
    return "<= 0.2" if is_delivered else None


def estimate_rows(lab: Lab, job: WatchedJob, rate: float, latency_s: float, delivered: Row | None = None) -> list[Row]:
    """Compare the loop's estimates of one link with the truth, after SETTLE_S, MIN_STEPS, and a probe if needed.

    The loop orders a probe as in a real training, but by a faster clock (`watched_loop`). The probe shares the link
    with the job.

    delivered  of `delivered_row`, for rates that the lab may not deliver: the baseline of the bandwidth
    """
    lab.set(rate_bit_per_s=rate, latency_s=latency_s)
    time.sleep(DRAIN_S)
    lab.clear_counters()
    job.start_over()
    job.wait_for(lambda facts: job.num_steps >= MIN_STEPS, STEPS_TIMEOUT_S)
    time.sleep(SETTLE_S)
    job.wait_for(lambda facts: facts.is_link_known, PROBE_S)
    facts, name = job.facts(), _point_name(rate, latency_s)
    goal = estimate_goal(delivered)
    bandwidth, latency = error_rows("known", rate, latency_s, facts.bandwidth_bits_per_s, facts.latency_s, goal=goal)
    return [
        replace(bandwidth, baseline=delivered.value if delivered is not None else None),
        latency,
        Row(name=f"was_probed_{name}", value=int(_is_probed(facts)), unit=""),
        Row(name=f"late_p99_{name}", value=lab.counters().late_p99_ms, unit="ms"),
    ]


def restart_estimates(job: WatchedJob) -> None:
    """Wait until steps on the previous link are over, restart the loop, and wait until its estimates have settled."""
    time.sleep(DRAIN_S)
    job.start_over()
    time.sleep(SETTLE_S)


def error_rows(
    source: str, rate: float, latency_s: float, found_rate: float | None, found_s: float | None, goal: str | None = None
) -> Iterator[Row]:
    """Yield the relative error of the rate, and the error of the latency over the allowed 20 % or 0.2 ms."""
    name, truth = _point_name(rate, latency_s), rate * PAYLOAD
    yield Row(
        name=f"{source}_bandwidth_{name}",
        value=found_rate and found_rate / 1e6,
        unit="Mbit/s",
        limit=truth / 1e6,
        ratio=None if found_rate is None else abs(found_rate / truth - 1),
        goal=goal,
    )
    yield Row(
        name=f"{source}_latency_{name}",
        value=found_s and found_s * 1e3,
        unit="ms",
        limit=latency_s * 1e3,
        ratio=None if found_s is None else abs(found_s - latency_s) / max(0.2 * latency_s, 2e-4),
        goal="<= 1",
    )


def _is_probed(facts: LoopFacts) -> bool:
    return facts.bandwidth is not None and facts.bandwidth.source == "probes"


def _point_name(rate: float, latency_s: float) -> str:
    return f"{compact_rate(rate)}_{latency_s * 1e3:g}ms"
