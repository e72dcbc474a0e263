"""Schedules: what the links of a lab become while a job runs, as small text files.

    unit s                                      # or step, or epoch
    0    rate=1gbit latency=5ms                 # all hosts, both directions
    30   host=2 direction=up rate=100mbit
    40   host=3 cut
    50   host=3 reconnect
    60   end                                    # where a picture ends

`#` starts a comment. Steps are those that the job reports (`report_step`). An epoch is as many seconds or steps as
whoever plays the schedule says.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Literal

from cgx_ray.errors import LabError
from cgx_ray.lab.handle import LabHandle
from cgx_ray.lab.link import DIRECTIONS, Direction, LinkChange, format_rate, parse_change

Unit = Literal["s", "step", "epoch"]
UNITS: tuple[Unit, ...] = ("s", "step", "epoch")
STEP_FILE_VARIABLE = "CGX_LAB_STEPS"
_POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """At `at`, hosts get `change`, or are cut off (`is_connected` False) or reconnected. None: all, both."""

    at: float
    host: int | None
    direction: Direction | None
    change: LinkChange
    is_connected: bool | None

    def apply(self, lab: LabHandle) -> None:
        hosts = range(len(lab.hosts)) if self.host is None else (self.host,)
        if self.is_connected is not None:
            for host in hosts:
                (lab.reconnect if self.is_connected else lab.cut)(host)
        if self.change:
            lab.set(self.host, self.direction, **self.change)

    def __str__(self) -> str:
        where = ["all hosts" if self.host is None else f"host {self.host}", self.direction or ""]
        what = [] if self.is_connected is None else ["reconnected" if self.is_connected else "cut off"]
        change = self.change
        what += [f"rate {format_rate(change['rate_bit_per_s'])}"] if "rate_bit_per_s" in change else []
        what += [f"latency {change['latency_s'] * 1e3:g} ms"] if "latency_s" in change else []
        what += [f"jitter {change['jitter_s'] * 1e3:g} ms"] if "jitter_s" in change else []
        what += [f"loss {change['loss']:g}"] if "loss" in change else []
        what += [f"queue {change['queue_bytes']} bytes"] if "queue_bytes" in change else []
        return f"{' '.join(filter(None, where))}: {', '.join(what)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Events in order of time, in `unit`s; `end` is where a picture ends."""

    name: str
    unit: Unit
    events: tuple[Event, ...]
    end: float

    @staticmethod
    def read(name: str) -> Schedule:
        """From a file, or one that comes with the package: "c1", "c2". Raises LabError with the line's number."""
        shipped = files("cgx_ray.lab") / "schedules" / f"{name}.txt"
        if Path(name).exists():
            text = Path(name).read_text()
        elif shipped.is_file():
            text = shipped.read_text()
        else:
            known = sorted(path.name.removesuffix(".txt") for path in (files("cgx_ray.lab") / "schedules").iterdir())
            raise LabError(f"schedule {name!r} is neither a file nor one of {', '.join(known)}")
        return parse_schedule(Path(name).stem, text)

    def with_epoch(self, length: float, unit: Unit) -> Schedule:
        """The same with epochs of `length` seconds or steps."""
        if self.unit != "epoch":
            raise LabError(f"schedule {self.name} is in {self.unit}: it has no epochs to give a length")
        if not length > 0 or unit == "epoch":
            raise LabError(f"an epoch of {length:g} {unit} is not allowed; give more than 0 s or steps")
        events = tuple(replace(event, at=event.at * length) for event in self.events)
        return replace(self, unit=unit, events=events, end=self.end * length)

    def slower(self, factor: float) -> Schedule:
        """The network `factor` times slower: rates divided, latency and jitter multiplied.

        A job that computes `factor` times longer then sees the same network. This is how a lab stands for links
        that are too fast for it.
        """
        if not factor >= 1:
            raise LabError(f"slower by {factor:g} is not allowed; give 1 or more")
        return replace(
            self, events=tuple(replace(event, change=_slower(event.change, factor)) for event in self.events)
        )


def parse_schedule(name: str, text: str) -> Schedule:
    unit: Unit | None = None
    events: list[Event] = []
    end: float | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        try:
            if not words:
                continue
            if words[0] == "unit" and len(words) == 2 and words[1] in UNITS and unit is None:
                unit = words[1]
            elif unit is None:
                raise LabError(f"the first line has to say the unit: 'unit s', {' or '.join(UNITS)}")
            elif words[1:] == ["end"]:
                end = _time(words[0], events)
            else:
                events.append(_event(_time(words[0], events), words[1:]))
        except LabError as error:
            raise LabError(f"schedule {name}, line {number}: {error}") from None
    if unit is None or not events:
        raise LabError(f"schedule {name} says nothing; write 'unit s' and lines like '0 rate=1gbit'")
    return Schedule(name=name, unit=unit, events=tuple(events), end=end if end is not None else events[-1].at)


def _time(word: str, events: list[Event]) -> float:
    try:
        at = float(word)
    except ValueError:
        raise LabError(f"{word!r} is not a time; a line starts with a number") from None
    if at < (events[-1].at if events else 0):
        raise LabError(f"{word} comes after {events[-1].at if events else 0:g}; put lines in order of time")
    return at


def _event(at: float, words: list[str]) -> Event:
    host: int | None = None
    direction: Direction | None = None
    is_connected: bool | None = None
    pairs: list[tuple[str, str]] = []
    for word in words:
        key, _, value = word.partition("=")
        if word in ("cut", "reconnect"):
            is_connected = word == "reconnect"
        elif key == "host" and value.isdecimal():
            host = int(value)
        elif key == "direction" and value in DIRECTIONS:
            direction = value
        elif key in ("host", "direction"):
            raise LabError(f"{word!r} is not allowed; write host=2, direction=up or direction=down")
        else:
            pairs.append((key, value))
    if not pairs and is_connected is None:
        raise LabError("nothing changes; write rate=1gbit, latency=5ms, ..., cut or reconnect")
    return Event(at=at, host=host, direction=direction, change=parse_change(pairs), is_connected=is_connected)


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
    """Tell the lab which step the job is at; call it on one rank. Does nothing outside `cgx-ray lab run`.

    Any program can do the same: it writes the number into the file that $CGX_LAB_STEPS names.
    """
    path = os.environ.get(STEP_FILE_VARIABLE)
    if path:
        Path(path).write_text(str(step))


def play(
    schedule: Schedule, lab: LabHandle, step_file: Path, on_event: Callable[[Event], None], stop: threading.Event
) -> None:
    """Apply all events in time, until `stop`. Seconds count from now."""
    start = time.monotonic()
    for event in schedule.events:
        while (time.monotonic() - start if schedule.unit == "s" else last_step(step_file)) < event.at:
            if stop.wait(_POLL_S):
                return
        event.apply(lab)
        on_event(event)


def last_step(step_file: Path) -> int:
    """What the job has reported last; -1 if nothing yet."""
    # Empty while it is being written.
    text = step_file.read_text().strip() if step_file.exists() else ""
    return int(text) if text.isdecimal() else -1
