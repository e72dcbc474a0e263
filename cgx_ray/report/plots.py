"""The picture of a demo: loss over time, and step time over steps with the decisions in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cgx_ray.report.record import RunRecord
from cgx_ray.report.smoothing import smooth_losses

# Colour-blind safe (Okabe and Ito).
_COLORS = {"dense": "#D55E00", "adaptive": "#0072B2"}
_OTHER_COLOR = "#009E73"
_SHADE = "#56B4E9"


def plot_runs(records: Sequence[RunRecord], path: Path, *, title: str) -> None:
    """Write a PNG with both panels for `records`, dense first."""
    figure = Figure(figsize=(12.5, 5.2), dpi=130, layout="constrained")
    loss_axes, step_axes = figure.subplots(1, 2, width_ratios=(1, 1.25))
    _draw_loss(loss_axes, records)
    _draw_step_time(step_axes, records)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_loss(axes: Axes, records: Sequence[RunRecord]) -> None:
    for record in records:
        start = record.steps[0].time - record.steps[0].step_s
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
        steps = [line.step for line in record.steps]
        axes.plot(
            steps,
            [line.step_s for line in record.steps],
            color=color,
            linewidth=1.4,
            marker="o",
            markersize=2.5,
            label=record.name,
        )
    axes.set_yscale("log")
    # Room for the plans' names above and the network's rate below.
    low, high = axes.get_ylim()
    axes.set_ylim(low / (high / low) ** 0.12, high * (high / low) ** 0.35)
    _shade_phases(axes, records[0])
    for record in records:
        _mark_decisions(axes, record)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axes.set(xlabel="step", ylabel="seconds a step (log scale)", title="Step time and decisions")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    _clean(axes)


def _shade_phases(axes: Axes, record: RunRecord) -> None:
    last = record.steps[-1].step
    for change in record.changes:
        axes.axvspan(change.step + 0.5, last + 0.5, color=_SHADE, alpha=0.16, linewidth=0)
        axes.text(
            change.step + 1,
            0.02,
            f"network: {change.rate_bit_per_s / 1e6:g} Mbit/s",
            transform=axes.get_xaxis_transform(),
            color="#444444",
            fontsize=9,
        )


def _mark_decisions(axes: Axes, record: RunRecord) -> None:
    """A line at the first step of each new plan, with the plan's name; a ring where the plan was kept."""
    color = _COLORS.get(record.name, _OTHER_COLOR)
    step_s = {line.step: line.step_s for line in record.steps}
    kept = [line["step"] for line in record.decisions if line["kind"] == "keep" and line["step"] in step_s]
    if kept:
        axes.plot(
            kept,
            [step_s[step] for step in kept],
            color=color,
            linestyle="none",
            marker="o",
            markersize=8,
            markerfacecolor="none",
            label="decided to keep the plan",
        )
    before = record.steps[0].plan_version
    marks = []
    for line in record.steps[1:]:
        if line.plan_version != before:
            marks.append(line)
            before = line.plan_version
    middle = record.steps[-1].step / 2
    for index, line in enumerate(marks):
        axes.axvline(line.step, color=color, linestyle="--", linewidth=1, alpha=0.8)
        is_left = line.step < middle
        axes.annotate(
            f"{line.plan}",
            (line.step, 0.965 - 0.055 * (index % 4)),
            xycoords=axes.get_xaxis_transform(),
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
