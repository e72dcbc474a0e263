"""The picture of a run: loss over time; step time, the network, and the decisions in both."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cgx_ray.lab.schedule import Schedule, ScheduledAction
from cgx_ray.report.links import Field, draw_links
from cgx_ray.report.live_view import is_new_plan
from cgx_ray.report.record import SMOOTHED_STEPS, RunRecord, smooth_losses
from cgx_ray.report.style import (
    BLUE,
    DENSE_COLOR,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    add_bottom_legend,
    add_title,
    clean,
    fit_values,
    label,
    new_figure,
    save_figure,
)

_COLORS = {"dense": DENSE_COLOR, "adaptive": BLUE}
# Of other runs in a picture, in turn: Tol's colours, which colour-blind readers can tell apart.
_OTHER_COLORS = (GREEN, "#882255", "#999933", "#332288", "#AA4499", "#117733", "#DDCC77")
# None of them is the colour of a run.
_LINK_COLORS = (INK, ORANGE, PURPLE, SKY, "black")
# Of more runs, decisions would cover each other.
MAX_DETAILED = 2
# Field of the network as it was set, and the field of a decision's inputs that estimates it.
_NETWORK: tuple[tuple[Field, str], ...] = (("rate_bit_per_s", "bandwidth_gbps"), ("latency_s", "latency_ms"))


class _StepAxis:
    """Positions on the x axis: steps if all runs have a line for each, else seconds since the run's first line.

    lines  of step times, with their positions: of steps if the axis or nothing else has them, else of the journal
    """

    def __init__(self, record: RunRecord, *, is_by_step: bool) -> None:
        self._steps = record.steps if is_by_step else []
        self._start = record.start_time
        decided = any(line["time"] == self._start for line in record.decisions)
        first = "decision" if decided else "event of the network" if record.network else "line of the journal"
        self.label = "step" if is_by_step else f"seconds since the first {first}"
        ends = [self.at(line) for line in (*record.decisions, *record.outcomes, *record.progress)]
        ends += [self.between(event.time) for event in record.network]
        self.lines: list[tuple[float, float]] = []
        if is_by_step:
            ends += [line.step + 0.5 for line in self._steps]
            self.lines = [(line.step, line.step_s) for line in self._steps]
        elif record.progress:
            self.lines = [(self.at(line), line["step_s"]) for line in record.progress]
            # Nothing ran before a later start.
            self.lines += [
                (self.at(line), math.nan) for line in record.starts if line["time"] > record.progress[0]["time"]
            ]
            self.lines.sort(key=lambda point: point[0])
        elif record.outcomes:
            self.lines = [(self.at(line), line["measured_step_s"]) for line in record.outcomes]
        else:
            self.lines = [(line.time - self._start, line.step_s) for line in record.steps]
        ends += [position for position, _ in self.lines]
        self.begin, self.end = min(ends), max(ends)

    def at(self, line: dict[str, Any]) -> float:
        """Return the position of a journal's line."""
        return float(line["step"] if self._steps else line["time"] - self._start)

    def between(self, time: float) -> float:
        """Return the position of another time: between the steps that ended before and after it."""
        if not self._steps:
            return time - self._start
        return self._steps[0].step + bisect(self._steps, time, key=lambda line: line.time) - 0.5


class _Drawn(NamedTuple):
    """A run, the colour of all that is drawn of it, and its x axis."""

    record: RunRecord
    color: str
    axis: _StepAxis


def _drawn(records: Sequence[RunRecord], *, is_by_step: bool) -> list[_Drawn]:
    others = cycle(_OTHER_COLORS)
    return [
        _Drawn(record, _COLORS.get(record.name) or next(others), _StepAxis(record, is_by_step=is_by_step))
        for record in records
    ]


def plot_runs(records: Sequence[RunRecord], path: Path, *, title: str) -> None:
    """Write the picture of `draw_runs`."""
    save_figure(draw_runs(records, title=title), path)


def draw_runs(records: Sequence[RunRecord], *, title: str) -> Figure:
    """Draw panels for loss (if steps are known), step time, rate and latency.

    records  dense first; each has steps or decisions. Of up to two, decisions are drawn, and the network of the last
             one, as it was set and as its decisions estimated it; of more, losses and step times
    """
    has_loss, has_decisions = all(record.steps for record in records), len(records) <= MAX_DETAILED
    runs, last = _drawn(records, is_by_step=has_loss), records[-1]
    known = {field for event in last.network for field in event.change}
    fields = [
        (field, estimate)
        for field, estimate in (_NETWORK if has_decisions else ())
        if field in known or any(line["inputs"][estimate] is not None for line in last.decisions)
    ]
    rows = ["step", *(field for field, _ in fields)]
    losses = [["loss"]] * len(rows) if has_loss else [[]] * len(rows)
    figure = new_figure(12.5 if has_loss else 9, 4.6 + 1.5 * len(fields))
    panels: dict[str, Axes] = figure.subplot_mosaic(
        [[*left, row] for left, row in zip(losses, rows, strict=True)],
        width_ratios=(1, 1.25) if has_loss else None,
        height_ratios=(3, *(1 for _ in fields)),
    )
    if has_loss:
        _draw_loss(panels["loss"], runs)
    _draw_step_time(panels["step"], runs, has_decisions=has_decisions)
    for field, estimate in fields:
        _draw_network(panels[field], runs[-1], field, estimate)
    right = [panels[row] for row in rows]
    _finish_panels(right, runs, has_changes=has_decisions)
    for run in runs if has_decisions else ():
        _mark_plans(right, run)
    handles = {label: handle for axes in right for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    add_bottom_legend(figure, handles, num_columns=4 if has_loss else 3, fontsize=9)
    add_title(figure, title)
    return figure


def _finish_panels(panels: Sequence[Axes], runs: Sequence[_Drawn], *, has_changes: bool) -> None:
    """Give panels above each other the same x axis, and mark the changes of the last run's network in all of them."""
    begin, end = min(run.axis.begin for run in runs), max(run.axis.end for run in runs)
    margin, (record, _, axis) = 0.02 * (end - begin) or 1.0, runs[-1]
    for axes in panels:
        axes.set_xlim(begin - margin, end + margin)
        axes.tick_params(labelbottom=axes is panels[-1])
        for change in record.changes if has_changes else ():
            at = axis.between(change.time)
            axes.axvline(at, color=_LINK_COLORS[0], linestyle=":", linewidth=1.2, label="the network changes")
        clean(axes)
    panels[-1].set_xlabel(axis.label)


def _draw_loss(axes: Axes, runs: Sequence[_Drawn]) -> None:
    for record, color, _ in runs:
        start = record.start_time
        seconds = [line.time - start for line in record.steps]
        axes.plot(seconds, [line.loss for line in record.steps], color=color, alpha=0.25, linewidth=1)
        losses = smooth_losses(record.steps)
        axes.plot(seconds, losses, color=color, linewidth=2.2, label=label(record.name))
        axes.plot(seconds[-1], losses[-1], "o", color=color)
        axes.annotate(
            f"{seconds[-1]:.0f} s",
            (seconds[-1], losses[-1]),
            textcoords="offset points",
            xytext=(8, 0),
            va="center",
            color=color,
            fontweight="bold",
        )
        for change in record.changes:
            axes.axvline(change.time - start, color=color, linestyle=":", linewidth=1.2)
    axes.set(
        xlabel="seconds of training",
        ylabel=f"loss (nats per byte, mean of {SMOOTHED_STEPS} steps)",
        title="Loss over time",
    )
    axes.margins(x=0.1)
    clean(axes)


def _draw_step_time(axes: Axes, runs: Sequence[_Drawn], *, has_decisions: bool) -> None:
    for run in runs:
        record, color, axis = run
        at, seconds = [position for position, _ in axis.lines], [step_s for _, step_s in axis.lines]
        axes.plot(at, seconds, color=color, linewidth=1.4, marker="o", markersize=2.5, label=label(record.name))
        if has_decisions:
            predicted = [line["predicted_step_s"] for line in record.decisions]
            _draw_decisions(axes, run, "step predicted", predicted, "D")
    if len(runs) == 1 and record.decisions:
        at = [*(axis.at(line) for line in record.decisions), axis.end]
        seconds = [line["predicted_dense_s"] for line in (*record.decisions, record.decisions[-1])]
        axes.step(at, seconds, where="post", color=_COLORS["dense"], linestyle="--", label="dense step predicted")
    fit_values(axes)
    # Leaves room for the names of the plans.
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        axes.set_ylim(low, high * (high / low) ** 0.2)
    title = "Step time, network and decisions" if has_decisions else "Step time"
    axes.set(ylabel="seconds per step (log scale)", title=title)


def _draw_network(axes: Axes, run: _Drawn, field: Field, estimate: str) -> None:
    record, axis = run.record, run.axis
    events = tuple(ScheduledAction(at=axis.between(event.time), **event.action_fields()) for event in record.network)
    schedule = Schedule(name=record.name, unit="step", events=events, end=axis.end)
    num_hosts = next((event.num_hosts for event in record.network if event.num_hosts is not None), None)
    draw_links(axes, schedule, field, colors=_LINK_COLORS, num_hosts=num_hosts)
    for line in axes.lines:
        line.set_label(f"{line.get_label()}, as set")
    # Nothing measures the link of a sharded model's messages.
    estimates = [
        math.nan if line["inputs"][estimate] is None else line["inputs"][estimate] for line in record.decisions
    ]
    # Within a machine no latency is measured, and decisions take a usual one.
    if record.progress and all(line[estimate] is None for line in record.progress):
        _draw_decisions(axes, run, "latency not measured, assumed", estimates, "s")
    else:
        _draw_decisions(axes, run, "network estimated", estimates, "o")
    fit_values(axes)


def _draw_decisions(axes: Axes, run: _Drawn, name: str, values: Sequence[float], marker: str) -> None:
    """Draw a marker per decision, filled where the plan changed."""
    record, color, axis = run
    for is_kept in (False, True):
        chosen = [index for index, line in enumerate(record.decisions) if is_new_plan(line) != is_kept]
        if chosen:
            axes.plot(
                [axis.at(record.decisions[index]) for index in chosen],
                [values[index] for index in chosen],
                color=color,
                linestyle="none",
                marker=marker,
                markersize=6,
                markerfacecolor="none" if is_kept else color,
                label=f"{name}, plan {'kept' if is_kept else 'changed'}",
            )


def _mark_plans(panels: Sequence[Axes], run: _Drawn) -> None:
    """Draw a line through all panels where a new plan came into force; without steps, where it was decided."""
    record, color, axis = run
    marks = [(axis.at(line), line["new"]["plan"]) for line in record.decisions if is_new_plan(line)]
    if record.steps:
        pairs = zip(record.steps, record.steps[1:], strict=False)
        # A plan on trial becomes permanent under another version: nothing new, although later decisions keep that one.
        decided = {line["new"].get("version") for line in record.decisions if is_new_plan(line)}
        marks = [
            (line.step, line.plan)
            for before, line in pairs
            if line.plan_version != before.plan_version and (line.plan_version in decided or line.plan != before.plan)
        ]
    for index, (at, plan) in enumerate(marks):
        for axes in panels:
            axes.axvline(at, color=color, linestyle="--", linewidth=1, alpha=0.8, label="new plan")
        is_left = at < (axis.begin + axis.end) / 2
        panels[0].annotate(
            label(plan),
            (at, 0.965 - 0.055 * (index % 4)),
            xycoords=panels[0].get_xaxis_transform(),
            textcoords="offset points",
            xytext=(4 if is_left else -4, 0),
            ha="left" if is_left else "right",
            va="center",
            fontsize=8,
            color=color,
            bbox={"facecolor": "white", "edgecolor": color, "linewidth": 0.6, "boxstyle": "round,pad=0.2"},
        )
