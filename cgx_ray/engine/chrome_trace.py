"""Timelines of steps in Chrome's trace format, which https://ui.perfetto.dev shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Phase of a span that stands for a whole step.
STEP = "step"


class PhaseSpan(NamedTuple):
    """One phase of one group on one rank. Seconds since the ranks started the step, or the first of several, together.

    group  of phase STEP: number of the step
    """

    rank: int
    group: int
    phase: str
    start_s: float
    end_s: float


def chrome_trace(steps: Mapping[str, Sequence[PhaseSpan]]) -> dict[str, Any]:
    """Return one step of each way as a JSON document.

    Each way's rank is a process, and each phase a track in it. Groups whose spans of one phase overlap go to several
    tracks of that phase, since spans of one track must not overlap.
    """
    events: list[dict[str, Any]] = []
    pids: dict[tuple[str, int], int] = {}
    for way, spans in steps.items():
        for rank in sorted({span.rank for span in spans}):
            pid = pids[way, rank] = len(pids)
            events.append(_name("process", f"{way}, rank {rank}", pid))
            own = [span for span in spans if span.rank == rank]
            tid = 0
            for phase in dict.fromkeys(span.phase for span in sorted(own, key=lambda span: span.start_s)):
                for lane in _lanes([span for span in own if span.phase == phase]):
                    events.append(_name("thread", phase, pid, tid))
                    events += [_complete(span, pid, tid) for span in lane]
                    tid += 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _lanes(spans: Sequence[PhaseSpan]) -> list[list[PhaseSpan]]:
    """Spread spans over as few lanes as possible, so that no two of a lane overlap."""
    lanes: list[list[PhaseSpan]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        free = next((lane for lane in lanes if lane[-1].end_s <= span.start_s), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _name(what: str, name: str, pid: int, tid: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _complete(span: PhaseSpan, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": f"{STEP if span.phase == STEP else 'group'} {span.group}",
        "cat": span.phase,
        "ts": 1e6 * span.start_s,
        "dur": 1e6 * (span.end_s - span.start_s),
        "pid": pid,
        "tid": tid,
    }
