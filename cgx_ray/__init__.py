"""Adaptive gradient compression for Ray Train and PyTorch DDP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cgx_ray.attach import Attachment, attach, layers_of
from cgx_ray.backend import configure_backend, exclude_layers, register_model
from cgx_ray.collectives.transport import SimulatedLink
from cgx_ray.errors import (
    CGXError,
    ConfigError,
    PlanError,
    StateError,
    TransportError,
    WireError,
)
from cgx_ray.plan import CodecSpec, GroupPlan, Intra, Layer, Plan, Scheme, make_plan

if TYPE_CHECKING:
    from cgx_ray.train import CGXConfig, add_state

# Imported on first use: under torchrun nothing here imports Ray.
_NEEDS_RAY = ("CGXConfig", "add_state")


def __getattr__(name: str) -> Any:
    if name in _NEEDS_RAY:
        from cgx_ray import train  # noqa: PLC0415

        return getattr(train, name)
    raise AttributeError(f"module 'cgx_ray' has no attribute {name!r}")


__all__ = [
    "Attachment",
    "CGXConfig",
    "CGXError",
    "CodecSpec",
    "ConfigError",
    "GroupPlan",
    "Intra",
    "Layer",
    "Plan",
    "PlanError",
    "Scheme",
    "SimulatedLink",
    "StateError",
    "TransportError",
    "WireError",
    "add_state",
    "attach",
    "configure_backend",
    "exclude_layers",
    "layers_of",
    "make_plan",
    "register_model",
]
