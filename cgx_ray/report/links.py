"""Rate and latency of links over time: the picture of a schedule, and two panels of a run's picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes

from cgx_ray.lab.link import DIRECTIONS, Direction
from cgx_ray.lab.schedule import Schedule
from cgx_ray.report.style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    add_legend,
    clean,
    fit_values,
    new_figure,
    save_figure,
)

COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
_LABELS = {"s": "seconds", "step": "step", "epoch": "epoch"}
_UNITS = {"rate_bit_per_s": ("rate (Gbit/s)", 1e-9), "latency_s": ("latency,\none way (ms)", 1e3)}
Field = Literal["rate_bit_per_s", "latency_s"]
_Line = list[tuple[float, float]]


def plot_schedule(schedule: Schedule, path: Path) -> None:
    """Write a picture of rate and latency over time.

    Links with equal values share a line. While a host is cut off, its line has a gap.
    """
    figure = new_figure(9, 4.8)
    rate_axes, latency_axes = figure.subplots(2, 1, sharex=True)
    draw_links(rate_axes, schedule, "rate_bit_per_s")
    draw_links(latency_axes, schedule, "latency_s")
    for axes in (rate_axes, latency_axes):
        fit_values(axes)
        axes.set_xlim(0, schedule.end)
        clean(axes)
        if len(axes.lines) > 1:
            add_legend(axes)
    rate_axes.set(title=f"schedule {schedule.name}")
    latency_axes.set(xlabel=_LABELS[schedule.unit])
    save_figure(figure, path)


def draw_links(
    axes: Axes, schedule: Schedule, field: Field, *, colors: Sequence[str] = COLORS, num_hosts: int | None = None
) -> None:
    """Draw `field` of all links from event to event, in Gbit/s or ms.

    Each host has a colour; its downlink is dashed if it differs from the uplink.

    num_hosts  number of hosts in the lab. None if unknown: then there may be hosts that no event names
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
            linewidth=1.8 if axes.lines else 3,  # so that it shows below lines that lie on it
        )
    axes.set_ylabel(label)


def _lines(schedule: Schedule, field: Field, scale: float, num_hosts: int | None = None) -> dict[str, _Line]:
    """Return the points of each link that differs from the others, by name; of every host if events name all."""
    hosts = sorted({event.host for event in schedule.events if event.host is not None})
    links: list[tuple[int | None, Direction]] = [(host, one_way) for host in (None, *hosts) for one_way in DIRECTIONS]
    if len(hosts) == num_hosts:
        links = links[len(DIRECTIONS) :]
    lines: dict[str, _Line] = {}
    for host, direction in links:
        points = _points(schedule, field, scale, host, direction)
        name = ("all links" if not hosts else "the others") if host is None else f"host {host}"
        is_known = not all(math.isnan(shown) for _, shown in points)
        # As text, because nan differs from itself.
        if not is_known or (host is not None and str(points) == str(lines.get("the others"))):
            continue
        if direction == "down" and str(lines.get(f"{name} up")) == str(points):
            lines[name] = lines.pop(f"{name} up")
        else:
            lines[f"{name} {direction}"] = points
    if len(lines) == num_hosts and len({str(points) for points in lines.values()}) == 1:
        return {"all links": lines.popitem()[1]}
    return lines


def _points(schedule: Schedule, field: Field, scale: float, host: int | None, direction: Direction) -> _Line:
    """Return (time, value) for each change of one link and for the end; nan while the host is cut off."""
    points: _Line = []
    value, is_connected = float("nan"), True
    for event in schedule.events:
        if event.host not in (None, host) or event.direction not in (None, direction):
            continue
        is_connected = is_connected if event.is_connected is None else event.is_connected
        new = event.change.get(field)
        value = value if new is None else new * scale
        shown = value if is_connected else float("nan")
        if points and points[-1][0] == event.at:
            points.pop()
        if not points or str(shown) != str(points[-1][1]):
            points.append((event.at, shown))
    points.append((schedule.end, points[-1][1] if points else value))
    return points
