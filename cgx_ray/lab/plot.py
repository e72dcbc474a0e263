"""Rate and latency of links over time: the picture of a schedule, and two panels of a run's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cgx_ray.lab.link import DIRECTIONS, Direction
from cgx_ray.lab.schedule import Schedule

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito
_LABELS = {"s": "seconds", "step": "step", "epoch": "epoch"}
_UNITS = {"rate_bit_per_s": ("rate (Gbit/s)", 1e-9), "latency_s": ("latency,\none way (ms)", 1e3)}
Field = Literal["rate_bit_per_s", "latency_s"]
_Line = list[tuple[float, float]]


def plot_schedule(schedule: Schedule, path: Path) -> None:
    """Write a PNG: both panels over time, one line for links that are always alike. A cut is a gap."""
    figure = Figure(figsize=(9, 4.8), dpi=130, layout="constrained")
    rate_axes, latency_axes = figure.subplots(2, 1, sharex=True)
    draw_links(rate_axes, schedule, "rate_bit_per_s")
    draw_links(latency_axes, schedule, "latency_s")
    for axes in (rate_axes, latency_axes):
        fit_values(axes)
        axes.set_xlim(0, schedule.end)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if len(axes.lines) > 1:
            axes.legend(frameon=False)
    rate_axes.set(title=f"schedule {schedule.name}")
    latency_axes.set(xlabel=_LABELS[schedule.unit])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_links(
    axes: Axes, schedule: Schedule, field: Field, *, colors: Sequence[str] = COLORS, num_hosts: int | None = None
) -> None:
    """Draw `field` of all links from event to event, in Gbit/s or ms: a colour a host, downlinks dashed if unlike.

    num_hosts  of the lab; None if it is not known, then there may be others than those that events name
    """
    label, scale = _UNITS[field]
    hosts = sorted({event.host for event in schedule.events if event.host is not None})
    numbers = {f"host {host}": number for number, host in enumerate(hosts, start=1)}
    for name, points in _lines(schedule, field, scale, num_hosts).items():
        at, values = zip(*points, strict=True)
        number = numbers.get(name.removesuffix(" up").removesuffix(" down"), 0)
        axes.step(
            at,
            values,
            where="post",
            label=name,
            color=colors[number % len(colors)],
            linestyle="--" if name.endswith(" down") else "-",
            linewidth=1.8 if axes.lines else 3,  # the first one shows below those that lie on it
        )
    axes.set_ylabel(label)


def fit_values(axes: Axes) -> None:
    """Limits of the values drawn so far, on a logarithmic axis that has numbers on it; a linear one if any is 0."""
    drawn = np.concatenate([np.empty(0), *(np.asarray(line.get_ydata(), float) for line in axes.lines)])
    values = drawn[np.isfinite(drawn)]
    if len(values) and values.min() > 0:
        axes.set_yscale("log")
        low, high = float(values.min()) / 2, float(values.max()) * 2
        axes.set_ylim(low, high)
        # Of numbers that begin with 1, 2 or 5 there is always one; over more than two decades powers of 10 do.
        leading = "25" if high <= 100 * low else ""
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in leading else "")


def _lines(schedule: Schedule, field: Field, scale: float, num_hosts: int | None = None) -> dict[str, _Line]:
    """Points of every link that differs from the others, by name; of every host if there are no others."""
    hosts = sorted({event.host for event in schedule.events if event.host is not None})
    links: list[tuple[int | None, Direction]] = [(host, way) for host in (None, *hosts) for way in DIRECTIONS]
    if len(hosts) == num_hosts:
        links = links[len(DIRECTIONS) :]
    lines: dict[str, _Line] = {}
    for host, way in links:
        points: _Line = []
        value, is_connected = float("nan"), True
        for event in schedule.events:
            if event.host in (None, host) and event.direction in (None, way):
                is_connected = is_connected if event.is_connected is None else event.is_connected
                new = event.change.get(field)
                value = value if new is None else new * scale
                shown = value if is_connected else float("nan")
                if points and points[-1][0] == event.at:
                    points.pop()
                if not points or str(shown) != str(points[-1][1]):
                    points.append((event.at, shown))
        points.append((schedule.end, points[-1][1] if points else value))
        name = ("all links" if not hosts else "the others") if host is None else f"host {host}"
        twin = f"{name} up"
        is_known = not all(math.isnan(shown) for _, shown in points)
        if not is_known or (host is not None and str(points) == str(lines.get("the others"))):
            continue
        if way == "down" and str(lines.get(twin)) == str(points):
            lines[name] = lines.pop(twin)
        else:
            lines[f"{name} {way}"] = points
    if len(lines) == num_hosts and len({str(points) for points in lines.values()}) == 1:
        return {"all links": lines.popitem()[1]}
    return lines
