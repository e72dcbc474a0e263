"""The picture of a run: loss over time; step time, the network, and the decisions in both."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cgx_ray.lab.plot import Field, draw_links, fit_values
from cgx_ray.lab.schedule import Event, Schedule
from cgx_ray.report.record import RunRecord
from cgx_ray.report.smoothing import smooth_losses

# Colour-blind safe (Okabe and Ito); the links' own are none of the runs'.
_COLORS = {"dense": "#D55E00", "adaptive": "#0072B2"}
_OTHER_COLOR = "#009E73"
_LINK_COLORS = ("#555555", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
# What the network was set to, and what the controller counted with.
_NETWORK: tuple[tuple[Field, str], ...] = (("rate_bit_per_s", "bandwidth_gbps"), ("latency_s", "latency_ms"))


class _Axis:
    """Where things lie: at steps if the run has a line for each, else at seconds since its first line."""

    def __init__(self, record: RunRecord) -> None:
        self._steps = record.steps
        self._start = start_time(record)
        decided = any(line["time"] == self._start for line in record.decisions)
        first = "decision" if decided else "event of the network"
        self.label = "step" if record.steps else f"seconds since the first {first}"
        ends = [self.at(line) for line in (*record.decisions, *record.outcomes)]
        ends += [self.between(event.time) for event in record.network]
        ends += [line.step + 0.5 for line in record.steps]
        self.begin, self.end = min(ends), max(ends)

    def at(self, line: dict[str, Any]) -> float:
        """Of a journal's line."""
        return float(line["step"] if self._steps else line["time"] - self._start)

    def between(self, time: float) -> float:
        """Of anything else: between the steps that ended before and after `time`."""
        if not self._steps:
            return time - self._start
        return self._steps[0].step + bisect(self._steps, time, key=lambda line: line.time) - 0.5


def start_time(record: RunRecord) -> float:
    """When the first step began; without steps, the first time that is known."""
    if record.steps:
        return record.steps[0].time - record.steps[0].step_s
    times: list[float] = [line["time"] for line in record.decisions]
    return min([*times, *(event.time for event in record.network)])


def plot_runs(records: Sequence[RunRecord], path: Path, *, title: str) -> None:
    """Write the picture of `draw_runs`."""
    figure = draw_runs(records, title=title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_runs(records: Sequence[RunRecord], *, title: str) -> Figure:
    """Panels for loss, if steps are known, step time, rate and latency.

    records  dense first; each has steps or decisions. The network is that of the last one: as set, and as decisions
             counted with it
    """
    last = records[-1]
    axis = _Axis(last)
    known = {field for event in last.network for field in event.change}
    fields = [(field, used) for field, used in _NETWORK if last.decisions or field in known]
    rows = ["step", *(field for field, _ in fields)]
    losses = [["loss"]] * len(rows) if last.steps else [[]] * len(rows)
    figure = Figure(figsize=(12.5 if last.steps else 9, 4.6 + 1.5 * len(fields)), dpi=130, layout="constrained")
    panels: dict[str, Axes] = figure.subplot_mosaic(
        [[*left, row] for left, row in zip(losses, rows, strict=True)],
        width_ratios=(1, 1.25) if last.steps else None,
        height_ratios=(3, *(1 for _ in fields)),
    )
    if last.steps:
        _draw_loss(panels["loss"], records)
    _draw_step_time(panels["step"], records)
    for field, used in fields:
        _draw_network(panels[field], last, axis, field, used)
    right = [panels[row] for row in rows]
    margin = 0.02 * (axis.end - axis.begin) or 1.0
    for axes in right:
        axes.set_xlim(axis.begin - margin, axis.end + margin)
        axes.tick_params(labelbottom=axes is right[-1])
        for change in last.changes:
            at = axis.between(change.time)
            axes.axvline(at, color=_LINK_COLORS[0], linestyle=":", linewidth=1.2, label="the network changes")
        _clean(axes)
    for record in records:
        _mark_plans(right, record)
    right[-1].set_xlabel(axis.label)
    handles = {label: handle for axes in right for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    place = "outside lower center"
    ncols = 4 if last.steps else 3
    figure.legend(handles.values(), handles.keys(), loc=place, ncols=ncols, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    return figure


def _draw_loss(axes: Axes, records: Sequence[RunRecord]) -> None:
    for record in records:
        start = start_time(record)
        seconds = [line.time - start for line in record.steps]
        color = _COLORS.get(record.name, _OTHER_COLOR)
        axes.plot(seconds, [line.loss for line in record.steps], color=color, alpha=0.25, linewidth=1)
        losses = smooth_losses(record.steps)
        axes.plot(seconds, losses, color=color, linewidth=2.2, label=record.name)
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
    axes.set(xlabel="seconds of training", ylabel="loss (nats a byte, mean of 10 steps)", title="Loss over time")
    axes.margins(x=0.1)
    axes.legend(frameon=False)
    _clean(axes)


def _draw_step_time(axes: Axes, records: Sequence[RunRecord]) -> None:
    for record in records:
        color = _COLORS.get(record.name, _OTHER_COLOR)
        axis = _Axis(record)
        if record.steps:
            steps, seconds = [line.step for line in record.steps], [line.step_s for line in record.steps]
            axes.plot(steps, seconds, color=color, linewidth=1.4, marker="o", markersize=2.5, label=record.name)
        elif record.outcomes:
            at = [axis.at(line) for line in record.outcomes]
            seconds = [line["measured_step_s"] for line in record.outcomes]
            axes.plot(at, seconds, color=color, linestyle="none", marker="s", label="step, measured after a decision")
        predicted = [line["predicted_step_s"] for line in record.decisions]
        _draw_decisions(axes, record, axis, "step predicted", predicted, "D")
    if len(records) == 1 and record.decisions:
        at = [*(axis.at(line) for line in record.decisions), axis.end]
        seconds = [line["predicted_dense_s"] for line in (*record.decisions, record.decisions[-1])]
        axes.step(at, seconds, where="post", color=_COLORS["dense"], linestyle="--", label="dense step predicted")
    fit_values(axes)
    # Room for the plans' names.
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.2)
    axes.set(ylabel="seconds a step (log scale)", title="Step time, network and decisions")


def _draw_network(axes: Axes, record: RunRecord, axis: _Axis, field: Field, used: str) -> None:
    events = tuple(
        Event(
            at=axis.between(event.time),
            host=event.host,
            direction=event.direction,
            change=event.change,
            is_connected=event.is_connected,
        )
        for event in record.network
    )
    schedule = Schedule(name=record.name, unit="step", events=events, end=axis.end)
    num_hosts = next((event.num_hosts for event in record.network if event.num_hosts is not None), None)
    draw_links(axes, schedule, field, colors=_LINK_COLORS, num_hosts=num_hosts)
    for line in axes.lines:
        line.set_label(f"{line.get_label()}, as set")
    counted_with = [line["inputs"][used] for line in record.decisions]
    _draw_decisions(axes, record, axis, "network counted with", counted_with, "o")
    fit_values(axes)


def _draw_decisions(
    axes: Axes, record: RunRecord, axis: _Axis, name: str, values: Sequence[float], marker: str
) -> None:
    """A marker for each decision, full where it brought another plan."""
    color = _COLORS.get(record.name, _OTHER_COLOR)
    for is_kept in (False, True):
        chosen = [index for index, line in enumerate(record.decisions) if (line["kind"] == "keep") == is_kept]
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


def _mark_plans(panels: Sequence[Axes], record: RunRecord) -> None:
    """A line through all panels where each new plan came into force, or was decided if steps are not known."""
    color = _COLORS.get(record.name, _OTHER_COLOR)
    axis = _Axis(record)
    marks = [(axis.at(line), line["new"]["plan"]) for line in record.decisions if line["kind"] != "keep"]
    if record.steps:
        pairs = zip(record.steps, record.steps[1:], strict=False)
        marks = [(line.step, line.plan) for before, line in pairs if line.plan_version != before.plan_version]
    for index, (at, plan) in enumerate(marks):
        for axes in panels:
            axes.axvline(at, color=color, linestyle="--", linewidth=1, alpha=0.8, label="another plan")
        is_left = at < (axis.begin + axis.end) / 2
        panels[0].annotate(
            plan,
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


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
