"""A model, trained with a GradScaler, whose applied and owed gradients can be compared with the true ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray

ROWS, COLUMNS = 40, 60


FED_BACK = [
    ("topk:density=0.05", "allgather"),
    ("topk:density=0.05", "artopk_ring"),
    ("topk:density=0.05,value_bits=8", "allgather"),
    ("lwtopk:density=0.05", "allgather"),
    ("randomk:density=0.05", "allreduce"),
    ("powersgd:rank=2", "allreduce"),
    ("ef_signsgd", "sra"),
    ("onebit", "ring"),
    ("qsgd:bits=2,rounding=nearest", "sra"),
]


Run = dict[str, Any]


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, COLUMNS, generator=torch.Generator().manual_seed(100 * rank + step))


class Trainer:
    """A layer whose gradient does not depend on its weight, and a GradScaler whose scale is set at every step.

    applied    sum of the averages that the model got
    true       sum of this rank's gradients
    delivered  the averages, step by step
    """

    def __init__(self, rank: int, codec: str, scheme: str, **arguments: Any) -> None:
        self.rank = rank
        self.layer = nn.Linear(COLUMNS, ROWS, bias=False)
        self.model = DistributedDataParallel(self.layer)
        self.attachment = cgx_ray.attach(self.model, codec=codec, scheme=scheme, **arguments)
        # Created after attach, to show that the order does not matter.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        self.applied = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
        self.true = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
        self.delivered: list[torch.Tensor] = []

    def loss(self, step: int) -> torch.Tensor:
        x_BD = inputs(self.rank, step)
        gain_BO = torch.randn(8, ROWS, generator=torch.Generator().manual_seed(7 + 100 * self.rank + step))
        self.true += gain_BO.double().T @ x_BD.double()
        product: torch.Tensor = (self.model(x_BD) * gain_BO).sum()
        return product

    def step(self, step: int, scale: float) -> None:
        self.scaler.scale(torch.zeros(()))  # creates the scale's tensor, which update() needs
        self.scaler.update(scale)
        self.scaler.scale(self.loss(step)).backward()
        self.take(scale)

    def take(self, scale: float) -> None:
        assert self.layer.weight.grad is not None
        self.delivered.append(self.layer.weight.grad / scale)
        self.applied += self.delivered[-1]
        self.layer.weight.grad = None

    def result(self, scale: float) -> Run:
        state = self.attachment.state_dict()
        owed = sum(state["residuals"].values(), torch.zeros(ROWS * COLUMNS))
        self.attachment.close()
        return {
            "delivered": self.delivered,
            "applied": self.applied,
            "true": self.true,
            "owed": owed.double().view(ROWS, COLUMNS) / state.get("loss_scale", scale),
        }


def relative_error(results: list[Run]) -> float:
    """Return |applied + mean residual - mean of the true sums| / |mean of the true sums|."""
    assert all(torch.equal(result["applied"], results[0]["applied"]) for result in results)
    owed, true = (torch.stack([result[name] for result in results]).mean(0) for name in ("owed", "true"))
    return float((results[0]["applied"] + owed - true).norm() / true.norm())


# Relative rounding errors of 8 sums in float32, with a few roundings in each encoding.
MAX_ERROR = 1e-5
