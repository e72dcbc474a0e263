"""Picture of `cgx-ray plan --clusters`: samples per second and per US dollar over the number of GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from cgx_ray.commands.plan.clusters import Rental
from cgx_ray.report.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    add_title,
    clean,
    label,
    new_figure,
    plain_numbers,
)

_COLORS = (BLUE, ORANGE, GREEN, PURPLE, SKY)


def draw_clusters(rentals: Sequence[Rental], *, title: str) -> Figure:
    """Draw samples per second and per US dollar over the number of GPUs, dashed for dense and solid for planned."""
    figure = new_figure(11.5, 5.2)
    speed, money = figure.subplots(1, 2)
    names = list(dict.fromkeys(rental.cluster.name for rental in rentals))
    colors = dict(zip(names, itertools.cycle(_COLORS), strict=False))
    for name in names:
        own = [rental for rental in rentals if rental.cluster.name == name]
        for is_planned in (False, True):
            steps = [rental.answer.best if is_planned else rental.answer.dense for rental in own]
            per_s = [rental.samples_per_s(step) for rental, step in zip(own, steps, strict=True)]
            per_usd = [rental.samples_per_usd(step) for rental, step in zip(own, steps, strict=True)]
            workers = [rental.num_workers for rental in own]
            for axes, values in ((speed, per_s), (money, per_usd)):
                axes.plot(workers, values, "o-" if is_planned else "o--", color=colors[name], mfc=_face(is_planned))
    for axes, what in ((speed, "samples per second"), (money, "samples per US dollar")):
        _finish(axes, what, sorted({rental.num_workers for rental in rentals}))
    handles = [Line2D([], [], color=color, linewidth=3, label=label(name)) for name, color in colors.items()]
    handles += [Line2D([], [], color=INK, linestyle="--", marker="o", mfc="white", label="dense")]
    handles += [Line2D([], [], color=INK, marker="o", label="planned")]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    add_title(figure, title)
    return figure


def _face(is_planned: bool) -> str | None:
    """Return the colour inside of a marker; None is that of its line."""
    return None if is_planned else "white"


def _finish(axes: Axes, what: str, workers: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(workers)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs")
    axes.set_title(what, loc="left", fontsize=10, color=INK)
    plain_numbers(axes.xaxis)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.minorticks_off()
    clean(axes)
