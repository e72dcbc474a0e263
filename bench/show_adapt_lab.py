"""Rows and tables of `cgx-ray bench adapt --lab`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from cgx_ray.bench.adapt_lab import AdaptLabNumbers, PlanTime
from cgx_ray.bench.adapt_lab_cases import COMPUTE_S, RATE_DIVISOR, AdaptLabOptions
from cgx_ray.report.result import Row
from cgx_ray.report.show import new_table
from cgx_ray.units import compact_rate

# Largest time of the loop over that of the best static plan of each phase, of the best single plan, and of dense.
ORACLE_GOAL, STATIC_GOAL, DENSE_GOAL = "<= 1.1", "<= 1", "<= 1.03"
# Largest relative error of a simulated step.
SIMULATION_GOAL = "<= 0.1"


def lab_rows(numbers: AdaptLabNumbers, *, has_goals: bool) -> Iterator[Row]:
    """Yield all numbers. Ratios are of seconds for the same progress, within this run."""

    def goal(text: str) -> str | None:
        return text if has_goals else None

    for name, score in numbers.scores.items():
        yield Row(name=f"{name}_over_oracle", value=score.over_oracle, unit="x", goal=goal(ORACLE_GOAL))
        yield Row(name=f"{name}_over_best_static", value=score.over_best_static, unit="x", goal=goal(STATIC_GOAL))
        for way, progress in score.static.items():
            yield Row(name=f"{name}_{way}_over_oracle", value=score.oracle / progress, unit="x")
        yield Row(name=f"{name}_switches", value=float(numbers.num_switches[name]), unit="switches")
    for point in numbers.grid:
        yield Row(
            name=f"{point.network.name}_over_dense",
            value=point.pace_s,
            unit="s",
            baseline=point.ddp_s,
            ratio=point.pace_s / point.ddp_s,
            goal=goal(DENSE_GOAL),
        )
    for one in numbers.times:
        yield Row(
            name=_simulated(one),
            value=one.simulated_s,
            unit="s",
            baseline=one.step_s,
            ratio=abs(one.error),
            goal=goal(SIMULATION_GOAL),
        )
    for way, seconds in _processor_s(numbers).items():
        yield Row(name=f"processors_{way}", value=seconds, unit="s")
    yield Row(name="lab_minutes", value=numbers.seconds / 60, unit="min")


def scale_line(options: AdaptLabOptions) -> str:
    """Return how the papers' networks are scaled to the lab."""
    return (
        f"{options.num_ranks} ranks, {options.workload().dense_bytes / 1e6:.1f} MB of gradients, "
        f"{1e3 * COMPUTE_S:g} ms of compute per step. Schedules: rates divided by {RATE_DIVISOR:g}, as for a model "
        f"{RATE_DIVISOR:g} times as large; latencies as in the paper; {options.epoch_s:g} s per epoch."
    )


def times_table(numbers: AdaptLabNumbers, rows: dict[str, Row]) -> Table:
    """Return seconds of a step by network and plan, and the error of the simulated time."""
    ways = list(dict.fromkeys(one.way for one in numbers.times))
    table = new_table("seconds per step; simulated over lab, less 1; *: best for progress", "", *ways, gap=0)
    pace_s, times = numbers.pace_s, {(one.network, one.way): one for one in numbers.times}
    for network, paces in pace_s.items():
        best, cells = min(paces, key=paces.__getitem__), []
        for way in ways:
            one, star = times[network, way], "*" if way == best else ""
            cells.append(f"{one.step_s:.3f}{star} {one.error:+.0%}{mark(rows[_simulated(one)])}")
        table.add_row(network.name, *cells)
    table.add_row("of it processors", *(f"{seconds:.3f}" for seconds in _processor_s(numbers).values()))
    return table


def _processor_s(numbers: AdaptLabNumbers) -> dict[str, float]:
    return {one.way: one.processor_s for one in numbers.times}


def _simulated(one: PlanTime) -> str:
    """Return the name of the row of a simulated time."""
    return f"simulated_{one.way}_{one.network.name}"


def scores_table(numbers: AdaptLabNumbers, rows: dict[str, Row]) -> Table:
    """Return a row per schedule: times for the same progress, over the oracle's."""
    ways = list(next(iter(numbers.scores.values())).static)
    title = "time for the same progress, over the best static plan of each phase"
    table = new_table(title, "", "loop", "/ best static", *ways, "switches", gap=0)
    for name, score in numbers.scores.items():
        table.add_row(
            name,
            f"{score.over_oracle:.2f}{mark(rows[f'{name}_over_oracle'])}",
            f"{score.over_best_static:.2f}{mark(rows[f'{name}_over_best_static'])}",
            *(f"{score.oracle / score.static[way]:.2f}" for way in ways),
            str(numbers.num_switches[name]),
        )
    return table


def grid_table(numbers: AdaptLabNumbers, rows: dict[str, Row]) -> Table:
    """Return a row per rate, a column per latency: time of the loop over plain DDP's for the same progress."""
    latencies_s = list(dict.fromkeys(point.network.latency_s for point in numbers.grid))
    headings = [f"{1e3 * latency_s:g} ms" for latency_s in latencies_s]
    table = new_table("adaptive over plain DDP, time for the same progress, from the second step on", "", *headings)
    ratios: dict[float, list[str]] = {}
    for point in numbers.grid:
        row = rows[f"{point.network.name}_over_dense"]
        assert point.network.rate_bit_per_s is not None
        ratios.setdefault(point.network.rate_bit_per_s, []).append(f"{row.ratio:.2f}{mark(row)}")
    for rate, cells in ratios.items():
        table.add_row(compact_rate(rate), *cells)
    return table


def mark(row: Row) -> str:
    """Return an exclamation mark if `row` misses its goal."""
    return "!" if row.met is False else ""
