"""QSGD and TernGrad: per quantization bucket a grid, then one level per element.

N elements of a gradient, B quantization buckets, S elements per quantization bucket, W numbers per grid
"""

from __future__ import annotations

import torch
from torch import Tensor

from .bits import bf16_bits, bf16_ceil, bf16_floor, flip_negative, magnitudes, pack_levels, unpack_levels
from .buckets import lane_sum, spread, to_buckets, write
from .hashes import uniform

MAX_MIN, L2, LINF = range(3)  # grids


def qsgd_encode(
    grad_N: Tensor, out: Tensor, *, bits: int, bucket_size: int, grid: int, key: int, stochastic: bool
) -> None:
    """Encode `grad_N`, float32, into `out`: the grids of all quantization buckets, then the packed levels.

    MAX_MIN  a grid from the smallest to the largest element, as in CGX: lo and scale are sent
    L2       a grid around zero, from the Euclidean norm, as in QSGD (Alistarh et al. 2017): the scale alone is sent
    LINF     a grid around zero, from the largest magnitude, as in TernGrad (Wen et al. 2017): the scale alone is sent

    Departure: lo and scale are bfloat16, rounded outwards so that the grid covers the quantization bucket.
    """
    numel = grad_N.numel()
    if numel == 0:
        return
    num_buckets = -(-numel // bucket_size)
    lo_B, scale_B = _make_grids(grad_N, bits, bucket_size, grid)
    words = [bf16_bits(lo_B), bf16_bits(scale_B)] if grid == MAX_MIN else [bf16_bits(scale_B)]
    grid_bytes = grid_bytes_per_bucket(grid) * num_buckets
    out[:grid_bytes] = torch.stack(words, 1).view(-1).view(torch.uint8)

    inverse_B = torch.ones_like(scale_B) / scale_B
    # NaN and Inf fail the comparison. So a scale that is 0, denormal or NaN counts as unusable.
    usable_B = inverse_B < torch.inf
    lo_N, inverse_N, usable_N = (spread(x_B, bucket_size, numel) for x_B in (lo_B, inverse_B, usable_B))
    # On a grid around zero, 0 must be encoded exactly; -lo * inverse can differ from top / 2 by a rounding error.
    t_N = (grad_N - lo_N) * inverse_N if grid == MAX_MIN else grad_N * inverse_N + top_level(bits, grid) // 2
    rounding_N = uniform(numel, key, grad_N.device) if stochastic else torch.full_like(t_N, 0.5)
    level_N = (t_N + rounding_N).floor().clamp(0, top_level(bits, grid))
    # Without a usable scale, a grid around zero sends the level of zero.
    unusable = 0 if grid == MAX_MIN else top_level(bits, grid) // 2
    level_N = torch.where(usable_N, level_N, torch.full_like(level_N, unusable)).to(torch.uint8)
    out[grid_bytes:] = pack_levels(level_N, bits)


def qsgd_decode(payload: Tensor, out_N: Tensor, *, bits: int, bucket_size: int, grid: int, add: bool) -> None:
    """Write `lo + level * scale` to `out_N`, or add it. The float32 product and sum are rounded one by one."""
    numel = out_N.numel()
    if numel == 0:
        return
    num_buckets = -(-numel // bucket_size)
    grid_bytes = grid_bytes_per_bucket(grid) * num_buckets
    # A slice may start at an odd address, which view(int16) refuses.
    grid_BW = payload[:grid_bytes].clone().view(torch.bfloat16).view(num_buckets, -1).to(torch.float32)
    scale_B = grid_BW[:, -1]
    lo_B = grid_BW[:, 0] if grid == MAX_MIN else -(top_level(bits, grid) // 2) * scale_B
    level_N = unpack_levels(payload[grid_bytes:], numel, bits).to(torch.float32)
    write(spread(lo_B, bucket_size, numel) + level_N * spread(scale_B, bucket_size, numel), out_N, add)


def top_level(bits: int, grid: int) -> int:
    """Return the largest level. Grids around zero have an odd number of levels, so that zero is one of them."""
    return (1 << bits) - 1 if grid == MAX_MIN else (1 << bits) - 2


def grid_bytes_per_bucket(grid: int) -> int:
    return 4 if grid == MAX_MIN else 2


def _make_grids(grad_N: Tensor, bits: int, bucket_size: int, grid: int) -> tuple[Tensor, Tensor]:
    """Return (lo, scale) per quantization bucket, float32, exact in bfloat16 where they are sent.

    Both are NaN if an element is not finite or decoding would overflow.
    """
    top = top_level(bits, grid)
    if grid == MAX_MIN:
        # Padding with the last element changes neither min nor max.
        grad_BS = to_buckets(grad_N, bucket_size, fill=grad_N[-1:])
        # Min and max of integers in the order of the floats: they tell -0 from +0 and see every NaN.
        ordered_BS = flip_negative(grad_BS.view(torch.int32))
        min_B = flip_negative(ordered_BS.amin(1)).view(torch.float32)
        max_B = flip_negative(ordered_BS.amax(1)).view(torch.float32)
        lo_B = bf16_floor(min_B)
        top_B = torch.full_like(lo_B, top)  # a tensor: CUDA divides by a scalar through its reciprocal
        scale_B = bf16_ceil((max_B - lo_B) / top_B)
        finite_B = torch.isfinite(max_B - min_B) & torch.isfinite(lo_B + top_B * scale_B)
    else:
        norm_B = _norms(to_buckets(grad_N, bucket_size), grid)
        half_B = torch.full_like(norm_B, top // 2)
        scale_B = bf16_ceil(norm_B / half_B)
        lo_B = -half_B * scale_B
        finite_B = torch.isfinite(norm_B) & torch.isfinite(2 * half_B * scale_B)
    nan_B = torch.full_like(lo_B, torch.nan)
    return torch.where(finite_B, lo_B, nan_B), torch.where(finite_B, scale_B, nan_B)


def _norms(grad_BS: Tensor, grid: int) -> Tensor:
    """Return (B,): the largest magnitude or Euclidean norm per quantization bucket; not finite if an element is not."""
    largest_B = magnitudes(grad_BS).amax(1)
    if grid == LINF:
        return largest_B.view(torch.float32)
    # Scaling by a power of two is exact, and keeps the squares from overflow and underflow.
    exponent_B = (largest_B >> 23).clamp(1, 253)
    down_B, up_B = (254 - exponent_B << 23).view(torch.float32), (exponent_B << 23).view(torch.float32)
    scaled_BS = grad_BS * down_B[:, None]
    return lane_sum(scaled_BS * scaled_BS).sqrt() * up_B
