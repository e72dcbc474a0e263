"""The picture of a schedule: rate and latency over time."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cgx_ray.lab.link import DIRECTIONS, Direction
from cgx_ray.lab.schedule import Schedule

_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito
_LABELS = {"s": "seconds", "step": "step", "epoch": "epoch"}
_Line = list[tuple[float, float]]


def plot_schedule(schedule: Schedule, path: Path) -> None:
    """Write a PNG: both panels over time, one line for links that are always alike. A cut is a gap."""
    figure = Figure(figsize=(9, 4.8), dpi=130, layout="constrained")
    rate_axes, latency_axes = figure.subplots(2, 1, sharex=True)
    _draw(rate_axes, _lines(schedule, "rate_bit_per_s", 1e-9), schedule.end)
    _draw(latency_axes, _lines(schedule, "latency_s", 1e3), schedule.end)
    rate_axes.set(ylabel="rate (Gbit/s)", title=f"schedule {schedule.name}")
    latency_axes.set(ylabel="latency one way (ms)", xlabel=_LABELS[schedule.unit])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _lines(schedule: Schedule, field: str, scale: float) -> dict[str, _Line]:
    """Points of every link that differs from the others, by name."""
    hosts = sorted({event.host for event in schedule.events if event.host is not None})
    links: list[tuple[int | None, Direction]] = [(host, way) for host in (None, *hosts) for way in DIRECTIONS]
    lines: dict[str, _Line] = {}
    for host, way in links:
        points: _Line = []
        value, is_connected = float("nan"), True
        for event in schedule.events:
            if event.host in (None, host) and event.direction in (None, way):
                is_connected = is_connected if event.is_connected is None else event.is_connected
                new = event.change.get(field)
                value = value if new is None else float(str(new)) * scale
                points.append((event.at, value if is_connected else float("nan")))
        points.append((schedule.end, points[-1][1] if points else value))
        name = ("all" if not hosts else "the others") if host is None else f"host {host}"
        twin = f"{name} up"
        if way == "down" and str(lines[twin]) == str(points):
            lines[name] = lines.pop(twin)
        else:
            lines[f"{name} {way}"] = points
    return lines


def _draw(axes: Axes, lines: dict[str, _Line], end: float) -> None:
    for number, (name, points) in enumerate(lines.items()):
        at, values = zip(*points, strict=True)
        axes.step(at, values, where="post", label=name, color=_COLORS[number % len(_COLORS)], linewidth=2)
    axes.set_xlim(0, end)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3)
    if len(lines) > 1:
        axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
