"""Measuring steps: a few under another plan, to measure dense again or to time a codec, before the next decision.

Dense is measured again if the plan in force may be slower than dense and the steps so far do not show it. A codec that
was never in use is timed if a plan with it would be better by MIN_IMPROVEMENT should it take no time. Then one layer is
sent with it, so a codec that is truly slow costs little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cgx_ray.control.learned.evidence import MAX_STEPS, Evidence, Verdict, verdict
from cgx_ray.control.network.estimate import NOISE, Z_95
from cgx_ray.control.policies.policy import MAX_SLOWDOWN, Decision, Policy, Situation
from cgx_ray.control.trial.outcome import PlanRecord
from cgx_ray.plan import CodecSpec, Option, Plan, preferred_scheme
from cgx_ray.planner.planned_group import PlannedGroup
from cgx_ray.planner.prediction import Measured, Prediction, predict

# Standard errors by which a plan must be over MAX_SLOWDOWN right after a comparison to be taken back. Less than
# `evidence.SURE`: dense is what was promised, and costs little if the two are that near. Without any, plans are taken
# back that are as fast as dense.
COMPARED = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuringSteps:
    """Measuring steps that are under way.

    home    plan before them, to which ranks return
    record  steps under `home`
    codec   that is timed; None if dense is measured
    """

    home: Plan
    record: PlanRecord
    codec: CodecSpec | None = None


def is_worth_comparing(slowdown: Evidence, dense: Evidence, num_steps: int) -> bool:
    """Return whether dense steps now would show if the plan keeps the promise.

    slowdown   of the plan, over dense
    dense      error of dense alone
    num_steps  of the plan that are known
    """
    own_error = math.sqrt(max(slowdown.error**2 - dense.error**2, 0.0))
    is_unsure = verdict(slowdown, MAX_SLOWDOWN, Z_95) is Verdict.UNSURE
    # With dense known better than the plan, only more steps of the plan help.
    return is_unsure and num_steps >= MAX_STEPS and dense.error > own_error


def codec_trial(policy: Policy, situation: Situation, kept: Decision) -> tuple[CodecSpec, Decision] | None:
    """Return a codec whose calibrated times may rule it out, and the decision to time it in one layer, or None."""
    codec = policy.codec_to_time(situation, kept)
    trial = trial_of(codec, situation.planner_input.now, kept.predicted) if codec is not None else None
    if codec is None or trial is None:
        return None
    return codec, Decision(
        kind="replace",
        plan=trial.plan(version=situation.plan.version + 1, world_size=situation.plan.world_size),
        reason=f"{kept.reason}; time {codec.describe()} in one layer",
        predicted=trial,
        step_s=situation.planner_input.step_s(trial),
        dense_s=kept.dense_s,
    )


def trial_of(codec: CodecSpec, measured: Measured, current: Prediction) -> Prediction | None:
    """Return the step of `current` with one layer under `codec`, or None if all layers are too small to compress.

    That is the largest layer that makes the step at most NOISE times as long by calibrated times, else the
    smallest.
    """
    option = Option(codec=codec, scheme=preferred_scheme(codec))
    large = (layer for layer in measured.free_layers if not layer.is_small)
    layers = sorted(large, key=lambda layer: -layer.numel)
    trial = None
    for layer in layers:
        trial = predict(measured, tuple(_with_layer(current.groups, measured, layer.name, option)))
        if trial.step_s <= NOISE * current.step_s:
            break
    return trial


def _with_layer(
    groups: Sequence[PlannedGroup], measured: Measured, name: str, option: Option
) -> Iterable[PlannedGroup]:
    """Yield `groups`, with the layer `name` cut out into a group of its own under `option`."""
    layers = {layer.name: layer for layer in measured.layers}
    for group in groups:
        if name not in group.layers:
            yield group
            continue
        at = group.layers.index(name)
        for names, used in (
            (group.layers[:at], group.option),
            ((name,), option),
            (group.layers[at + 1 :], group.option),
        ):
            if names:
                yield PlannedGroup.of([layers[one] for one in names], used, period=group.period)
