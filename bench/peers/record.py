"""Numbers of one cell of `python -m bench peers`, the file that keeps them, and their judgement."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.peers.cases import ACCURACIES, ACCURACY_OF, DDP, JOINT, NOOP, WAYS, PeersOptions
from cgx_ray.report.result import Row
from cgx_ray.report.show import write_json

# Largest seconds of the planner's plan over those of plain DDP, and of the best other way that is no less accurate.
DDP_GOAL, BEST_GOAL = "<= 1.03", "<= 1.02"
# Over its bound, in the median and in the worst cell.
LIMIT_GOALS = {"median": "<= 1.25", "worst": "<= 1.5"}
# Share of DDP's step above which a cell is one to win, and the speed-ups over DDP and over the best way without
# cgx_ray's engine in the median of such cells.
EXCHANGE_SHARE = 0.5
FASTER_GOALS = {"ddp": ">= 2", "best_peer": ">= 1.3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WayTime:
    """Seconds of a step of the divided model: median and quartiles over all counted steps.

    limit_s  alpha-beta bound; None of the way that exchanges nothing
    plan     in force, in words; None without an engine
    """

    median_s: float
    quartiles_s: tuple[float, float]
    limit_s: float | None
    plan: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellTimes:
    """All ways in one cell.

    cell      its name
    divisor   of layers, backward and latency
    ways      by name, among them noop, ddp and joint
    left_out  reasons by name of the way
    earlier   a run before, which has ways that this one has not. Each way is compared with those of its own run
    """

    cell: str
    divisor: float
    num_ranks: int
    num_rounds: int
    date: str
    commit: str | None
    machine: Mapping[str, Any]
    ways: Mapping[str, WayTime]
    left_out: Mapping[str, str]
    earlier: CellTimes | None = None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> CellTimes:
        ways = {name: WayTime(**{**way, "quartiles_s": tuple(way["quartiles_s"])}) for name, way in raw["ways"].items()}
        earlier = cls.from_json(raw["earlier"]) if raw.get("earlier") else None
        return cls(**{**raw, "ways": ways, "earlier": earlier})

    @property
    def runs(self) -> list[CellTimes]:
        """This run and those before it, newest first."""
        return [self, *(self.earlier.runs if self.earlier is not None else ())]

    @property
    def names(self) -> list[str]:
        """Names of the ways of all runs, in the order of `WAYS`."""
        return [name for name in WAYS if any(name in run.ways for run in self.runs)]

    def run_of(self, way: str) -> CellTimes:
        """Return the newest run with this way."""
        return next(run for run in self.runs if way in run.ways)

    def beside(self, earlier: CellTimes) -> CellTimes:
        """Return these times with those of the ways that only an earlier run has; without them where f is another."""
        if (earlier.num_ranks, earlier.divisor) != (self.num_ranks, self.divisor):
            return self
        left = [run for run in earlier.runs if run.ways.keys() - self.ways.keys()]
        joined: CellTimes | None = None
        for run in reversed(left):
            joined = replace(run, earlier=joined)
        return replace(self, earlier=joined)

    def answers(self, options: PeersOptions, divisor: float) -> bool:
        """Return whether measuring again with `options` and `divisor` would tell no more."""
        return (
            (self.num_ranks, self.divisor) == (options.num_ranks, divisor)
            and all(run.num_rounds >= options.num_rounds for run in self.runs)
            and {name for run in self.runs for name in (*run.ways, *run.left_out)} >= set(options.ways)
        )

    def ratio(self, way: str) -> float:
        """Return the way's seconds over those of plain DDP."""
        run = self.run_of(way)
        return run.ways[way].median_s / run.ways[DDP.name].median_s

    @property
    def exchange_share(self) -> float:
        """Share of DDP's step that is not there without an exchange."""
        return 1 - self.ratio(NOOP.name)

    @property
    def joint(self) -> WayTime:
        """Times of the planner's plan."""
        return self.ways[JOINT.name]

    @property
    def over_limit(self) -> float:
        """Seconds of the planner's plan over its bound."""
        joint = self.joint
        assert joint.limit_s is not None
        return joint.median_s / joint.limit_s

    def best(self, *, with_engine: bool) -> str:
        """Return the fastest way beside the planner's plan that is no less accurate than that.

        with_engine  also of those that need cgx_ray
        """
        allowed = ACCURACIES[: 1 + ACCURACIES.index(ACCURACY_OF[JOINT.name])]
        names = (
            name
            for name in self.names
            if ACCURACY_OF.get(name) in allowed and name != JOINT.name and (with_engine or not WAYS[name].has_engine)
        )
        return min(names, key=self.ratio)

    def rows(self) -> Iterator[Row]:
        """Yield all numbers of the cell, and its goals. The seconds are those measured, not `divisor` times as many."""
        yield Row(name=f"{self.cell} divisor", value=self.divisor, unit="x")
        yield Row(name=f"{self.cell} exchange", value=self.exchange_share, unit="of DDP's step")
        for name in self.names:
            run = self.run_of(name)
            way = run.ways[name]
            yield Row(
                name=f"{self.cell} {name}",
                value=way.median_s,
                unit="s",
                baseline=run.ways[DDP.name].median_s,
                limit=way.limit_s,
                ratio=self.ratio(name),
                goal=DDP_GOAL if name == JOINT.name else None,
            )
        best = self.best(with_engine=True)
        ratio = self.ratio(JOINT.name) / self.ratio(best)
        yield Row(name=f"{self.cell} joint over {best}", value=ratio, unit="x", goal=BEST_GOAL)


def judged(cells: Iterable[CellTimes]) -> list[Row]:
    """Return the rows of all cells, and the goals that are for all of them together."""
    cells = list(cells)
    rows = [row for cell in cells for row in cell.rows()]
    over_limit = [cell.over_limit for cell in cells]
    for name, value in (("median", median(over_limit)), ("worst", max(over_limit))):
        rows.append(Row(name=f"{name} joint over limit", value=value, unit="x", goal=LIMIT_GOALS[name]))
    bound = [cell for cell in cells if cell.exchange_share > EXCHANGE_SHARE]
    if bound:
        over_ddp = median(1 / cell.ratio(JOINT.name) for cell in bound)
        over_peer = median(cell.ratio(cell.best(with_engine=False)) / cell.ratio(JOINT.name) for cell in bound)
        for name, value in (("ddp", over_ddp), ("best_peer", over_peer)):
            rows.append(Row(name=f"median {name} over joint", value=value, unit="x", goal=FASTER_GOALS[name]))
    return rows


def read_cells(path: Path) -> dict[str, CellTimes]:
    """Return the cells of a file by name; none if there is no file."""
    raw = json.loads(path.read_text())["cells"] if path.exists() else []
    return {cell["cell"]: CellTimes.from_json(cell) for cell in raw}


def write_cells(path: Path, cells: Mapping[str, CellTimes]) -> None:
    write_json(path, {"bench": "peers", "cells": [asdict(cells[name]) for name in sorted(cells)]})
