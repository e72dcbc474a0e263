"""Models made by `fully_shard`, and training loops for them."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cgx_ray.collectives.transport.simulated_link import SimulatedLink
from cgx_ray.session import fsdp as session
from cgx_ray.session.attach import attach_with
from cgx_ray.session.settings import Settings
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


def hand_over() -> None:
    """Let FSDP2 itself reduce the gradients of plans without a codec, as where NCCL connects the ranks."""
    session.vendor_reduces = lambda groups: True


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


# Longest time for a choice, in seconds, on a busy machine.
CHOSEN_S = 60.0
# 0.5 MB of gradients take 0.1 s, and those of replicas half of it.
SLOW_LINK = SimulatedLink(latency_s=1e-4, schedule=((0.0, 4e7),))


def try_codecs(rank: int, device: str, folder: str, num_replicas: int) -> tuple[nn.Module, list[str]]:
    """Train over a slow link under policy "adaptive" until a codec was chosen; return the model and its plans."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to(device)
    model = shard(layers, make_mesh(num_replicas, device))
    attachment = attach_with(model, Settings(simulated_link=SLOW_LINK), folder=folder, report_s=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    plans: dict[int, str] = {}
    end_s, step, num_left = time.monotonic() + CHOSEN_S, 0, torch.tensor(math.inf)
    while num_left > 0:
        x_BD = torch.randn(8, 256, generator=torch.Generator().manual_seed(step + 1000 * rank)).to(device)
        (model(x_BD) - x_BD).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        assert attachment.plan is not None
        plans.setdefault(attachment.plan.version, attachment.plan.describe())
        is_chosen = len(plans) > 2 and attachment.plan.lease is None and attachment.plan.describe() != "dense"
        if is_chosen or time.monotonic() > end_s:
            # Until the outcome is reported.
            num_left = num_left.clamp(max=100) - 1
        dist.broadcast(num_left, 0)
    attachment.close()
    return model, list(plans.values())
