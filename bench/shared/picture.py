"""The one way in which benches draw: panels of named lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes

from cgx_ray.report.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    add_legend,
    add_title,
    clean,
    new_figure,
    plain_numbers,
    save_figure,
)

_COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY, INK)
# More panels than these are drawn small.
_MAX_LARGE = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Points with a name. `x`: numbers, or names of places. `style`: matplotlib's, such as "o--"."""

    label: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float]
    style: str = "o-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One pair of axes. `log`: which of them are logarithmic."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log: Literal["", "x", "y", "xy"] = ""


def draw_panels(title: str, panels: Sequence[Plot], path: Path) -> None:
    """Write a picture. A name has the same colour in all panels; panels of the same names share a legend."""
    names = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    num_columns = math.ceil(math.sqrt(len(panels)))
    num_rows = math.ceil(len(panels) / num_columns)
    width, height = (6.0, 4.6) if len(panels) <= _MAX_LARGE else (3.6, 2.6)
    figure = new_figure(1 + width * num_columns, 1 + height * num_rows)
    all_axes = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for panel, axes in zip(panels, all_axes, strict=False):
        _draw_panel(axes, panel, names)
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    if all([line.label for line in panel.lines] == names for panel in panels):
        lines, labels = all_axes[0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside lower center", frameon=False, fontsize=8, ncols=2 * num_columns)
    else:
        for axes in all_axes[: len(panels)]:
            add_legend(axes)
    add_title(figure, title)
    save_figure(figure, path)


def _draw_panel(axes: Axes, panel: Plot, names: Sequence[str]) -> None:
    for line in panel.lines:
        color = _COLORS[names.index(line.label) % len(_COLORS)]
        axes.plot(line.x, line.y, line.style, color=color, label=line.label, linewidth=1.4, markersize=4)
        if line.x and isinstance(line.x[0], str):
            axes.set_xticks(range(len(line.x)), map(str, line.x), rotation=40, ha="right", fontsize=8)
    axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
    if "x" in panel.log:
        axes.set_xscale("log")
        plain_numbers(axes.xaxis)
    if "y" in panel.log:
        axes.set_yscale("log")
        plain_numbers(axes.yaxis, minor="25")
    clean(axes)
