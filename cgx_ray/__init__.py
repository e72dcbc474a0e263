"""Adaptive gradient compression for Ray Train and PyTorch DDP."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cgx_ray.errors import (
    CGXError,
    ConfigError,
    PlanError,
    ReplicaError,
    StateError,
    TransportError,
    WireError,
)
from cgx_ray.plan import (
    CodecRecord,
    CodecSpec,
    GroupPlan,
    Intra,
    Layer,
    Option,
    Parameter,
    Plan,
    Scheme,
    make_plan,
    register_codec,
)

if TYPE_CHECKING:
    from cgx_ray.backend import configure_backend, exclude_layers, register_model
    from cgx_ray.collectives.transport.simulated_link import SimulatedLink
    from cgx_ray.engine.layers import layers_of
    from cgx_ray.policies import Adaptive, Cgx, Flexible, Static
    from cgx_ray.ray_train.config import CGXConfig, add_state
    from cgx_ray.session.attach import attach
    from cgx_ray.session.attachment import Attachment

# Imported on first use: torch takes 200 MiB, which a monitor does not need, and a run under torchrun needs no Ray.
_MODULE_OF = {
    "attach": "cgx_ray.session.attach",
    "Attachment": "cgx_ray.session.attachment",
    **dict.fromkeys(("configure_backend", "exclude_layers", "register_model"), "cgx_ray.backend"),
    "SimulatedLink": "cgx_ray.collectives.transport.simulated_link",
    "layers_of": "cgx_ray.engine.layers",
    **dict.fromkeys(("Adaptive", "Cgx", "Flexible", "Static"), "cgx_ray.policies"),
    **dict.fromkeys(("CGXConfig", "add_state"), "cgx_ray.ray_train.config"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'cgx_ray' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "Adaptive",
    "Attachment",
    "CGXConfig",
    "CGXError",
    "Cgx",
    "CodecRecord",
    "CodecSpec",
    "ConfigError",
    "Flexible",
    "GroupPlan",
    "Intra",
    "Layer",
    "Option",
    "Parameter",
    "Plan",
    "PlanError",
    "ReplicaError",
    "Scheme",
    "SimulatedLink",
    "StateError",
    "Static",
    "TransportError",
    "WireError",
    "add_state",
    "attach",
    "configure_backend",
    "exclude_layers",
    "layers_of",
    "make_plan",
    "register_codec",
    "register_model",
]
