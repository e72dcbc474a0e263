"""Passes over a whole gradient that select nothing."""

from __future__ import annotations

import torch
from torch import Tensor


def add_momentum(
    grad_N: Tensor,
    momentum_N: Tensor,
    residual_N: Tensor | None,
    next_momentum_N: Tensor,
    next_N: Tensor,
    factor: float,
    scale: Tensor | float,
) -> None:
    """Write factor * momentum + scale * gradient to `next_momentum_N`, and that plus the residual to `next_N`."""
    torch.mul(momentum_N, factor, out=next_momentum_N)
    next_momentum_N.add_(grad_N * scale)
    if residual_N is None:
        next_N.copy_(next_momentum_N)
    else:
        torch.add(next_momentum_N, residual_N, out=next_N)


def poison(grad_N: Tensor) -> Tensor:
    """Return 0 if all elements are finite, else NaN, in a float32 tensor of one element. -0 counts as 0."""
    if grad_N.numel() == 0:
        return grad_N.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(grad_N)
    return (low * 0 + high * 0).float()
