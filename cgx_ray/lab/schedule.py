"""Schedules: small text files that say how the links of a lab change while a job runs.

    unit s                                      # or step, or epoch
    0    rate=1gbit latency=5ms                 # all hosts, both directions
    30   host=2 direction=up rate=100mbit
    40   host=3 cut
    50   host=3 reconnect
    60   end                                    # end of a picture

`#` starts a comment. The job reports its steps (`report_step`). The length of an epoch, in seconds or steps, is given
when the schedule is played.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Literal

from cgx_ray.errors import LabConfigError, LabError
from cgx_ray.lab.events import LinkAction
from cgx_ray.lab.handle import LabHandle
from cgx_ray.lab.link import DIRECTIONS, Direction, LinkChange, parse_change
from cgx_ray.untrusted import read_bytes

Unit = Literal["s", "step", "epoch"]
UNITS: tuple[Unit, ...] = ("s", "step", "epoch")
STEP_FILE_VARIABLE = "CGX_LAB_STEPS"
_POLL_S = 0.02
# Of 50,000 short lines.
MAX_SCHEDULE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledAction(LinkAction):
    """An action on links at `at`, in the unit of its schedule."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Actions in order of time, in `unit`s; a picture of them ends at `end`."""

    name: str
    unit: Unit
    events: tuple[ScheduledAction, ...]
    end: float

    @staticmethod
    def read(name: str) -> Schedule:
        """Read a file, or "c1" or "c2", which come with the package. Raises LabError with the line's number."""
        shipped = files("cgx_ray.lab") / "schedules" / f"{name}.txt"
        if Path(name).exists():
            text = _text_of(Path(name))
        elif shipped.is_file():
            text = shipped.read_text()
        else:
            known = sorted(path.name.removesuffix(".txt") for path in (files("cgx_ray.lab") / "schedules").iterdir())
            raise LabConfigError(f"schedule {name!r} is neither a file nor one of {', '.join(known)}")
        return parse_schedule(Path(name).stem, text)

    def with_epoch(self, length: float, unit: Unit) -> Schedule:
        """Return the schedule with epochs of `length` seconds or steps."""
        if self.unit != "epoch":
            raise LabConfigError(f"schedule {self.name} is in {self.unit}: it has no epochs to give a length")
        if not length > 0 or unit == "epoch":
            raise LabConfigError(f"an epoch of {length:g} {unit} is not allowed; give more than 0 s or steps")
        events = tuple(replace(event, at=event.at * length) for event in self.events)
        return replace(self, unit=unit, events=events, end=self.end * length)

    def slower(self, factor: float) -> Schedule:
        """Return the schedule of a network `factor` times slower: rates divided, latency and jitter multiplied.

        A job that computes `factor` times longer sees the same network. So a lab can stand for links that are too fast
        for it.
        """
        if not factor >= 1:
            raise LabConfigError(f"slower by {factor:g} is not allowed; give 1 or more")
        return replace(
            self, events=tuple(replace(event, change=_slower(event.change, factor)) for event in self.events)
        )


def parse_schedule(name: str, text: str) -> Schedule:
    """Read the text of a schedule. Raises LabError with the line's number."""
    unit: Unit | None = None
    events: list[ScheduledAction] = []
    end: float | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        try:
            if not words:
                continue
            if words[0] == "unit" and len(words) == 2 and words[1] in UNITS and unit is None:
                unit = words[1]
            elif unit is None:
                raise LabConfigError(f"the first line must name the unit: 'unit s', {' or '.join(UNITS)}")
            elif words[1:] == ["end"]:
                end = _time(words[0], events)
            else:
                events.append(_event(_time(words[0], events), words[1:]))
        except LabError as error:
            raise LabConfigError(f"schedule {name}, line {number}: {error}") from None
    if unit is None or not events:
        raise LabConfigError(f"schedule {name} is empty; write 'unit s' and lines like '0 rate=1gbit'")
    return Schedule(name=name, unit=unit, events=tuple(events), end=end if end is not None else events[-1].at)


def _text_of(path: Path) -> str:
    content = read_bytes(path, MAX_SCHEDULE_BYTES)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise LabConfigError(f"schedule {path} is no text ({error})") from error


def _time(word: str, events: list[ScheduledAction]) -> float:
    try:
        at = float(word)
    except ValueError:
        at = math.nan
    if not math.isfinite(at):
        raise LabConfigError(f"{word!r:.80} is not a time; a line starts with a number")
    if at < (events[-1].at if events else 0):
        raise LabConfigError(f"{word} comes after {events[-1].at if events else 0:g}; put the lines in order of time")
    return at


def _event(at: float, words: list[str]) -> ScheduledAction:
    host: int | None = None
    direction: Direction | None = None
    is_connected: bool | None = None
    pairs: list[tuple[str, str]] = []
    for word in words:
        key, _, value = word.partition("=")
        if word in ("cut", "reconnect"):
            is_connected = word == "reconnect"
        elif key == "host" and value.isdecimal() and len(value) < 10:
            host = int(value)
        elif key == "direction" and value in DIRECTIONS:
            direction = value
        elif key in ("host", "direction"):
            raise LabConfigError(f"{word!r} is not allowed; write host=2, direction=up or direction=down")
        else:
            pairs.append((key, value))
    if not pairs and is_connected is None:
        raise LabConfigError("nothing changes; write rate=1gbit, latency=5ms, ..., cut or reconnect")
    return ScheduledAction(at=at, host=host, direction=direction, change=parse_change(pairs), is_connected=is_connected)


def _slower(change: LinkChange, factor: float) -> LinkChange:
    slower = change.copy()
    if "rate_bit_per_s" in change:
        slower["rate_bit_per_s"] = change["rate_bit_per_s"] / factor
    if "latency_s" in change:
        slower["latency_s"] = change["latency_s"] * factor
    if "jitter_s" in change:
        slower["jitter_s"] = change["jitter_s"] * factor
    return slower


def report_step(step: int) -> None:
    """Report the job's step to the lab; call it on one rank. Does nothing outside `cgx-ray lab run`.

    Any program can do the same: write the number into the file that $CGX_LAB_STEPS names.
    """
    path = os.environ.get(STEP_FILE_VARIABLE)
    if path:
        Path(path).write_text(str(step))


def play(
    schedule: Schedule,
    lab: LabHandle,
    step_file: Path,
    on_event: Callable[[ScheduledAction], None],
    stop: threading.Event,
) -> None:
    """Apply each action at its time, until `stop` is set. Seconds count from now."""
    start = time.monotonic()
    for event in schedule.events:
        while (time.monotonic() - start if schedule.unit == "s" else last_step(step_file)) < event.at:
            if stop.wait(_POLL_S):
                return
        event.apply(lab)
        on_event(event)


def last_step(step_file: Path) -> int:
    """Return the step that the job reported last, -1 before the first report."""
    # The file is empty while the job writes it.
    text = step_file.read_text().strip() if step_file.exists() else ""
    return int(text) if text.isdecimal() else -1
