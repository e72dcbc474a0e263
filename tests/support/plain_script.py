"""A training function that does not mention cgx_ray, alone and before a call of `attach` without a config."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(config: dict[str, Any]) -> None:
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(10):
        x_BD = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        loss = (model(x_BD) - x_BD).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    summed_N = torch.linspace(-1, 1, 5000)
    dist.all_reduce(summed_N)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    said = {
        "backend": dist.get_backend(),
        "hash": hashlib.sha256(weights).hexdigest(),
        "losses": losses,
        "error": (summed_N - 2 * torch.linspace(-1, 1, 5000)).abs().max().item(),
    }
    (Path(config["log"]) / f"rank{rank}.json").write_text(json.dumps(said))


def train_then_attach(config: dict[str, Any]) -> None:
    """One worker group for two claims. cgx_ray is imported for the second, so the first one has ended by then."""
    train(config)
    import cgx_ray

    # `attach` compresses for Gloo; the default group is the backend cgx by now.
    model = DistributedDataParallel(nn.Linear(64, 64), process_group=dist.new_group(backend="gloo"))
    cgx_ray.attach(model)
    model(torch.ones(1, 64)).sum().backward()
