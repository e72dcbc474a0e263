"""Layers of a model: which gradients are averaged, and their description for a plan. Imports no Ray."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cgx_ray.codecs.codec import KINDS, POWERSGD_Q
from cgx_ray.errors import ConfigError, StateError
from cgx_ray.plan import NONE, Layer, Plan
from cgx_ray.torch_compat import uncompiled

DEVICE_TYPES = ("cpu", "cuda")
GRADIENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# A warning, of the layers.
LOSSY_FLOAT64 = (
    "gradients of float64 are compressed by way of float32, of %s: values beyond 3.4e38 become Inf, those below 1e-45 "
    "become 0; to keep float64, leave these layers uncompressed (CGXConfig(exclude=), or make_plan(overrides=))"
)


def layers_of(model: nn.Module) -> list[Layer]:
    """Return the layers of a model whose gradients are averaged, in registration order.

    A parameter without elements is no layer: it has nothing to average. DDP puts it into its buckets all the same.

    Raises ConfigError for devices and types of gradients that this version does not support.
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
    return [as_layer(name, parameter) for name, parameter in parameters.items() if parameter.numel() > 0]


def averaged_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return, by name and in registration order, the parameters whose gradients DDP would average."""
    ddp = uncompiled(model)
    ignored = getattr(ddp, "parameters_to_ignore", ())
    module = ddp.module if isinstance(ddp, DistributedDataParallel) else model
    return {n: p for n, p in module.named_parameters() if p.requires_grad and n not in ignored}


def sparse_modules(model: DistributedDataParallel) -> list[str]:
    """Return the names of the modules whose sparse gradients `model` would average: DDP puts them in no bucket."""
    averaged = {id(parameter) for parameter in averaged_parameters(model).values()}
    embeddings = ((n, m) for n, m in model.module.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
    return [name for name, module in embeddings if module.sparse and id(module.weight) in averaged]


def as_layer(name: str, parameter: Tensor) -> Layer:
    """Describe a parameter of any dtype to the planner. A DTensor of FSDP2 counts as the whole parameter."""
    return Layer(
        name=name,
        numel=parameter.numel(),
        ndim=parameter.ndim,
        dtype=str(parameter.dtype).removeprefix("torch."),
        num_rows=parameter.shape[0] if parameter.ndim > 1 and parameter.numel() > 0 else None,
    )


def lossy_layers(plan: Plan, layers: Mapping[str, Layer]) -> list[str]:
    """Return the layers of float64 that `plan` compresses. `layers`: by name, those of the model."""
    compressed = [name for group in plan.groups if group.option.codec != NONE for name in group.layers]
    return [name for name in compressed if layers[name].dtype == "float64"]


def check_memories(memories: Mapping[str, Mapping[str, Tensor]], layers: Mapping[str, Layer]) -> None:
    """Raise StateError unless the codecs' memory, by kind and layer, is that of a model with these `layers`."""
    for kind in KINDS:
        for name, value in memories.get(kind, {}).items():
            expected = layers[name].numel if name in layers else None
            if expected is None or (kind != POWERSGD_Q and value.numel() != expected):
                raise StateError(
                    f"the state has {kind} of {value.numel()} elements for layer {name!r}, the model has "
                    f"{'no such layer' if expected is None else expected}; the state is from another model"
                )
