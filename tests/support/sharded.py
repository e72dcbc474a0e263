"""Models made by `fully_shard`, and training loops for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cgx_ray.session import fsdp as session
from support.branches import batch

BITS8 = "qsgd:bits=8,rounding=nearest"


def make_mesh(num_replicas: int = 1, device: str = "cpu") -> DeviceMesh:
    num_ranks = dist.get_world_size()
    if num_replicas == 1:
        return init_device_mesh(device, (num_ranks,))
    shape = (num_replicas, num_ranks // num_replicas)
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def sum_inside() -> None:
    """Let FSDP2 itself reduce-scatter, as NCCL does inside nodes."""
    session.nodes_sum = lambda group, shards: True


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    """Call `fully_shard` on each linear layer, then on `model` for the other layers. Return `model`."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a sharded tensor, detached from autograd."""
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: whole(gradient) for name, gradient in found.items() if gradient is not None}


def backward(model: nn.Module, rank: int, step: int) -> None:
    x_BD = batch(rank, step)
    (model(x_BD).float() - x_BD).square().mean().backward()


def train(model: nn.Module, rank: int, steps: range) -> dict[str, torch.Tensor]:
    """Train with plain SGD. Return the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        optimizer.zero_grad()
        backward(model, rank, step)
        optimizer.step()
    return weights_of(model)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)
