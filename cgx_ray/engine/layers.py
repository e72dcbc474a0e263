"""A model's parameters as layers: whose gradients are averaged, and what a plan sees of them. Imports no Ray."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ray.errors import ConfigError
from cgx_ray.plan import Layer

DEVICE_TYPES = ("cpu", "cuda")
GRADIENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of a model whose gradients are averaged, in registration order.

    Raises ConfigError for gradients this version cannot carry.
    """
    parameters = averaged_parameters(model)
    devices = {str(parameter.device): name for name, parameter in parameters.items()}
    if len(devices) > 1 or any(torch.device(device).type not in DEVICE_TYPES for device in devices):
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ConfigError(f"the model has {places}; this version takes models on one device, the CPU or a CUDA device")
    for name, parameter in parameters.items():
        if parameter.dtype not in GRADIENT_DTYPES:
            known = ", ".join(str(dtype) for dtype in GRADIENT_DTYPES)
            raise ConfigError(f"{name} is {parameter.dtype}; gradients must be one of {known}")
    return [as_layer(name, parameter) for name, parameter in parameters.items()]


def averaged_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name, in registration order, those that DDP would average."""
    ignored = getattr(model, "parameters_to_ignore", ())
    module = model.module if isinstance(model, DistributedDataParallel) else model
    return {n: p for n, p in module.named_parameters() if p.requires_grad and n not in ignored}


def sparse_modules(model: nn.Module) -> list[str]:
    """Names of the modules in `model` whose gradients are sparse, which lie in no bucket of DDP's."""
    embeddings = ((n, m) for n, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return [name for name, module in embeddings if module.sparse]


def as_layer(name: str, parameter: Tensor) -> Layer:
    """A parameter as the planner sees it, whatever its dtype."""
    return Layer(
        name=name,
        numel=parameter.numel(),
        ndim=parameter.ndim,
        dtype=str(parameter.dtype).removeprefix("torch."),
        num_rows=parameter.shape[0] if parameter.ndim > 1 and parameter.numel() > 0 else None,
    )
