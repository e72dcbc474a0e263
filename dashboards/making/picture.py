"""Draws what the boards will show, with their own queries: `python -m dashboards.making.picture FILE.png`.

It trains for about a minute on a local Ray cluster, with Debian's Prometheus beside it. Not a picture of Grafana.
"""

from __future__ import annotations

import re
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from cgx_ray.report.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    clean,
    fit_values,
    new_figure,
    save_figure,
)
from dashboards.making.board import BITS_PER_S, BYTES_PER_S, SHARE, Kind, Panel, chosen
from dashboards.making.files import BOARDS
from dashboards.making.prometheus import Series
from dashboards.making.recording import RUN_NAME, Recording, ray_and_prometheus, record

_COLUMNS = 4
# Series of a panel from which names would hide the lines, and letters of a name: ids of nodes are long.
_MOST_NAMES, _NAME_LENGTH = 10, 40
_COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GREY)
_SCALE = {SHARE: (100, "%"), BITS_PER_S: (1e-6, "Mbit/s"), BYTES_PER_S: (1e-6, "MB/s")}


def draw(recording: Recording, path: Path) -> None:
    """Draw every panel that has lines or states and is not empty."""
    panels = [
        (f"{name}: {question.title}", question, series)
        for name, board in BOARDS.items()
        for question in board.questions
        if question.kind not in (Kind.NUMBER, Kind.NAME, Kind.MATRIX)
        if (series := named_series(recording, question))
    ]
    num_rows = -(-len(panels) // _COLUMNS)
    figure = new_figure(5.2 * _COLUMNS, 2.9 * num_rows)
    grid = figure.subplots(num_rows, _COLUMNS, squeeze=False).flatten()
    for axes, (title, question, series) in zip(grid, panels, strict=False):
        axes.set_title(title, fontsize=9, loc="left")
        _draw(axes, question, series, recording)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    day = datetime.fromtimestamp(recording.start_s, UTC).date()
    figure.suptitle(
        f"What the boards show of a run on a link that falls from 200 to 20 Mbit/s ({day}). Time in seconds; dotted: "
        "the link falls; dashed: a plan is changed",
        fontsize=11,
    )
    save_figure(figure, path)


def named_series(recording: Recording, question: Panel) -> list[tuple[str, Series]]:
    """Return the series of a panel while the run went on, with the names that Grafana gives them."""
    return [
        (_name(query.legend, one), one)
        for query in question.queries
        for one in recording.server.query_range(
            chosen(query.expression, run=RUN_NAME), recording.start_s, recording.end_s, 1.0
        )
    ]


def _name(legend: str, series: Series) -> str:
    name = re.sub(r"{{(\w+)}}", lambda match: series.labels.get(match[1], ""), legend)
    return name if len(name) <= _NAME_LENGTH else f"{name[:8]}..."


def _draw(axes: Axes, question: Panel, series: list[tuple[str, Series]], recording: Recording) -> None:
    factor, unit = _SCALE.get(question.unit, (1, question.unit.removeprefix("suffix: ")))
    if question.kind is Kind.STATES:
        _draw_states(axes, series, recording)
    elif question.kind is Kind.STACK:
        times_s = np.unique([time_s for _, one in series for time_s, _ in one.points])
        heights = []
        for _, one in series:
            known_s, values = np.transpose(one.points)
            heights.append(factor * np.interp(times_s, known_s, values, left=0, right=0))
        axes.stackplot(
            times_s - recording.start_s, *heights, labels=[name for name, _ in series], colors=_COLORS, alpha=0.7
        )
    else:
        for color, (name, one) in zip(_COLORS * len(series), series, strict=False):
            times_s, values = _with_gaps(one)
            axes.plot(times_s - recording.start_s, factor * values, label=name, color=color, linewidth=1.4)
        if question.is_log:
            fit_values(axes)
        else:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.axvline(recording.changed_s - recording.start_s, color=GREY, linestyle=":", linewidth=1)
    for entry in recording.decisions:
        if entry["kind"] != "keep":
            axes.axvline(entry["time"] - recording.start_s, color=PURPLE, linestyle="--", linewidth=0.7, alpha=0.7)
    if question.kind is not Kind.STATES:
        axes.set_ylabel(unit if unit not in ("none", "short") else "", fontsize=8)
        if len(series) <= _MOST_NAMES:
            axes.legend(frameon=False, fontsize=6, ncols=2 if len(series) > 3 else 1)
    axes.set_xlim(0, recording.end_s - recording.start_s)
    axes.tick_params(labelsize=7)
    clean(axes)


def _with_gaps(series: Series) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return times and values, with NaN where the series was interrupted, as Grafana leaves a gap there."""
    times_s, values = np.transpose(series.points)
    gaps = np.flatnonzero(np.diff(times_s) > 1.5) + 1
    return np.insert(times_s, gaps, np.nan), np.insert(values, gaps, np.nan)


def _draw_states(axes: Axes, series: list[tuple[str, Series]], recording: Recording) -> None:
    for row, (_, one) in enumerate(series):
        spans = [(time_s - recording.start_s, 1.0) for time_s, value in one.points if value > 0]
        axes.broken_barh(spans, (row - 0.35, 0.7), color=_COLORS[row % len(_COLORS)])
    axes.set_yticks(range(len(series)), [name for name, _ in series])


if __name__ == "__main__":
    rules = Path(__file__).resolve().parents[2] / "dashboards" / "rules.yaml"
    with tempfile.TemporaryDirectory() as name, ray_and_prometheus(Path(name) / "prometheus", rules) as server:
        draw(record(server, Path(name)), Path(sys.argv[1]))
