"""Simulation of one training step: stages of groups compete for compute, codec, and the links in and between nodes.

The result says when the step ends, which stages are on the critical path, and what bounds it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from cgx_ray.errors import ConfigError


class Resource(StrEnum):
    """Resource of stages. `compute` runs backward; `codec` encodes beside it: the engine's thread, or its stream."""

    COMPUTE = "compute"
    CODEC = "codec"
    INTRA = "intra"
    INTER = "inter"


BACKWARD = "backward"
StepPart = Literal["compute", "codec", "bandwidth", "latency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step of a group's exchange: encode, send, ...

    busy_s     seconds of work on each resource. The stage starts on all at once, and holds each only while it works
    latency_s  seconds of waiting after that, with nothing held: hops, or one more piece. The group's next stage waits
               too; other groups do not
    overlaps   True: the stage works on pieces of what the group's stage before it makes. It starts at the earliest with
               that one, and is done at the earliest with that one: if it takes less time, it starts later
    """

    name: str
    busy_s: Mapping[Resource, float]
    latency_s: float = 0.0
    overlaps: bool = False

    @property
    def duration_s(self) -> float:
        """Seconds of the stage, if it does not have to wait for the one before it."""
        return max(self.busy_s.values(), default=0.0) + self.latency_s


class StageSpan(NamedTuple):
    """Start and end of a stage, in seconds from the start of the step."""

    group: int
    stage: Stage
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Simulated step.

    finish_s  end of the last stage
    spans     all stages, backward first in each group, in the order in which they started
    critical  stages on the longest path: each starts, or ends if it overlaps, when the one before it ends, gives a
              resource back, or has made enough pieces. A shorter one makes the step shorter, unless another path is as
              long
    parts_s   seconds of that path by kind of work; their sum is `finish_s`
    """

    finish_s: float
    spans: tuple[StageSpan, ...]
    critical: tuple[StageSpan, ...]
    parts_s: Mapping[StepPart, float]

    @property
    def bound_by(self) -> StepPart:
        """Kind of work that takes most of the critical path."""
        return max(self.parts_s, key=lambda part: self.parts_s[part])


def simulate(backward_s: Sequence[float], stages: Sequence[Sequence[Stage]]) -> Timeline:
    """Simulate a step: groups in the order of backward, each through its stages, side by side.

    backward_s  backward of each group's layers, on `compute`, one group after the other
    stages      stages of each group, after its backward

    A resource does one stage at a time. When it is free it takes, of the stages that can start, that of the oldest
    group, as the engine's thread does. So encoding on `compute` delays the backward of the next group.
    """
    if not stages or len(stages) != len(backward_s) or not all(stages):
        raise ConfigError(
            f"{len(backward_s)} backward times and {len(stages)} groups; give one each, and every group a stage"
        )
    chains = [
        (Stage(name=BACKWARD, busy_s={Resource.COMPUTE: seconds}), *rest)
        for seconds, rest in zip(backward_s, stages, strict=True)
    ]
    return _Simulation(chains).run()


class _Moment(NamedTuple):
    """A stage starts, gives a resource back, or ends.

    after   the moment that it waited for, `spent_s` earlier; None at the start of the step
    part    kind of work in between
    span    the stage, by its place in the order of starts; -1 at the start of the step
    """

    time_s: float
    after: _Moment | None = None
    part: StepPart = "compute"
    spent_s: float = 0.0
    span: int = -1


def _before(end: _Moment, time_s: float) -> _Moment:
    """Return the moment at `time_s` on the way to `end`."""
    at = end
    while at.after is not None and at.after.time_s >= time_s:
        at = at.after
    if at.after is None or at.time_s <= time_s:
        return at
    return at._replace(time_s=time_s, spent_s=time_s - at.after.time_s)


@dataclass(slots=True)
class _Simulation:
    """The state of `simulate`.

    chains    stages by group, backward first
    spans     stages that have started
    free      by resource, when it has done its work so far; free_s: the time of that
    arriving  (time, group, stage) of stages that the stage before has yet to let start
    waiting   by the resources that they need: (group, stage) of the stages that may start
    allowed   of these stages, the moment from which they may start
    ends      by group, the end of its last stage so far
    now_s     time of the last event
    """

    chains: Sequence[Sequence[Stage]]
    spans: list[StageSpan] = field(default_factory=list)
    free: dict[Resource, _Moment] = field(default_factory=dict)
    free_s: dict[Resource, float] = field(default_factory=dict)
    arriving: list[tuple[float, int, int]] = field(default_factory=list)
    waiting: dict[tuple[Resource, ...], list[tuple[int, int]]] = field(default_factory=dict)
    allowed: dict[tuple[int, int], _Moment] = field(default_factory=dict)
    ends: dict[int, _Moment] = field(default_factory=dict)
    now_s: float = 0.0

    def run(self) -> Timeline:
        self._allow(0, 0, _Moment(0.0))
        while self.arriving or any(self.waiting.values()):
            next_s, first = self._next_start()
            if self.arriving and self.arriving[0][0] <= next_s:
                self.now_s, group, index = heapq.heappop(self.arriving)
                needed = tuple(self.chains[group][index].busy_s)
                heapq.heappush(self.waiting.setdefault(needed, []), (group, index))
                continue
            self.now_s = next_s
            self._start(*heapq.heappop(first))
        return self._timeline()

    def _next_start(self) -> tuple[float, list[tuple[int, int]]]:
        """Return when the next waiting stage can start, and the queue whose first stage that is, the oldest group's."""
        next_s, first = math.inf, list[tuple[int, int]]()
        for needed, queue in self.waiting.items():
            if not queue:
                continue
            start_s = self.now_s
            for resource in needed:
                start_s = max(start_s, self.free_s.get(resource, 0.0))
            if start_s < next_s or (start_s == next_s and queue[0] < first[0]):
                next_s, first = start_s, queue
        return next_s, first

    def _allow(self, group: int, index: int, moment: _Moment) -> None:
        self.allowed[group, index] = moment
        heapq.heappush(self.arriving, (moment.time_s, group, index))

    def _start(self, group: int, index: int) -> None:
        stage, here = self.chains[group][index], len(self.spans)
        start = self.allowed.pop((group, index))
        for resource in stage.busy_s:
            if self.free_s.get(resource, 0.0) > start.time_s:
                start = self.free[resource]
        done = start
        for resource, seconds in stage.busy_s.items():
            moment = _Moment(start.time_s + seconds, start, _part(stage, resource), seconds, here)
            self.free[resource], self.free_s[resource] = moment, moment.time_s
            if moment.time_s > done.time_s:
                done = moment
        if stage.overlaps and self.ends[group].time_s >= done.time_s:
            done = self.ends[group]
        end = _Moment(done.time_s + stage.latency_s, done, "latency", stage.latency_s, here)
        self.spans.append(StageSpan(group, stage, start.time_s, end.time_s))
        self.ends[group] = end
        if index == 0 and group + 1 < len(self.chains):
            self._allow(group + 1, 0, end)
        if index + 1 < len(self.chains[group]):
            later = self.chains[group][index + 1]
            # Pieces that are not there yet hold up no other group.
            from_s = max(start.time_s, end.time_s - max(later.busy_s.values(), default=0.0))
            self._allow(group, index + 1, _before(end, from_s) if later.overlaps else end)

    def _timeline(self) -> Timeline:
        last = max(self.ends.values(), key=lambda moment: moment.time_s)
        parts_s: dict[StepPart, float] = {"compute": 0.0, "codec": 0.0, "bandwidth": 0.0, "latency": 0.0}
        path: dict[int, StageSpan] = {}
        moment: _Moment | None = last
        while moment is not None and moment.span >= 0:
            parts_s[moment.part] += moment.spent_s
            path[moment.span] = self.spans[moment.span]
            moment = moment.after
        return Timeline(
            finish_s=last.time_s, spans=tuple(self.spans), critical=tuple(reversed(path.values())), parts_s=parts_s
        )


def _part(stage: Stage, resource: Resource) -> StepPart:
    """Return the kind of work of a stage on a resource."""
    if stage.name == BACKWARD:
        return "compute"
    return "bandwidth" if resource in (Resource.INTRA, Resource.INTER) else "codec"
