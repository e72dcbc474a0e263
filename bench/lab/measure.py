"""`python -m bench lab`: compares Gloo's all-reduce in the lab with the alpha-beta model.

A time is that of the slowest rank, from a barrier until it holds the sum; the median of several rounds, after one that
opens the TCP windows. The model is that of the dense ring. A row is sound if the switch delivered 99 % of the packets
less than 0.2 ms late. If a sound row is far from the model, the cause is TCP and Gloo, as on real wires.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench.shared.rank_process import run_rank
from bench.shared.ranks import started_ranks
from bench.shared.runner import BenchRun, bench_command
from cgx_ray.lab.namespaces import Lab
from cgx_ray.plan import Scheme
from cgx_ray.planner.cost import Link, exchange_s
from cgx_ray.report.result import Row
from cgx_ray.units import compact_rate

_NUM_RANKS = 4
RATES = (1e8, 5e8, 1e9, 2e9)
LATENCIES_S = (0.05e-3, 0.5e-3, 5e-3, 25e-3)
_NUM_ROUNDS = 5
# The gradient takes this long at the rate, so that every row takes the same time.
_WIRE_S = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class LabPoint:
    """Seconds of an all-reduce of `numel` float32 over one link."""

    rate_bit_per_s: float
    latency_s: float
    numel: int
    seconds: float
    late_p99_ms: float

    @property
    def model_s(self) -> float:
        return exchange_s(
            Scheme.DENSE,
            num_workers=_NUM_RANKS,
            dense_bytes=4 * self.numel,
            wire_bytes=4 * self.numel,
            link=Link(alpha_s=self.latency_s, beta_s_per_byte=8 / self.rate_bit_per_s),
        )

    @property
    def name(self) -> str:
        return f"gloo_allreduce_{compact_rate(self.rate_bit_per_s)}_{self.latency_s * 1e3:g}ms"

    def rows(self) -> list[Row]:
        return [
            Row(name=self.name, value=self.seconds, unit="s", limit=self.model_s, ratio=self.seconds / self.model_s),
            Row(name=f"{self.name}_late_p99", value=self.late_p99_ms, unit="ms"),
        ]


def measure_lab(
    rates: Sequence[float], latencies_s: Sequence[float], on_point: Callable[[LabPoint], None]
) -> list[LabPoint]:
    """Time an all-reduce between four processes, each in its own host, over every link.

    Raises BenchError if a rank ends early, LabError if the lab cannot be made.
    """
    points = []
    with (
        Lab(_NUM_RANKS, rate_bit_per_s=rates[0], latency_s=0) as lab,
        started_ranks("bench.lab.measure", {}, name="bench lab", num_ranks=_NUM_RANKS, lab=lab) as ranks,
    ):
        lines = ranks.lines()
        for rate, latency_s in itertools.product(rates, latencies_s):
            numel = int(_WIRE_S * rate / 8 * _NUM_RANKS / (2 * (_NUM_RANKS - 1)) / 4)
            lab.set(rate_bit_per_s=rate, latency_s=latency_s)
            lab.clear_counters()
            ranks.send_line(str(numel))
            seconds, late = float(next(lines)), lab.counters().late_p99_ms
            points.append(
                LabPoint(rate_bit_per_s=rate, latency_s=latency_s, numel=numel, seconds=seconds, late_p99_ms=late)
            )
            on_point(points[-1])
    return points


@bench_command()
def lab(run: BenchRun) -> Iterable[Row]:
    """Compare the lab with the alpha-beta model.

    Times Gloo's all-reduce on 4 hosts over 16 links. Takes about a minute. Limits are the model's seconds. A number is
    sound if the switch was less than 0.2 ms late.
    """
    num_links = len(RATES) * len(LATENCIES_S)
    names = itertools.count(1)
    points = measure_lab(RATES, LATENCIES_S, lambda point: run.on_part(point.name, next(names) / num_links))
    return [row for point in points for row in point.rows()]


def _measure(job: dict[str, Any]) -> None:
    for line in sys.stdin:
        grad_N = torch.zeros(int(line))
        seconds_R = torch.zeros(1 + _NUM_ROUNDS, dtype=torch.float64)
        for turn in range(1 + _NUM_ROUNDS):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(grad_N)
            seconds_R[turn] = time.perf_counter() - start
        dist.all_reduce(seconds_R, op=dist.ReduceOp.MAX)
        if job["rank"] == 0:
            print(seconds_R[1:].median().item(), flush=True)


if __name__ == "__main__":
    run_rank(_measure)
