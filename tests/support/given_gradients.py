"""A model whose gradients are given, so it is known by layer what an uncompressed training applies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from cgx_ray.session.attachment import Attachment


class Given(nn.Module):
    """Layers whose gradients are given in the forward pass; None leaves a layer out. They begin with zeros."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, gradients: Sequence[torch.Tensor | None]) -> torch.Tensor:
        pairs = zip(self.weights, gradients, strict=True)
        return torch.stack([(weight * given).sum() for weight, given in pairs if given is not None]).sum()


class GivenParts(nn.Module):
    """Layers whose gradients are the parts of the input, bit for bit."""

    def __init__(self, numels: Sequence[int]) -> None:
        super().__init__()
        self.numels = list(numels)
        self.parts = nn.ModuleList(nn.Linear(numel, 1, bias=False) for numel in numels)

    def forward(self, x_1N: torch.Tensor) -> torch.Tensor:
        values = [part(x_1M) for part, x_1M in zip(self.parts, x_1N.split(self.numels, 1), strict=True)]
        return torch.stack(values).sum()


def errors_at_end(
    attachment: Attachment, model: Given, true: Sequence[torch.Tensor], loss_scale: float | None = None
) -> list[float]:
    """Return by layer |applied + mean residual - mean of what is true| / |the latter|, and close.

    true        by layer, this rank's sum of the gradients that SGD should have applied, at a learning rate of 1
    loss_scale  of the residuals; that of the state if it is left out
    """
    state = attachment.state_dict()
    attachment.close()
    world_size, found = dist.get_world_size(), []
    for place, (weight, sum_true) in enumerate(zip(model.weights, true, strict=True)):
        owed = state["residuals"].get(f"weights.{place}", torch.zeros(weight.numel()))
        owed = owed.double().view(weight.shape) / (loss_scale or state["loss_scale"])
        for summed in (owed, sum_true):
            dist.all_reduce(summed)
        difference = (owed - sum_true) / world_size - weight.detach().double()
        found.append(float(difference.norm() / (sum_true.norm() / world_size).clamp(min=1e-9)))
    return found
