"""Boards as values: which questions their panels answer, and the queries that answer them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from cgx_ray.monitors.export import LABELS, METRICS, RUN, RUN_ID, served_name

# The names of Ray's own boards, so that links from one board to another keep the choice.
SESSION_VARIABLE, RUN_VARIABLE, RUN_ID_VARIABLE = "SessionName", "TrainRunName", "TrainRunId"
_CHOSEN = f'SessionName=~"${SESSION_VARIABLE}",{RUN}="${RUN_VARIABLE}",{RUN_ID}=~"${RUN_ID_VARIABLE}"'

# Grafana's units.
SECONDS, AGO, SHARE, RATIO, COUNT = "s", "dtdurations", "percentunit", "none", "short"
BYTES_PER_S, BITS_PER_S, STEPS_PER_S = "Bps", "bps", "suffix: steps/s"
BITS, TIMES = "suffix: bits", "suffix: x"

_NO_RANK = "no rank has reported: choose a run above, and a time in which it trained"
_NO_CONTROLLER = (
    "no controller has reported: choose a run above, and a time; a fixed codec under torchrun needs attach(folder=)"
)

GREEN, YELLOW, RED = "green", "orange", "red"


class Kind(StrEnum):
    LINES = "lines"
    STACK = "stack"
    NUMBER = "number"
    NAME = "name"
    STATES = "states"
    MATRIX = "matrix"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression, with the variables of the board, and how its series are called."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    title       the question that it answers
    meaning     how to read it, and what to do
    unit        of Grafana
    colours     for each threshold, the value from which its colour counts; the first has none
    is_log      the axis is logarithmic
    empty       what it means that there is no series; None if there always is one while a run goes on
    """

    title: str
    meaning: str
    unit: str
    queries: Sequence[Query]
    kind: Kind = Kind.LINES
    colours: Sequence[tuple[float | None, str]] = ((None, GREEN),)
    is_log: bool = False
    empty: str | None = None

    @property
    def no_data(self) -> str:
        """Reason why the panel is empty, which it shows itself."""
        if self.empty is not None:
            return self.empty
        names = set().union(*(metrics_in(query.expression) for query in self.queries))
        sources = {METRICS[name].source for name in names}
        return _NO_CONTROLLER if "controller" in sources else _NO_RANK


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A page of panels, in sections.

    meaning  the question that it answers
    note     what its readers should know besides
    folded   titles of sections that are closed until a reader opens them
    """

    uid: str
    title: str
    meaning: str
    sections: Sequence[tuple[str, Sequence[Panel]]]
    note: str = ""
    folded: Sequence[str] = ()

    @property
    def questions(self) -> list[Panel]:
        return [question for _, questions in self.sections for question in questions]


def of(name: str, part: str = "", **labels: str) -> str:
    """Return the series of a metric in the chosen run.

    part    of a histogram: bucket, sum or count
    labels  regular expressions of further labels
    """
    wrong = labels.keys() - LABELS.keys()
    assert name in METRICS, name
    assert not wrong, wrong
    more = "".join(f',{label}=~"{value}"' for label, value in labels.items())
    return f"{served_name(name)}{'_' if part else ''}{part}{{{_CHOSEN}{more}}}"


def rate(name: str, part: str = "", **labels: str) -> str:
    """Return the increase per second of a counter in the chosen run."""
    return f"rate({of(name, part, **labels)}[$__rate_interval])"


def total(name: str) -> Query:
    """Return the query of a counter of rare events. Ray serves a counter from its first event on."""
    return Query(f"sum({of(name)}) or vector(0)", "so far")


def chosen(expression: str, *, run: str, window: str = "15s") -> str:
    """Return `expression` as Grafana sends it to Prometheus for one run of any session.

    window  of rates; four times the interval of Prometheus' scrapes, as Grafana chooses it
    """
    escaped = run.replace("\\", "\\\\").replace('"', '\\"')
    values = {
        "$__rate_interval": window,
        f"${SESSION_VARIABLE}": ".*",
        f"${RUN_VARIABLE}": escaped,
        f"${RUN_ID_VARIABLE}": ".*",
    }
    for variable, value in values.items():
        expression = expression.replace(variable, value)
    return expression


def metrics_in(expression: str) -> set[str]:
    """Return the metrics in a PromQL expression; a name that `monitors.export` lacks is returned as it is."""
    parts = {f"{served_name(name)}{end}": name for name in METRICS for end in ("", "_bucket", "_sum", "_count")}
    return {parts.get(found, found) for found in re.findall(r"\bray_cgx_ray_\w+", expression)}
