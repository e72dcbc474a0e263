"""Simulated steps equal those of a simulation in plain Python, bit for bit."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from cgx_ray.planner.timeline import BACKWARD, Resource, Stage, StageSpan, StepPart, simulate

# Few values, so that stages are often done at the same time, or would be if sums were not rounded.
TIED_S = st.sampled_from([0.0, 0.1, 0.2, 0.3, 1 / 3, 0.7, 1.0, 2.0])
WHOLE_S = st.integers(0, 9).map(float)
ANY_S = st.floats(0, 1e3)


def groups_of(seconds: st.SearchStrategy[float]) -> st.SearchStrategy[list[tuple[float, list[Stage]]]]:
    """Return backward seconds and stages of up to ten groups. A stage needs up to all resources, in any order."""
    busy_s = st.dictionaries(st.sampled_from(Resource), seconds)
    stages = st.builds(Stage, name=st.just("stage"), busy_s=busy_s, latency_s=seconds, overlaps=st.booleans())
    return st.lists(st.tuples(seconds, st.lists(stages, min_size=1, max_size=7)), min_size=1, max_size=10)


# A busy machine would miss hypothesis's deadline of 200 ms per example.
@settings(deadline=None)
@given(groups=st.one_of(groups_of(WHOLE_S), groups_of(TIED_S), groups_of(ANY_S)))
def test_simulation_equals_plain_python_bit_for_bit(groups: list[tuple[float, list[Stage]]]) -> None:
    backward_s, stages = (list(part) for part in zip(*groups, strict=True))
    played, plain = simulate(backward_s, stages), simulate_plainly(backward_s, stages)
    found = PlainStep(played.finish_s, played.spans, played.critical, dict(played.parts_s))
    # As text, in which all bits of a number count.
    assert repr(found) == repr(plain)


class PlainStep(NamedTuple):
    """Parts of a `Timeline`."""

    finish_s: float
    spans: tuple[StageSpan, ...]
    critical: tuple[StageSpan, ...]
    parts_s: dict[StepPart, float]


def simulate_plainly(backward_s: Sequence[float], stages: Sequence[Sequence[Stage]]) -> PlainStep:
    """Return what `simulate` returns for the same arguments. It checks none of them."""
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
    """The state of `simulate_plainly`.

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

    def run(self) -> PlainStep:
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
        return self._step()

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

    def _step(self) -> PlainStep:
        last = max(self.ends.values(), key=lambda moment: moment.time_s)
        parts_s: dict[StepPart, float] = {"compute": 0.0, "codec": 0.0, "bandwidth": 0.0, "latency": 0.0}
        path: dict[int, StageSpan] = {}
        moment: _Moment | None = last
        while moment is not None and moment.span >= 0:
            parts_s[moment.part] += moment.spent_s
            path[moment.span] = self.spans[moment.span]
            moment = moment.after
        return PlainStep(last.time_s, tuple(self.spans), tuple(reversed(path.values())), parts_s)


def _part(stage: Stage, resource: Resource) -> StepPart:
    """Return the kind of work of a stage on a resource."""
    if stage.name == BACKWARD:
        return "compute"
    return "bandwidth" if resource in (Resource.INTRA, Resource.INTER) else "codec"
