"""Quantization buckets: cutting a gradient into them, summing over them, and spreading their numbers again.

N elements of a gradient, B quantization buckets, S elements per quantization bucket, R rows of L lanes
"""

from __future__ import annotations

import torch
from torch import Tensor

_NUM_LANES = 32


def add_feedback(grad_N: Tensor, residual_N: Tensor | None) -> Tensor:
    """Return the error-fed gradient, float32: `grad_N` plus the residual, in one float32 addition."""
    grad_N = grad_N.detach().to(torch.float32)
    return grad_N if residual_N is None else grad_N + residual_N


def to_buckets(x_N: Tensor, bucket_size: int, fill: Tensor | None = None) -> Tensor:
    """Return (B, S): `x_N` with the last quantization bucket filled up with `fill`, one element, or else zeros."""
    num_buckets = -(-x_N.numel() // bucket_size)
    rest = num_buckets * bucket_size - x_N.numel()
    return torch.cat([x_N, (x_N.new_zeros(1) if fill is None else fill).expand(rest)]).view(num_buckets, bucket_size)


def spread(x_B: Tensor, bucket_size: int, numel: int) -> Tensor:
    """Return (N,): for each element the number of its quantization bucket."""
    return x_B[:, None].expand(-1, bucket_size).reshape(-1)[:numel]


def lane_sum(x_BS: Tensor) -> Tensor:
    """Return (B,) sums, added in the one order that all implementations keep.

    1. Element i belongs to lane i % 32. Each lane adds its elements in ascending order.
    2. The upper half of the lanes is added to the lower half until one lane is left.
    """
    pad = -x_BS.shape[1] % _NUM_LANES
    x_BRL = torch.nn.functional.pad(x_BS, (0, pad)).view(x_BS.shape[0], -1, _NUM_LANES)
    sum_BL = x_BRL[:, 0].clone()
    for row in range(1, x_BRL.shape[1]):
        sum_BL += x_BRL[:, row]
    while sum_BL.shape[1] > 1:
        half = sum_BL.shape[1] // 2
        sum_BL = sum_BL[:, :half] + sum_BL[:, half:]
    return sum_BL[:, 0]


def write(decoded_N: Tensor, out_N: Tensor, add: bool) -> None:
    """Overwrite `out_N` with `decoded_N`, or add to it."""
    if add:
        out_N += decoded_N
    else:
        out_N.copy_(decoded_N)
