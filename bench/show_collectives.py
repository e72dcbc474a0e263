"""Table and notes of `cgx-ray bench collectives`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from cgx_ray.bench.collective_cases import CollectiveOptions
from cgx_ray.bench.collectives import Timing
from cgx_ray.report.show import new_table


def notes(lab_reason: str | None, latency_reason: str | None) -> list[str]:
    """Return a line per setting that is not measured, with the reason."""
    reasons = {"1 Gbit/s and 100 Mbit/s": lab_reason, "paths with latency": latency_reason}
    return [f"Left out: {what}; {reason}." for what, reason in reasons.items() if reason is not None]


def timing_table(options: CollectiveOptions, timings: Sequence[Timing]) -> Table:
    """Return a table with one row per case and setting."""
    title = f"{options.num_ranks} ranks, fp32 gradients; slowest rank, median of the rounds"
    table = new_table(title, "", "network", "MB", "rounds", "ms", "Gloo / it", "it / bound", gap=0)
    for timing in timings:
        setting = timing.setting
        over_bound = "" if timing.bound_s is None else f"{timing.seconds / timing.bound_s:.2f}"
        speedup = f"{timing.gloo_s / timing.seconds:.2f}"
        size, rounds = f"{4e-6 * setting.numel:.0f}", str(setting.num_rounds)
        ms = f"{timing.seconds * 1e3:.1f}"
        table.add_row(timing.case.name, setting.name, size, rounds, ms, speedup, over_bound)
    return table
