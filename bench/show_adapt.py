"""Table and picture of `cgx-ray bench adapt`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table

from cgx_ray.bench.adapt import AdaptNumbers
from cgx_ray.report.result import Row
from cgx_ray.report.show import new_table
from cgx_ray.report.style import BLUE, GREY, add_title, clean, new_figure, plain_numbers, save_figure

_COLUMNS = {
    "regret": ("regret", "{:.1%}"),
    "over_best_static": ("/ static", "{:.2f}"),
    "slower_than_dense": ("slow", "{:.1%}"),
    "slow_stretch": ("on end, s", "{:.1f}"),
    "switches": ("/ min", "{:.1f}"),
    "false_disables": ("false", "{:.0f}"),
    "answer": ("answer, s", "{:.1f}"),
    "answer_steps": ("steps", "{:.0f}"),
}


def adapt_table(numbers: AdaptNumbers) -> Table:
    """Return one row per case; a number that misses its goal has an exclamation mark."""
    table = new_table("the loop over the best plan of each moment", "", *(name for name, _ in _COLUMNS.values()), gap=0)
    rows = {row.name: row for row in numbers.rows}
    for case in numbers.runs:
        table.add_row(case, *(_cell(rows.get(f"{case}_{name}"), text) for name, (_, text) in _COLUMNS.items()))
    return table


def papers_table(numbers: AdaptNumbers) -> Table:
    """Return one row per case: seconds of each paper's policy over ours for the same progress, and why.

    The reason in brackets: seconds of a step, and progress of a step, both over ours. The first over the second is the
    number before it.
    """
    names = [run.policy for run in next(iter(numbers.papers.values()))[1:]]
    table = new_table("papers' policies over ours (step x, progress x)", "", *names, gap=0)
    for case, (ours, *others) in numbers.papers.items():
        cells = (
            f"{run.score / ours.score:.2f} ({run.step_s / ours.step_s:.2f}, {run.efficiency / ours.efficiency:.2f})"
            for run in others
        )
        table.add_row(case, *cells)
    return table


def _cell(row: Row | None, text: str) -> str:
    if row is None or row.value is None:
        return ""
    return text.format(row.value) + ("!" if row.met is False else "")


def plot_paces(scores: Mapping[str, Sequence[tuple[float, float, float]]], path: Path) -> None:
    """Write a picture with a panel per case: seconds per progress over time, of the loop and of the best plan.

    scores  of each step of a case: when it began, and both numbers
    """
    num_columns = min(4, len(scores))
    num_lines = math.ceil(len(scores) / num_columns)
    figure = new_figure(3.6 * num_columns, 2.4 * num_lines)
    panels = figure.subplots(num_lines, num_columns, squeeze=False).flat
    for (case, steps), axes in zip(scores.items(), panels, strict=False):
        time_s, plan_s, best_s = zip(*steps, strict=True)
        axes.plot(time_s, best_s, color=GREY, linewidth=3, label="best plan")
        axes.plot(time_s, plan_s, color=BLUE, linewidth=1, label="loop")
        axes.set(title=case, yscale="log")
        plain_numbers(axes.yaxis, minor="25")
        clean(axes)
    for axes in panels:
        axes.set_visible(False)
    add_title(figure, "cgx-ray bench adapt: seconds per progress of a dense step; grey: the best plan")
    save_figure(figure, path)
