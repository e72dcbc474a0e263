"""Table and picture of `cgx-ray bench accuracy`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from cgx_ray.bench.accuracy import CodecAccuracy, rows_beside_static
from cgx_ray.bench.accuracy_cases import POLICIES, AccuracyOptions, read_option
from cgx_ray.plan import DENSE
from cgx_ray.report.show import new_table
from cgx_ray.report.style import (
    BLUE,
    DENSE_COLOR,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    YELLOW,
    add_title,
    clean,
    new_figure,
    plain_numbers,
    save_figure,
)
from cgx_ray.units import format_count, format_rate

_COLORS = {
    "none": DENSE_COLOR,
    "dense": DENSE_COLOR,
    "bf16": GREY,
    "qsgd": BLUE,
    "terngrad": SKY,
    "topk": PURPLE,
    "dgc": ORANGE,
    "ef_signsgd": YELLOW,
    "powersgd": GREEN,
    "adaptive": INK,
    "cgx": SKY,
}
_DASHES = ("-", "--", ":", "-.", (0, (1, 3)))
# Losses over dense that the levels of fidelity allow.
_LEVELS = (1.01, 1.05)
# Larger losses over dense are written instead of drawn: the differences of 1 % could not be seen beside them.
_MAX_DRAWN = 1.42


def accuracy_table(options: AccuracyOptions, accuracies: Sequence[CodecAccuracy]) -> Table:
    """Return a table with a row per codec: wire bytes, and the loss of each workload, over dense."""
    title = f"validation loss / dense loss after {options.num_steps} steps, mean and range of {options.num_seeds} seeds"
    table = new_table(title, "", "bytes / dense", *options.workloads, gap=0, wrap=True)
    for option in dict.fromkeys(one.option for one in accuracies):
        found = {one.workload: one for one in accuracies if one.option == option}
        wire_share = max(one.wire_share for one in found.values())
        is_timed = options.rate_bit_per_s is not None
        cells = (_cell(found[workload], is_timed=is_timed) for workload in options.workloads)
        table.add_row(_short(option), f"{wire_share:.3f}", *cells)
    return table


def _cell(one: CodecAccuracy, *, is_timed: bool) -> str:
    if one.num_diverged:
        return f"diverged ({one.num_diverged} of {len(one.runs)})"
    if one.option == str(DENSE):
        return f"loss {sum(run.loss for run in one.runs) / len(one.runs):.4f}"
    speedup = f", {one.speedup:.1f}x as fast" if is_timed and one.speedup is not None else ""
    return f"{one.ratio:.4f} ({min(one.ratios):.3f}..{max(one.ratios):.3f}){speedup}"


def beside_static_table(accuracies: Sequence[CodecAccuracy], *, is_timed: bool) -> Table | None:
    """Return a table of what bits by layer save over 4 bits everywhere; None if no codec has bits."""
    found = [one for one in accuracies if all(math.isfinite(run.bytes_over_static) for run in one.runs)]
    if not found:
        return None
    rows = {row.name: row for one in found for row in one.rows(is_timed=is_timed)}
    rows |= {row.name: row for row in rows_beside_static(accuracies, is_timed=is_timed)}
    columns = ("wire", "error", "loss", *(("seconds", "step") if is_timed else ()))
    table = new_table("over 4 bits everywhere, after the same steps", "", *columns, gap=0)
    for one in found:
        name = f"{one.workload} {_short(one.option)}"
        cells = (rows.get(f"{one.workload} {one.option}: {column} over 4 bits") for column in columns)
        table.add_row(name, *("" if row is None else f"{row.value:.3f}" for row in cells))
    return table


def plot_accuracy(options: AccuracyOptions, accuracies: Sequence[CodecAccuracy], path: Path) -> None:
    """Write the picture: a column per workload with the loss over steps, over time in a lab, and the last losses."""
    is_timed = options.rate_bit_per_s is not None
    num_rows, num_columns = 3 if is_timed else 2, len(options.workloads)
    figure = new_figure(2 + 4.6 * num_columns, 1 + 4.2 * num_rows)
    panels = figure.subplots(num_rows, num_columns, squeeze=False)
    styles = _styles(accuracies)
    for column, workload in enumerate(options.workloads):
        found = [one for one in accuracies if one.workload == workload]
        _draw_curves(panels[0][column], found, styles, 0, "step")
        panels[0][column].set_title(workload)
        if is_timed:
            _draw_curves(panels[1][column], found, styles, 1, "seconds of training")
        _draw_ratios(panels[-1][column], found, styles, has_names=column == 0)
    lines, names = panels[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", frameon=False, fontsize=8, ncols=2 + num_columns)
    network = "loopback" if options.rate_bit_per_s is None else format_rate(options.rate_bit_per_s)
    ranks = format_count(options.num_ranks, "rank")
    seeds = format_count(options.num_seeds, "seed")
    add_title(figure, f"cgx-ray bench accuracy, {ranks}, {network}, {options.num_steps} steps, {seeds}")
    save_figure(figure, path)


def _styles(accuracies: Sequence[CodecAccuracy]) -> dict[str, dict[str, Any]]:
    """Return a colour per codec, and dashes that tell its variants apart."""
    styles: dict[str, dict[str, Any]] = {}
    used: dict[str, int] = {}
    for option in dict.fromkeys(one.option for one in accuracies):
        name = option.partition(":")[0].partition(" ")[0]
        dash = _DASHES[used.get(name, 0) % len(_DASHES)]
        styles[option] = {"color": _COLORS.get(name, INK), "linestyle": dash}
        used[name] = used.get(name, 0) + 1
    return styles


def _short(option: str) -> str:
    """Return an option without the scheme that its codec usually has."""
    if option in POLICIES:
        return option
    codec = option.partition(" over ")[0]
    return codec if option != codec and option == str(read_option(codec)) else option


def _draw_curves(
    axes: Axes, found: Sequence[CodecAccuracy], styles: dict[str, dict[str, Any]], x: int, x_label: str
) -> None:
    for one in found:
        curve, label = one.curve, _short(one.option)
        xs, losses = [point[x] for point in curve], [point[2] for point in curve]
        # Dense is drawn above the others.
        axes.plot(xs, losses, linewidth=1.4, label=label, zorder=3 if label == "dense" else 2, **styles[one.option])
    axes.set_yscale("log")
    plain_numbers(axes.yaxis, minor="12345678")
    axes.set(xlabel=x_label, ylabel="validation loss, nats")
    clean(axes)


def _draw_ratios(
    axes: Axes, found: Sequence[CodecAccuracy], styles: dict[str, dict[str, Any]], *, has_names: bool
) -> None:
    """Draw the last loss over dense's: a point at the mean of the seeds, a line from the least to the largest."""
    compared = [one for one in found if one.option != str(DENSE)]
    for level in (1.0, *_LEVELS):
        axes.axvline(level, color=INK, linewidth=0.8, linestyle="-" if level == 1 else ":")
    for place, one in enumerate(compared):
        color = styles[one.option]["color"]
        if one.ratio <= _MAX_DRAWN:
            axes.plot([min(one.ratios), max(one.ratios)], [place, place], color=color, linewidth=2)
            axes.plot([one.ratio], [place], "o", color=color, markersize=5)
        else:
            text = f"{one.ratio:.2f}" if math.isfinite(one.ratio) else "diverged"
            axes.annotate(f"{text} >", (_MAX_DRAWN, place), ha="right", va="center", fontsize=8, color=color)
    names = [_short(one.option) for one in compared] if has_names else [""] * len(compared)
    axes.set_yticks(range(len(compared)), names, fontsize=8)
    axes.set_ylim(len(compared) - 0.5, -0.5)
    axes.set_xlim(right=min(axes.get_xlim()[1], _MAX_DRAWN))
    axes.set(xlabel="last loss / dense's (dotted: 1.01, 1.05)")
    clean(axes)
