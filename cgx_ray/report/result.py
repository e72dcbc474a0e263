"""The shape that every bench writes: what was measured, where, at which commit, and whether it meets its goal."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from cgx_ray.errors import ConfigError

_GOAL = re.compile(r"(<=|>=|==) ([-+.\de]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured number.

    value     None: it could not be measured, which never meets a goal
    baseline  the same quantity of what this is compared with, from the same run
    limit     the same quantity at its bound, from the same run
    ratio     what `goal` speaks about, if that is not the value itself
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
    result = {"bench": bench, "commit": commit(), "machine": machine(), "rows": [asdict(row) for row in rows]}
    text = json.dumps(result, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text)


def commit() -> str | None:
    """Commit of the source tree, with `-dirty` if files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parent
    argv = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def machine() -> dict[str, Any]:
    """What a number depends on."""
    import torch  # noqa: PLC0415 - 200 MiB, which `bench network` must not have in the monitors that it measures

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
    """None where Ray is not installed, which `bench kernels` does not need."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return None


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        match = re.search(r"^model name\s*: (.*)$", info.read_text(), re.MULTILINE)
        if match:
            return match[1]
    return platform.processor() or platform.machine()
