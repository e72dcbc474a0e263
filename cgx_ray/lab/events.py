"""What the links of a run were set to, and when: the lines of `network.jsonl`, which the report draws."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import UnionType
from typing import Literal, cast

from cgx_ray.errors import LabError
from cgx_ray.lab.handle import LabHandle
from cgx_ray.lab.link import DIRECTIONS, Direction, LinkChange
from cgx_ray.lab.schedule import Event

_ALLOWED: dict[str, tuple[type | UnionType, str]] = {
    "time": (int | float, "a number"),
    "step": (int | None, "a whole number or left out"),
    "host": (int | None, "a whole number or left out"),
    "change": (dict, "an object"),
    "is_connected": (bool | None, "true, false or left out"),
    "num_hosts": (int | None, "a whole number or left out"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEvent:
    """How links were when a run began, or what became of them later. Raises LabError on what cannot be.

    event  "start" or "change"
    time   seconds since 1970, when it was in force
    step   the last that the job had reported; None if it had reported none
    host, direction, change, is_connected
           as in `schedule.Event`: None is all hosts, both directions, connected or not as before
    num_hosts
           of the lab, in the first line of a start; None if nobody said
    """

    event: Literal["start", "change"]
    time: float
    step: int | None = None
    host: int | None = None
    direction: Direction | None = None
    change: LinkChange
    is_connected: bool | None = None
    num_hosts: int | None = None

    def __post_init__(self) -> None:
        if self.event not in ("start", "change"):
            raise LabError(f"event {self.event!r} is not allowed; it is start or change")
        if self.direction not in (None, *DIRECTIONS):
            raise LabError(f"direction {self.direction!r} is not allowed; it is up or down")
        for name, (kind, allowed) in _ALLOWED.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise LabError(f"{name} {value!r} is not allowed; it is {allowed}")
        for name, value in self.change.items():
            if name not in LinkChange.__annotations__ or not isinstance(value, int | float | None):
                raise LabError(f"{name} {value!r} is not a number of {', '.join(LinkChange.__annotations__)}")

    @staticmethod
    def now(event: Event, step: int | None) -> LinkEvent:
        """Of what was applied just now."""
        return LinkEvent(
            event="change",
            time=time.time(),
            step=step,
            host=event.host,
            direction=event.direction,
            change=event.change,
            is_connected=event.is_connected,
        )


def links_now(lab: LabHandle) -> list[LinkEvent]:
    """A start: first what most links have, for all hosts, then the links that differ and the hosts that are cut off."""
    now = time.time()
    links = {(host.index, way): lab.link(host.index, way) for host in lab.hosts for way in DIRECTIONS}
    (usual, _), *_ = Counter(links.values()).most_common(1)
    change = cast(LinkChange, asdict(usual))
    lines = [LinkEvent(event="start", time=now, change=change, num_hosts=len(lab.hosts))]
    for (host, way), link in links.items():
        if link != usual:
            change = cast(LinkChange, asdict(link))
            lines.append(LinkEvent(event="start", time=now, host=host, direction=way, change=change))
    cut = [host.index for host in lab.hosts if not lab.is_connected(host.index)]
    return lines + [LinkEvent(event="start", time=now, host=host, change={}, is_connected=False) for host in cut]


def append_events(path: Path, events: Iterable[LinkEvent]) -> None:
    """A JSON line each; a field that is None is left out."""
    lines = [{name: value for name, value in asdict(event).items() if value is not None} for event in events]
    with path.open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))
