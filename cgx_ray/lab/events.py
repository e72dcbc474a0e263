"""Settings of links and when they were made: the lines of `network.jsonl`, which the report draws."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

from cgx_ray.errors import LabError
from cgx_ray.lab.handle import LabHandle
from cgx_ray.lab.json_fields import NUMBER, OBJECT, OPTIONAL_BOOL, OPTIONAL_WHOLE, FieldType, check_fields
from cgx_ray.lab.link import DIRECTIONS, Direction, LinkChange
from cgx_ray.units import compact_rate

_EVENT_TYPES: dict[str, FieldType] = {
    "time": NUMBER,
    "step": OPTIONAL_WHOLE,
    "host": OPTIONAL_WHOLE,
    "change": OBJECT,
    "is_connected": OPTIONAL_BOOL,
    "num_hosts": OPTIONAL_WHOLE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAction:
    """An action on links of the lab: `change` them, and cut hosts off or reconnect them.

    host          None: all hosts
    direction     None: both
    is_connected  None: as before
    """

    host: int | None = None
    direction: Direction | None = None
    change: LinkChange
    is_connected: bool | None = None

    def apply(self, lab: LabHandle) -> None:
        hosts = range(len(lab.hosts)) if self.host is None else (self.host,)
        if self.is_connected is not None:
            for host in hosts:
                (lab.reconnect if self.is_connected else lab.cut)(host)
        if self.change:
            lab.set(self.host, self.direction, **self.change)

    def action_fields(self) -> dict[str, Any]:
        """Return the fields of the action alone, without those that a subclass adds."""
        return {field.name: getattr(self, field.name) for field in fields(LinkAction)}

    def __str__(self) -> str:
        where = ["all hosts" if self.host is None else f"host {self.host}", self.direction or ""]
        what = [] if self.is_connected is None else ["reconnected" if self.is_connected else "cut off"]
        change = self.change
        what += [f"rate {compact_rate(change['rate_bit_per_s'])}"] if "rate_bit_per_s" in change else []
        what += [f"latency {change['latency_s'] * 1e3:g} ms"] if "latency_s" in change else []
        what += [f"jitter {change['jitter_s'] * 1e3:g} ms"] if "jitter_s" in change else []
        what += [f"loss {change['loss']:g}"] if "loss" in change else []
        what += [f"queue {change['queue_bytes']} bytes"] if "queue_bytes" in change else []
        what += [f"mtu {change['mtu_bytes']}"] if "mtu_bytes" in change else []
        return f"{' '.join(filter(None, where))}: {', '.join(what)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEvent(LinkAction):
    """State of links when a run began, or an action on them later. Raises LabError for a field that is not allowed.

    event      "start" or "change"
    time       seconds since 1970, from which on it was in force
    step       last step that the job had reported; None if it had reported none
    num_hosts  number of hosts in the lab, in the first line of a start; None if unknown
    """

    event: Literal["start", "change"]
    time: float
    step: int | None = None
    num_hosts: int | None = None

    def __post_init__(self) -> None:
        if self.event not in ("start", "change"):
            raise LabError(f"event {self.event!r} is not allowed; it is start or change")
        if self.direction not in (None, *DIRECTIONS):
            raise LabError(f"direction {self.direction!r} is not allowed; it is up or down")
        try:
            check_fields(asdict(self), _EVENT_TYPES)
        except TypeError as error:
            raise LabError(str(error)) from None
        for name, value in self.change.items():
            if name not in LinkChange.__annotations__ or not isinstance(value, int | float | None):
                raise LabError(f"{name} {value!r} is not a number of {', '.join(LinkChange.__annotations__)}")

    @staticmethod
    def now(action: LinkAction, step: int | None) -> LinkEvent:
        """Return the event of an action that was applied just now."""
        return LinkEvent(event="change", time=time.time(), step=step, **action.action_fields())


def links_now(lab: LabHandle) -> list[LinkEvent]:
    """Return the start of a run: the most common state for all hosts, then the links and hosts that differ from it."""
    now = time.time()
    links = {(host.index, direction): lab.link(host.index, direction) for host in lab.hosts for direction in DIRECTIONS}
    (usual, _), *_ = Counter(links.values()).most_common(1)
    change = cast(LinkChange, asdict(usual))
    lines = [LinkEvent(event="start", time=now, change=change, num_hosts=len(lab.hosts))]
    for (host, direction), link in links.items():
        if link != usual:
            change = cast(LinkChange, asdict(link))
            lines.append(LinkEvent(event="start", time=now, host=host, direction=direction, change=change))
    cut = [host.index for host in lab.hosts if not lab.is_connected(host.index)]
    return lines + [LinkEvent(event="start", time=now, host=host, change={}, is_connected=False) for host in cut]


def append_events(path: Path, events: Iterable[LinkEvent]) -> None:
    """Append one line of JSON per event; a field that is None is left out."""
    # A person who reads the file looks for kind and time first.
    dicts = [{"event": event.event, "time": event.time, **asdict(event)} for event in events]
    lines = [{name: value for name, value in event.items() if value is not None} for event in dicts]
    with path.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
