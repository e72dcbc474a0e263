"""The guard's decisions: to dense for a few steps, to dense for good, and back."""

from __future__ import annotations

import math
from dataclasses import replace

from cgx_ray.control.learned.evidence import Evidence
from cgx_ray.control.learned.measured import is_dense
from cgx_ray.control.policies.policy import Decision
from cgx_ray.control.trial.measuring_steps import MeasuringSteps
from cgx_ray.control.worker_group import WorkerGroupState
from cgx_ray.planner.planned_group import groups_of
from cgx_ray.planner.prediction import predict


def replace_by_dense(state: WorkerGroupState, reason: str) -> Decision:
    """Return the decision to measure dense steps."""
    measured, steps = state.known(), state.steps
    dense_s = steps.dense_s(measured)
    return Decision(
        kind="replace",
        plan=replace(steps.dense_plan, version=state.plan.last_version + 1, lease=None),
        reason=reason,
        predicted=predict(measured, steps.dense_groups),
        step_s=dense_s,
        dense_s=dense_s,
    )


def disable(state: WorkerGroupState, reason: str) -> Decision:
    """Return the decision to go back to dense, or to stay with it."""
    found = replace_by_dense(state, reason)
    plan = state.plan if is_dense(state.plan) else found.plan
    return Decision(
        kind="disable",
        plan=plan,
        reason=f"{reason}; dense takes {found.dense_s:.3f} s per step on this network",
        predicted=found.predicted,
        step_s=found.step_s,
        dense_s=found.dense_s,
    )


def return_home(state: WorkerGroupState, measuring: MeasuringSteps, cut_by: str | None = None) -> Decision:
    """Return the decision to end `measuring`. `cut_by`: what ends it before it has measured anything."""
    measured = state.known()
    predicted = predict(measured, groups_of(measuring.home, state.layers))
    what = "dense is measured" if measuring.codec is None else f"{measuring.codec.describe()} is timed"
    return Decision(
        kind="replace",
        plan=replace(measuring.home, version=state.plan.last_version + 1, lease=None),
        reason=f"{cut_by or what}: back to {predicted.describe_options()}",
        predicted=predicted,
        step_s=state.steps.errors.step_s(predicted),
        dense_s=state.steps.dense_s(measured),
    )


def beside_dense(slowdown: Evidence) -> str:
    """Return such as "12% slower than dense for the same progress"."""
    ratio = math.exp(slowdown.mean)
    if ratio >= 2:
        return f"{ratio:.1f} times as slow as dense for the same progress"
    return f"{abs(ratio - 1):.0%} {'slower' if ratio >= 1 else 'faster'} than dense for the same progress"
