"""Table of `cgx-ray bench step`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from cgx_ray.bench.step import StepTiming
from cgx_ray.bench.step_cases import StepNetwork, StepOptions
from cgx_ray.report.show import new_table


def step_table(options: StepOptions, network: StepNetwork, timings: Sequence[StepTiming]) -> Table:
    """Return a table with one row per way: milliseconds of a step, and ratios within this run."""
    title = (
        f"{options.model}, {options.num_ranks} ranks, {1e3 * options.backward_s:g} ms of backward, {network.title}; "
        "slowest rank, median"
    )
    headings = ("", "ms", "/ DDP", "/ fp16 hook", "limit ms", "/ limit", "predicted ms", "groups")
    table = new_table(title, *headings, gap=0)
    for timing in timings:
        table.add_row(
            timing.way.name,
            _ms(timing.seconds),
            _ratio(timing.over(timing.ddp_s)),
            _ratio(timing.over(timing.fp16_hook_s)),
            _ms(timing.limit_s),
            _ratio(timing.over(timing.limit_s)),
            _ms(timing.predicted_s),
            "" if timing.plan is None else str(len(timing.plan.groups)),
        )
    return table


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.0f}"


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"
