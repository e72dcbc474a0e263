"""The rows that every bench writes: numbers, machine, commit, and whether each number meets its goal."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from cgx_ray.errors import ConfigError
from cgx_ray.report.show import new_table, write_json

_GOAL = re.compile(r"(<=|>=|==) ([-+.\de]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured number.

    value     None if it could not be measured; then it meets no goal
    baseline  the same quantity for the alternative, from the same run
    limit     the same quantity at its bound, from the same run
    ratio     number that `goal` judges, if that is not the value itself
    goal      "<= 1.05", ">= 3" or "== 1"
    met       None without a goal
    """

    name: str
    value: float | None
    unit: str
    baseline: float | None = None
    limit: float | None = None
    ratio: float | None = None
    goal: str | None = None
    met: bool | None = None

    def __post_init__(self) -> None:
        if self.goal is not None and self.met is None:
            judged = self.value if self.ratio is None else self.ratio
            object.__setattr__(self, "met", judged is not None and _meets(judged, self.goal))


def _meets(value: float, goal: str) -> bool:
    match = _GOAL.fullmatch(goal)
    if match is None:
        raise ConfigError(f"goal {goal!r} is not a goal; write '<= 1.05', '>= 3' or '== 1'")
    bound = float(match[2])
    return {"<=": value <= bound, ">=": value >= bound, "==": value == bound}[match[1]]


def write_result(bench: str, rows: Sequence[Row], path: str) -> None:
    """Write `rows` as JSON to the file `path`, or to standard output for "-"."""
    result = {
        "bench": bench,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "machine": machine(),
        "rows": [asdict(row) for row in rows],
    }
    write_json(path, result)


def result_table(title: str, rows: Sequence[Row]) -> Table:
    """Return the numbers beside their goals, without columns that no row needs.

    Rows with a goal are last, where a terminal shows them.
    """
    rows = sorted(rows, key=lambda row: row.goal is not None)
    columns: dict[str, Callable[[Row], str]] = {
        "value": lambda row: _short(row.value),
        "unit": lambda row: row.unit,
        "baseline": lambda row: _short(row.baseline),
        "limit": lambda row: _short(row.limit),
        "ratio": lambda row: _short(row.ratio),
        "goal": lambda row: (row.goal or "")[:10],
        "met": lambda row: {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[row.met],
    }
    used = {name: cells for name, show in columns.items() if any(cells := [show(row) for row in rows])}
    table = new_table(title, "", *used, gap=0)
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for row, *cells in zip(rows, *used.values(), strict=True):
        table.add_row(row.name, *cells)
    return table


def _short(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"


def commit() -> str | None:
    """Return the commit of the source tree, with `-dirty` if files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parent
    argv = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def machine() -> dict[str, Any]:
    """Describe the machine: the properties that a measured number depends on."""
    import torch  # noqa: PLC0415 - 200 MiB, and `bench network` measures monitors that import this

    return {
        "cpu": cpu_model(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "ray": _ray_version(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _ray_version() -> str | None:
    """Return None where Ray is not installed: `bench kernels` works without it."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return None


def cpu_model() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        match = re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE)
        if match:
            return match[1]
    return platform.processor() or platform.machine()
