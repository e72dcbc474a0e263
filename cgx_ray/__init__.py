"""Adaptive gradient compression for Ray Train and PyTorch DDP."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

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
    from cgx_ray.attach import attach
    from cgx_ray.attachment import Attachment
    from cgx_ray.backend import configure_backend, exclude_layers, register_model
    from cgx_ray.collectives.transport import SimulatedLink
    from cgx_ray.layers import layers_of
    from cgx_ray.train import CGXConfig, add_state

# Imported on first use. Torch takes 200 MiB, which a monitor does not need; under torchrun nothing here imports Ray.
_MODULE_OF = {
    "attach": "cgx_ray.attach",
    "Attachment": "cgx_ray.attachment",
    **dict.fromkeys(("configure_backend", "exclude_layers", "register_model"), "cgx_ray.backend"),
    "SimulatedLink": "cgx_ray.collectives.transport",
    "layers_of": "cgx_ray.layers",
    **dict.fromkeys(("CGXConfig", "add_state"), "cgx_ray.train"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'cgx_ray' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Whoever imports the module cgx_ray.attach would else put it where the function of that name belongs.
        if not (name == "attach" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray pickles training functions with the modules they use, and knows plain modules only.
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package


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
