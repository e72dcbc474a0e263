"""Tables of `cgx-ray plan`: the step, the groups of the plan, and a sweep of the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table

from cgx_ray.plan import Option
from cgx_ray.planner.joint import BestPlan
from cgx_ray.planner.prediction import Prediction
from cgx_ray.planner.scenario import Price, Sweep
from cgx_ray.report.show import new_table

MAX_ROWS = 20


def step_table(answer: BestPlan, price: Price | None, num_workers: int) -> Table:
    """Return a table of the dense step and the planned one."""
    table = new_table(None, "", "dense", "planned")
    dense, best = answer.dense, answer.best
    assert best.efficiency is not None
    table.add_row("step, ms", *(f"{1e3 * step.step_s:.1f}" for step in (dense, best)))
    table.add_row("compute alone, ms", *(f"{1e3 * step.compute_s:.1f}" for step in (dense, best)))
    table.add_row("bound by", *(step.bound_by for step in (dense, best)))
    for part in dense.timeline.parts_s:
        shares = (step.timeline.parts_s[part] / step.step_s if step.step_s else 0.0 for step in (dense, best))
        table.add_row(f"  critical path, {part}", *(f"{share:.0%}" for share in shares))
    num_bytes = (sum(group.wire_bytes for group in step.groups) for step in (dense, best))
    table.add_row("gradient encoded, MB", *(f"{each / 1e6:.2f}" for each in num_bytes))
    table.add_row("gain kept", "100%", f"{best.efficiency:.1%}")
    table.add_row("progress against dense", "1x", f"{answer.speedup:.2f}x")
    table.add_row("a better plan could save", "", f"{answer.gap:.2%} at most")
    if price is not None:
        table.add_row("USD per hour", *[f"{num_workers * price.usd_per_hour:.2f}"] * 2)
        if price.samples is not None:
            epochs = [price.epoch(step.step_s, num_workers) for step in (dense, best)]
            table.add_row("hours per epoch", *(f"{epoch.hours:.3g}" for epoch in epochs))
            table.add_row("USD per epoch", *(f"{epoch.usd:.2f}" for epoch in epochs))
            table.add_row("USD for equal progress", f"{epochs[0].usd:.2f}", f"{epochs[1].usd / best.efficiency:.2f}")
    return table


def group_table(step: Prediction) -> Table:
    """Return a table of the plan with one row per group, without the middle of a long plan."""
    columns = ("group", "layers", "elements", "dense MB", "wire MB")
    table = new_table(f"plan: {step.describe()}", *columns, num_left=0)
    table.add_column("option", overflow="fold")
    last = len(step.groups) - 1
    for index, group in enumerate(step.groups):
        if len(step.groups) > MAX_ROWS and MAX_ROWS // 2 <= index <= last - MAX_ROWS // 2:
            if index == MAX_ROWS // 2:
                table.add_row("...")
            continue
        table.add_row(
            str(index),
            str(len(group.layers)),
            f"{group.numel:,}",
            f"{group.dense_bytes / 1e6:.2f}",
            f"{group.wire_bytes / 1e6:.3f}",
            group.option.describe(),
        )
    return table


def sweep_table(sweep: Sweep, points: Sequence[BestPlan]) -> Table:
    """Return a table of the values at which the plan or its bound changes, and of the last value."""
    columns = (sweep.unit, "dense ms", "planned ms", "progress")
    table = new_table(f"sweep over {sweep.name}", *columns, num_left=0)
    table.add_column("bound by", no_wrap=True)
    table.add_column("most bytes use", overflow="fold")
    before = None
    for index, (value, point) in enumerate(zip(sweep.values, points, strict=True)):
        now = (point.best.bound_by, main_option(point.best).describe())
        if now != before or index == len(points) - 1:
            numbers = (f"{1e3 * point.dense.step_s:.1f}", f"{1e3 * point.best.step_s:.1f}", f"{point.speedup:.2f}x")
            table.add_row(f"{value:.0f}" if sweep.name == "workers" else f"{value:.3g}", *numbers, *now)
        before = now
    return table


def main_option(step: Prediction) -> Option:
    """Return the option that carries most of a step's dense bytes."""
    num_bytes: Counter[Option] = Counter()
    for group in step.groups:
        num_bytes[group.option] += group.dense_bytes
    return max(num_bytes, key=lambda option: num_bytes[option])
