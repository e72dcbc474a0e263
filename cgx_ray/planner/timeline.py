"""Simulation of one training step: stages of groups compete for compute, codec, and the links in and between nodes.

The result says when the step ends, which stages are on the critical path, and what bounds it.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from cgx_ray.errors import ConfigError


class Resource(StrEnum):
    """Resource of stages. `compute` runs backward; `codec` encodes beside it: a stream or a CPU."""

    COMPUTE = "compute"
    CODEC = "codec"
    INTRA = "intra"
    INTER = "inter"


BACKWARD = "backward"
StepPart = Literal["compute", "codec", "bandwidth", "latency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step of a group's exchange: encode, send, ...

    busy_s     seconds of work on each resource. The stage works on all at once, for example when messages are decoded
               while others arrive. It lasts as long as the longest, and holds all of them for that time
    latency_s  seconds of waiting on top: hops, or until the first piece is encoded
    """

    name: str
    busy_s: Mapping[Resource, float]
    latency_s: float = 0.0

    @property
    def duration_s(self) -> float:
        return max(self.busy_s.values(), default=0.0) + self.latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpan:
    """Start and end of a stage, in seconds from the start of the step."""

    group: int
    stage: Stage
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Simulated step.

    finish_s  end of the last group
    spans     all stages, backward first in each group, in the order in which they started
    critical  stages that follow each other without a gap up to `finish_s`. A shorter one makes the step shorter, unless
              another path is as long
    parts_s   seconds of `critical` by kind of work; their sum is `finish_s`
    """

    finish_s: float
    spans: tuple[StageSpan, ...]
    critical: tuple[StageSpan, ...]
    parts_s: Mapping[StepPart, float]

    @property
    def bound_by(self) -> StepPart:
        """Kind of work that takes most of the critical path."""
        return max(self.parts_s, key=lambda part: self.parts_s[part])


def simulate(
    backward_s: Sequence[float], stages: Sequence[Sequence[Stage]], *, one_group_at_a_time: bool = False
) -> Timeline:
    """Simulate a step: groups in the order of backward, each through its stages one after the other.

    backward_s           backward of each group's layers, on `compute`, one group after the other
    stages               stages of each group, after its backward
    one_group_at_a_time  True: the stages of a group start after those of the group before it. The engine has groups
                         under way side by side, so this is an upper bound. False: they start as soon as their resources
                         are free

    Every resource serves stages in the order in which they arrive. If two arrive together, the earlier group goes
    first; so encoding on `compute` delays the backward of the next group.
    """
    if not stages or len(stages) != len(backward_s) or not all(stages):
        raise ConfigError(
            f"{len(backward_s)} backward times and {len(stages)} groups; give one each, and every group a stage"
        )
    stages_of = [(_backward(seconds), *rest) for seconds, rest in zip(backward_s, stages, strict=True)]
    spans: list[StageSpan] = []
    causes: list[int | None] = []  # by span, the span whose end it waited for
    holder: dict[Resource, int] = {}
    computed: dict[int, int] = {}  # by group, its backward's span
    finished: dict[int, int] = {}  # by group, its last span
    arrived: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # time, group, stage
    cause_of: dict[tuple[int, int], int] = {}

    def arrive(group: int, index: int, after: Sequence[int]) -> None:
        cause = max(after, key=lambda span: spans[span].end_s)
        cause_of[group, index] = cause
        heapq.heappush(arrived, (spans[cause].end_s, group, index))

    while arrived:
        _, group, index = heapq.heappop(arrived)
        stage, here = stages_of[group][index], len(spans)
        after = [holder[resource] for resource in stage.busy_s if resource in holder]
        after += [cause_of[group, index]] if (group, index) in cause_of else []
        cause = max(after, key=lambda span: spans[span].end_s, default=None)
        start_s = spans[cause].end_s if cause is not None else 0.0
        spans.append(StageSpan(group=group, stage=stage, start_s=start_s, end_s=start_s + stage.duration_s))
        causes.append(cause)
        holder.update(dict.fromkeys(stage.busy_s, here))
        if index > 0 and index + 1 < len(stages_of[group]):
            arrive(group, index + 1, [here])
        elif index > 0:
            finished[group] = here
            if one_group_at_a_time and group + 1 in computed:
                arrive(group + 1, 1, [here, computed[group + 1]])
        else:
            computed[group] = here
            if group + 1 < len(stages_of):
                arrive(group + 1, 0, [here])
            if not one_group_at_a_time or group == 0:
                arrive(group, 1, [here])
            elif group - 1 in finished:
                arrive(group, 1, [here, finished[group - 1]])
    return _timeline(spans, causes)


def _backward(seconds: float) -> Stage:
    return Stage(name=BACKWARD, busy_s={Resource.COMPUTE: seconds})


def _timeline(spans: Sequence[StageSpan], causes: Sequence[int | None]) -> Timeline:
    last = max(range(len(spans)), key=lambda index: spans[index].end_s)
    critical: list[StageSpan] = []
    parts_s: dict[StepPart, float] = {"compute": 0.0, "codec": 0.0, "bandwidth": 0.0, "latency": 0.0}
    at: int | None = last
    while at is not None:
        stage = spans[at].stage
        critical.append(spans[at])
        parts_s["latency"] += stage.latency_s
        parts_s[_part(stage)] += stage.duration_s - stage.latency_s
        at = causes[at]
    return Timeline(finish_s=spans[last].end_s, spans=tuple(spans), critical=tuple(reversed(critical)), parts_s=parts_s)


def _part(stage: Stage) -> StepPart:
    """Return the kind of work of a stage, without its latency: the longest one."""
    if stage.name == BACKWARD:
        return "compute"
    longest = max(stage.busy_s, key=lambda resource: stage.busy_s[resource], default=Resource.CODEC)
    return "bandwidth" if longest in (Resource.INTRA, Resource.INTER) else "codec"
