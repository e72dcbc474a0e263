"""The journal of a training, `decisions.jsonl`: one JSON line per decision, per outcome and per change of silence."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cgx_ray.control.outcome import PendingOutcome
from cgx_ray.control.policy import Decision
from cgx_ray.plan import Plan
from cgx_ray.planner.prediction import Measured

logger = logging.getLogger(__name__)


class Journal:
    """Appends to `path`. When the disk is full, lines are lost but training goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_errors = 0

    def write(self, entry: dict[str, Any]) -> None:
        """Append `entry`. A failure loses the line; all failures are counted and the first one is logged."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            if self.num_errors == 0:
                logger.warning("decisions are no longer written to %s: %s; training goes on", self.path, error)
            self.num_errors += 1


def decision_entry(
    decision: Decision, *, old: Plan, new: Plan, measured: Measured, step: int, time_s: float
) -> dict[str, Any]:
    """Return the journal's line for a decision made after `step` on `measured`."""
    return {
        "event": "decision",
        "time": time_s,
        "step": step,
        "kind": type(decision).__name__.lower(),
        "old": _plan_fields(old),
        "new": _plan_fields(new),
        "reason": decision.reason,
        "inputs": _measured_fields(measured),
        "predicted_step_s": decision.step_s,
        "predicted_dense_s": decision.dense_s,
        "bound_by": decision.predicted.bound_by,
    }


def outcome_entry(outcome: PendingOutcome, *, version: int, step: int, time_s: float) -> dict[str, Any]:
    """Return the journal's line for the step time that a decision led to. `version` is that of its plan."""
    return {
        "event": "outcome",
        "time": time_s,
        "step": step,
        "version": version,
        "applied_step": outcome.applied_step,
        "predicted_step_s": outcome.decision.step_s,
        "measured_step_s": outcome.step_s,
    }


def silence_entry(silent_ranks: Collection[int], *, step: int, time_s: float) -> dict[str, Any]:
    """Return the journal's line for other silent ranks than before, none if all report again."""
    return {"event": "silence", "time": time_s, "step": step, "silent_ranks": sorted(silent_ranks)}


def _plan_fields(plan: Plan) -> dict[str, Any]:
    """Return the plan in one phrase, and the number of groups and layers of each option."""
    options: dict[str, dict[str, int]] = {}
    for group in plan.groups:
        counts = options.setdefault(str(group.option), {"groups": 0, "layers": 0})
        counts["groups"] += 1
        counts["layers"] += len(group.layers)
    return {"version": plan.version, "plan": plan.describe(), "options": options}


def _measured_fields(measured: Measured) -> dict[str, Any]:
    """Return the measurements that a decision was made on."""
    network = measured.network
    return {
        "world_size": network.num_workers,
        "ranks_per_node": network.ranks_per_node,
        "bandwidth_gbps": network.between.bandwidth_gbps,
        "latency_ms": network.between.alpha_s * 1e3,
        "compute_s": measured.compute_s,
        "dense_bytes": sum(layer.dense_bytes for layer in measured.layers),
        "gain": dict(measured.gain),
    }
