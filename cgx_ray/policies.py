"""Policies that `CGXConfig(policy=...)` takes, and what a policy of your own is made from: docs/own-policy.md."""

from __future__ import annotations

from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.policies.paper_policies import ByteComp, Cgx, Cupcake, Flexible
from cgx_ray.control.policies.policy import Decision, PlannerInput, Policy, Situation, Static, options_from
from cgx_ray.plan import CodecSpec, Option
from cgx_ray.planner.planned_group import PlannedGroup
from cgx_ray.planner.prediction import Measured, Prediction

__all__ = [
    "Adaptive",
    "ByteComp",
    "Cgx",
    "CodecSpec",
    "Cupcake",
    "Decision",
    "Flexible",
    "Measured",
    "Option",
    "PlannedGroup",
    "PlannerInput",
    "Policy",
    "Prediction",
    "Situation",
    "Static",
    "options_from",
]
