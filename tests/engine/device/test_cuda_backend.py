"""Backend "cgx" for tensors of a GPU that all ranks share: the bits that tensors of a CPU get."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.branches import Branches, batch, weights_hash
from support.ranks import run_ranks
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
import cgx_ray.backend  # registers it, also where the package is not installed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Below and above the smallest size that is compressed.
NUMELS = (1000, 1024, 5001)


def _reduced(rank: int, device: str) -> list[Tensor]:
    """Return sums and averages, two of them under way at once, and what plain collectives make."""
    found = []
    for dtype in DTYPES:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            generator = torch.Generator().manual_seed(rank)
            tensors = [torch.randn(numel, generator=generator).to(device, dtype) for numel in NUMELS]
            if op == dist.ReduceOp.AVG:  # Gloo has no averages of small tensors
                tensors = tensors[1:]
            works = [dist.all_reduce(tensor.mul_(2), op, async_op=True) for tensor in tensors]
            for work, tensor in zip(works, tensors, strict=True):
                assert work is not None
                work.wait()
                found.append(tensor.cpu())
    token = torch.full((3,), rank, device=device)
    dist.broadcast(token, 1)
    gathered = [torch.empty(2, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.full((2,), float(rank), device=device))
    dist.barrier()
    return [*found, token.cpu(), *(one.cpu() for one in gathered)]


def _trained(rank: int, device: str, *, is_registered: bool) -> Any:
    """Train a DDP; return its losses and weights."""
    model = DistributedDataParallel(Branches().to(device), bucket_cap_mb=1)
    if is_registered:
        cgx_ray.register_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        x_BD = batch(rank, step % 2).to(device)
        loss = (model(x_BD) - x_BD).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights_hash(model)


@pytest.mark.gpu
def test_tensors_of_a_gpu_get_the_bits_of_a_cpu() -> None:
    on_cpu, on_cuda = (run_ranks(2, _reduced, device, backend="cgx") for device in ("cpu", "cuda"))
    for expected, found in zip(on_cpu, on_cuda, strict=True):
        assert all(map(torch.equal, expected, found))


@pytest.mark.gpu
@pytest.mark.parametrize("is_registered", [False, True])
def test_models_on_a_gpu_learn_as_on_a_cpu_and_hold_the_same_weights(is_registered: bool) -> None:
    train = partial(_trained, is_registered=is_registered)
    (wanted, _), _ = run_ranks(2, train, "cpu", backend="cgx")
    (losses, weights), (_, others) = run_ranks(2, train, "cuda", backend="cgx")
    assert weights == others
    assert losses == pytest.approx(wanted, rel=0.05)
    assert losses[-1] < losses[0]
