"""A training with a period, whose ranks are alike at the end of each round."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from support.branches import Branches, batch

PERIOD = 4


class PeriodTraining:
    """A model of `Branches`, attached with a period, and its data."""

    def __init__(
        self,
        rank: int,
        *,
        period: int = PERIOD,
        scaler: Any = None,
        make: Callable[[], Branches] = Branches,
        weight_check_steps: int | None = None,
        **ddp: Any,
    ) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.model = DistributedDataParallel(make(), **ddp)
        self.attachment = cgx_ray.attach(
            self.model,
            codec="none",
            scheme="sra",
            period=period,
            scaler=scaler,
            weight_check_steps=weight_check_steps,
        )

    def backward(self, step: int) -> Tensor:
        loss: Tensor = self.model(batch(self.rank, step)).square().mean()
        loss.backward()
        return loss

    def flat(self) -> list[float]:
        return torch.cat([one.detach().flatten() for one in self.model.parameters()]).tolist()


def are_alike(model: torch.nn.Module) -> bool:
    """Return True if the ranks have the same parameters. A collective call."""
    mine = torch.cat([one.detach().flatten() for one in model.parameters()])
    least, most = mine.clone(), mine.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return torch.equal(least, most)
