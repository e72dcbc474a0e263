"""Simulation of one training step: stages of groups compete for compute, codec, and the links in and between nodes.

The result says when the step ends, which stages are on the critical path, and what bounds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from cgx_ray.errors import ConfigError
from cgx_ray.planner import _search


class Resource(StrEnum):
    """Resource of stages. `compute` runs backward; `codec` encodes beside it: the engine's thread, or its stream."""

    COMPUTE = "compute"
    CODEC = "codec"
    INTRA = "intra"
    INTER = "inter"


BACKWARD = "backward"
# In the order of runtime_ext/csrc/planner/simulation.h, as are the resources.
StepPart = Literal["compute", "codec", "bandwidth", "latency"]
_RESOURCE_NUMBERS = {resource: number for number, resource in enumerate(Resource)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step of a group's exchange: encode, send, ...

    busy_s     seconds of work on each resource. The stage starts on all at once, and holds each only while it works
    latency_s  seconds of waiting after that, with nothing held: hops, or one more piece. The group's next stage waits
               too; other groups do not
    overlaps   True: the stage works on pieces of what the group's stage before it makes. It starts at the earliest with
               that one, and is done at the earliest with that one: if it takes less time, it starts later
    native     the stage as `_search.simulate` takes it. Made once, since most stages are simulated many times
    """

    name: str
    busy_s: Mapping[Resource, float]
    latency_s: float = 0.0
    overlaps: bool = False
    native: _search.Stage = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        busy_s = [(_RESOURCE_NUMBERS[resource], seconds) for resource, seconds in self.busy_s.items()]
        object.__setattr__(self, "native", (busy_s, self.latency_s, self.overlaps))

    @property
    def duration_s(self) -> float:
        """Seconds of the stage, if it does not have to wait for the one before it."""
        return max(self.busy_s.values(), default=0.0) + self.latency_s

    def shared_by(self, num: int) -> Stage:
        """Return the stage with its `num`-th part of all times."""
        busy_s = {resource: seconds / num for resource, seconds in self.busy_s.items()}
        return replace(self, busy_s=busy_s, latency_s=self.latency_s / num)


class StageSpan(NamedTuple):
    """Start and end of a stage, in seconds from the start of the step."""

    group: int
    stage: Stage
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Simulated step.

    finish_s    end of the last stage
    parts_s     seconds of the critical path by kind of work; their sum is `finish_s`
    backward_s  as in `simulate`; so is `stages`
    started     group, place in the group from 0 for backward, start and end of each stage, in the order of `spans`
    path        stages of `critical`, by their places in `spans`
    """

    finish_s: float
    parts_s: Mapping[StepPart, float]
    backward_s: tuple[float, ...]
    stages: tuple[tuple[Stage, ...], ...]
    started: Sequence[tuple[int, int, float, float]]
    path: Sequence[int]

    @cached_property
    def spans(self) -> tuple[StageSpan, ...]:
        """All stages, backward first in each group, in the order in which they started."""
        backward = (Stage(name=BACKWARD, busy_s={Resource.COMPUTE: seconds}) for seconds in self.backward_s)
        chains = [(first, *rest) for first, rest in zip(backward, self.stages, strict=True)]
        return tuple(
            StageSpan(group, chains[group][place], start_s, end_s) for group, place, start_s, end_s in self.started
        )

    @property
    def critical(self) -> tuple[StageSpan, ...]:
        """Stages on the longest path.

        Each starts, or ends if it overlaps, when the one before it ends, gives a resource back, or has made enough
        pieces. A shorter one makes the step shorter, unless another path is as long.
        """
        return tuple(self.spans[place] for place in self.path)

    @property
    def bound_by(self) -> StepPart:
        """Kind of work that takes most of the critical path."""
        return max(self.parts_s, key=lambda part: self.parts_s[part])

    def shared_by(self, num: int) -> Timeline:
        """Return the mean of `num` steps of which this is the sum."""
        return Timeline(
            finish_s=self.finish_s / num,
            parts_s={part: seconds / num for part, seconds in self.parts_s.items()},
            backward_s=tuple(seconds / num for seconds in self.backward_s),
            stages=tuple(tuple(stage.shared_by(num) for stage in own) for own in self.stages),
            started=[(group, place, start_s / num, end_s / num) for group, place, start_s, end_s in self.started],
            path=self.path,
        )


def simulate(backward_s: Sequence[float], stages: Sequence[Sequence[Stage]]) -> Timeline:
    """Simulate a step: groups in the order of backward, each through its stages, side by side.

    backward_s  backward of each group's layers, on `compute`, one group after the other
    stages      stages of each group, after its backward

    A resource does one stage at a time. When it is free it takes, of the stages that can start, that of the oldest
    group, as the engine's thread does. So encoding on `compute` delays the backward of the next group.

    The loop is C++, in runtime_ext/csrc/planner/simulation.cpp; test_plain_simulation.py has it in plain Python.
    """
    if not stages or len(stages) != len(backward_s) or not all(stages):
        raise ConfigError(
            f"{len(backward_s)} backward times and {len(stages)} groups; give one each, and every group a stage"
        )
    finish_s, parts_s, started, path = _search.simulate(backward_s, [[stage.native for stage in own] for own in stages])
    return Timeline(
        finish_s=finish_s,
        parts_s=dict(zip(get_args(StepPart), parts_s, strict=True)),
        backward_s=tuple(backward_s),
        stages=tuple(map(tuple, stages)),
        started=started,
        path=path,
    )
