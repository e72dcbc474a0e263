"""Pictures of a predicted plan: steps as lanes over time, and step time over a sweep of the network."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cgx_ray.commands.plan.plan_tables import main_option
from cgx_ray.plan import Option
from cgx_ray.planner.joint import BestPlan
from cgx_ray.planner.prediction import Prediction
from cgx_ray.planner.scenario import Sweep
from cgx_ray.planner.timeline import BACKWARD, Resource, StageSpan
from cgx_ray.report.style import (
    BLUE,
    DENSE_COLOR,
    GREY,
    INK,
    add_title,
    clean,
    codec_color,
    new_figure,
    plain_numbers,
)

_COMPUTE_COLOR = GREY
_PLANNED_COLOR = BLUE
_LANES: Mapping[Resource, str] = {
    Resource.COMPUTE: "compute",
    Resource.CODEC: "codec",
    Resource.INTRA: "inside nodes",
    Resource.INTER: "between nodes",
}


def draw_answer(answer: BestPlan, *, title: str, sweep: Sweep | None = None, points: Sequence[BestPlan] = ()) -> Figure:
    """Draw the dense step, the planned step below it, and the sweep, with one plan per value, at the bottom."""
    drawn = [*answer.dense.options, *answer.best.options, *(main_option(point.best) for point in points)]
    colors = _colors(drawn)
    lanes = _lanes((answer.dense, answer.best))
    height = 1.1 + 2 * (0.75 + 0.42 * len(lanes)) + (4.0 if sweep else 0)
    figure = new_figure(11.5, height)
    ratios = [1, 1, 4.0 / (0.75 + 0.42 * len(lanes))] if sweep else [1, 1]
    rows = figure.subplots(len(ratios), 1, height_ratios=ratios)
    for axes, name, step in ((rows[0], "dense", answer.dense), (rows[1], "planned", answer.best)):
        _draw_step(axes, name, step, lanes, colors)
        axes.set_xlim(0, 1e3 * max(answer.dense.step_s, answer.best.step_s) * 1.01)
    rows[0].tick_params(labelbottom=False)
    rows[1].set_xlabel("milliseconds of a step, which ends at the line; every other group is lighter")
    if sweep:
        _draw_sweep(rows[2], sweep, points, colors)
    handles = [Patch(color=_COMPUTE_COLOR, label="forward and backward")]
    handles += [Patch(color=color, label=name) for name, color in colors.items()]
    handles += [Patch(facecolor="white", edgecolor=INK, hatch="////", linewidth=0.5, label="latency")]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    add_title(figure, title)
    return figure


def draw_change(before: Prediction, after: Prediction, *, width: float) -> Figure:
    """Draw the predicted steps under two plans, one above the other. `width`: inches."""
    colors, lanes = _colors([*before.options, *after.options]), _lanes((before, after))
    figure = new_figure(width, 1.3 + 2 * (0.45 + 0.26 * len(lanes)) + 0.16 * len(colors))
    rows = figure.subplots(2, 1)
    for axes, name, step in ((rows[0], "before", before), (rows[1], "after", after)):
        _draw_step(axes, name, step, lanes, colors)
        axes.set_xlim(0, 1e3 * max(before.step_s, after.step_s) * 1.01)
    rows[0].tick_params(labelbottom=False)
    rows[1].set_xlabel("milliseconds of a step")
    handles = [Patch(color=_COMPUTE_COLOR, label="forward and backward")]
    handles += [Patch(color=color, label=name) for name, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower left", ncols=1, frameon=False, fontsize=8)
    return figure


def _colors(options: Iterable[Option]) -> dict[str, str]:
    """Return a colour per option: that of its codec, lighter for its further options."""
    colors: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for option in dict.fromkeys(options):
        colors[option.describe()] = codec_color(option.codec.name, seen[option.codec.name])
        seen[option.codec.name] += 1
    return colors


def _lanes(steps: Sequence[Prediction]) -> list[Resource]:
    """Return the lanes in use, and compute."""
    used = {
        resource
        for step in steps
        for span in step.timeline.spans
        for resource, busy_s in span.stage.busy_s.items()
        if busy_s > 0
    }
    return [lane for lane in _LANES if lane in used | {Resource.COMPUTE}]


def _draw_step(axes: Axes, name: str, step: Prediction, lanes: Sequence[Resource], colors: Mapping[str, str]) -> None:
    for span in step.timeline.spans:
        color = _COMPUTE_COLOR if span.stage.name == BACKWARD else colors[step.groups[span.group].option.describe()]
        _draw_span(axes, span, lanes, color)
    end_ms = 1e3 * step.step_s
    axes.axvline(end_ms, color=INK, linewidth=1)
    axes.set_yticks(range(len(lanes)), [_LANES[lane] for lane in lanes])
    axes.set_ylim(len(lanes) - 0.45, -0.55)
    axes.set_title(
        f"{name}: {end_ms:.4g} ms, bound by {step.bound_by}" + (f"; {step.describe()}" if name == "planned" else ""),
        loc="left",
        fontsize=10,
        color=INK,
    )
    clean(axes, hidden_spines=("top", "right", "left"))
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def _draw_span(axes: Axes, span: StageSpan, lanes: Sequence[Resource], color: str) -> None:
    """Draw a bar as long as the stage, as high as the fraction of it in which the lane works; latency is hatched.

    Latency is at the end of the stage, and drawn where the stage works, except on compute.
    """
    latency_s = span.stage.latency_s
    works_s = span.stage.duration_s - latency_s
    # Every other group is lighter, so that its ends are visible.
    alpha = 0.95 if span.group % 2 == 0 else 0.7
    for resource, busy_s in span.stage.busy_s.items():
        if resource not in lanes:
            continue
        lane = lanes.index(resource)
        if busy_s > 0:
            height = 0.8 * max(0.12, busy_s / works_s)
            box = [(1e3 * span.start_s, 1e3 * works_s)], (lane + 0.4 - height, height)
            axes.broken_barh(*box, color=color, alpha=alpha, linewidth=0)
        if latency_s > 0 and resource is not Resource.COMPUTE:
            axes.broken_barh(
                [(1e3 * (span.end_s - latency_s), 1e3 * latency_s)],
                (lane - 0.4, 0.8),
                facecolor="white",
                edgecolor=color,
                hatch="////",
                linewidth=0.5,
            )


def _draw_sweep(axes: Axes, sweep: Sweep, points: Sequence[BestPlan], colors: Mapping[str, str]) -> None:
    """Draw step times (dense, planned, compute alone), and along the bottom the option that most bytes use."""
    values, middle = list(sweep.values), len(sweep.values) // 2
    lines = (
        ("dense", [1e3 * point.dense.step_s for point in points], DENSE_COLOR, "-", 5),
        ("planned", [1e3 * point.best.step_s for point in points], _PLANNED_COLOR, "-", 5),
        ("compute alone", [1e3 * point.dense.compute_s for point in points], _COMPUTE_COLOR, "--", -14),
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    for name, step_ms, color, style, label_pt in lines:
        axes.plot(values, step_ms, style, color=color, linewidth=2.2, label=name)
        at = (values[middle], step_ms[middle])
        axes.annotate(name, at, (4, label_pt), textcoords="offset points", color=color, fontweight="bold")
    axes.fill_between(values, lines[1][1], lines[0][1], color=_PLANNED_COLOR, alpha=0.08, linewidth=0)
    low, high = axes.get_ylim()
    axes.set_ylim(low / (high / low) ** 0.16, high * (high / low) ** 0.05)
    edges = [values[0], *(math.sqrt(a * b) for a, b in itertools.pairwise(values)), values[-1]]
    for index, point in enumerate(points):
        axes.axvspan(
            edges[index], edges[index + 1], 0, 0.07, color=colors[main_option(point.best).describe()], linewidth=0
        )
    axes.text(0.006, 0.033, "option of most bytes", transform=axes.transAxes, color="white", fontsize=8, va="center")
    axes.set_xlim(values[0], values[-1])
    axes.set_xlabel(f"{sweep.name}, {sweep.unit}" if sweep.name != "workers" else "workers")
    axes.set_ylabel("milliseconds per step")
    plain_numbers(axes.xaxis)
    plain_numbers(axes.yaxis, minor="25")
    clean(axes)
