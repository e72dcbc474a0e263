"""Results of `python -m bench planner`, for its tables, JSON and picture."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cgx_ray.planner.joint import BestPlan
from cgx_ray.report.result import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """Seconds of a step of one model under the joint plan and the named strategies."""

    model: str
    gbps: float
    joint_s: float
    gap: float
    strategies_s: dict[str, float]

    @property
    def best_strategy(self) -> str:
        return min(self.strategies_s, key=lambda name: self.strategies_s[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchTime:
    """Milliseconds of fusion with one option and of the joint search with six, and the gap of the latter."""

    num_layers: int
    fusion_ms: float
    joint_ms: float
    gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Plan for a number of workers."""

    num_workers: int
    ranks_per_node: int
    plan: BestPlan

    @property
    def dense_efficiency(self) -> float:
        """Share of the progress that the workers would make without any communication."""
        return self.plan.dense.compute_s / self.plan.dense.step_s

    @property
    def efficiency(self) -> float:
        """Share of that progress under the plan, without what compression loses."""
        return self.plan.best.compute_s / self.plan.best.score


@dataclass(slots=True)
class PlannerNumbers:
    """Results. `table6`: predicted and measured ms of every cell. `quick`: few cases, no goals."""

    quick: bool
    rows: list[Row] = field(default_factory=list)
    table6: list[tuple[str, float, float]] = field(default_factory=list)
    models: list[ModelPlan] = field(default_factory=list)
    times: list[SearchTime] = field(default_factory=list)
    scaling: list[Scaling] = field(default_factory=list)
    cupcake_ms: float = math.nan

    def add(self, name: str, value: float, unit: str, goal: str | None = None, baseline: float | None = None) -> None:
        self.rows.append(Row(name=name, value=value, unit=unit, goal=None if self.quick else goal, baseline=baseline))
