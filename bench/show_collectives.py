"""`cgx-ray bench collectives` from options to table and JSON."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cgx_ray.bench.collectives import CollectiveOptions, Timing, measure_collectives, rows_of, settings_of
from cgx_ray.lab.namespaces import Lab
from cgx_ray.report.result import write_result

_MET = {None: "", True: "yes", False: "no"}


def collectives_command(options: CollectiveOptions, console: Console, json_path: str | None) -> None:
    """Measure, show what came out, and write the rows if `json_path` is given."""
    lab_reason, latency_reason = Lab.available(), Lab.available(rates_only=False)
    settings = settings_of(options, lab_reason, latency_reason)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        timings = measure_collectives(
            options, settings, lambda what, share: progress.update(task, description=what, completed=share)
        )
    rows = rows_of(options, timings)
    console.print(timing_table(options, timings))
    for row in rows:
        if row.goal is not None:
            judged = row.value if row.ratio is None else row.ratio
            console.print(f"{row.name}: {judged:.2f}, goal {row.goal}: {_MET[row.met]}", highlight=False)
    for note in notes(lab_reason, latency_reason):
        console.print(note, highlight=False)
    if json_path:
        write_result("collectives", rows, json_path)


def notes(lab_reason: str | None, latency_reason: str | None) -> list[str]:
    """What is not measured, and why."""
    reasons = {"1 Gbit/s and 100 Mbit/s": lab_reason, "paths with latency": latency_reason}
    return [f"Left out: {what}; {reason}." for what, reason in reasons.items() if reason is not None]


def timing_table(options: CollectiveOptions, timings: Sequence[Timing]) -> Table:
    title = f"{options.num_ranks} ranks, fp32 gradients; slowest rank, median of the rounds"
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=0)
    table.add_column("", no_wrap=True)
    for heading in ("network", "MB", "rounds", "ms", "Gloo / it", "it / bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    for timing in timings:
        setting = timing.setting
        over_bound = "" if timing.bound_s is None else f"{timing.seconds / timing.bound_s:.2f}"
        speedup = f"{timing.gloo_s / timing.seconds:.2f}"
        size, rounds = f"{4e-6 * setting.numel:.0f}", str(setting.num_rounds)
        ms = f"{timing.seconds * 1e3:.1f}"
        table.add_row(timing.case.name, setting.name, size, rounds, ms, speedup, over_bound)
    return table
