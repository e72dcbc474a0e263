"""The specification of every kernel in plain PyTorch, on any device. Arguments are checked in `ops`.

N elements of a gradient, K kept ones, B quantization buckets, S elements of a bucket
"""

from __future__ import annotations

import torch
from torch import Tensor

_UINT32 = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF
_NAN_MAGNITUDE = 0x7F800001
_CRC32C_POLYNOMIAL = 0x82F63B78


def crc32c(data: Tensor, seed: int) -> int:
    """CRC-32C (Castagnoli) of `data`, going on from `seed`, the CRC of what came before."""
    crc = seed ^ _UINT32
    for byte in data.tolist():
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_CRC32C_POLYNOMIAL if crc & 1 else 0)
    return crc ^ _UINT32


def lowbias32(x: Tensor, key: Tensor | None = None) -> Tensor:
    """Mix 32-bit numbers held as int64, with the constants of Chris Wellons' lowbias32.

    `key` enters between the two multiplications: there it makes the sequences of two keys differ by more
    than their order.
    """
    x = (x ^ x >> 16) * 0x7FEB352D & _UINT32
    if key is not None:
        x = x + key & _UINT32
    x = (x ^ x >> 15) * 0x846CA68B & _UINT32
    return x ^ x >> 16


def uniform(numel: int, key: int, device: torch.device) -> Tensor:
    """(N,) float32 in [0, 1): element i is a 16-bit half of the hash of i // 2 under the 32-bit `key`."""
    index_N = torch.arange(numel, dtype=torch.int64, device=device)
    key_1 = torch.tensor([key], dtype=torch.int64, device=device)
    hash_N = lowbias32((index_N >> 1 & _UINT32) ^ key_1, lowbias32(key_1))
    half_N = torch.where(index_N & 1 == 1, hash_N >> 16, hash_N & 0xFFFF)
    return half_N.to(torch.float32) * 2.0**-16


def qsgd_encode(grad_N: Tensor, out: Tensor, bits: int, bucket_size: int, key: int, stochastic: bool) -> None:
    """Encode `grad_N`, float32, into `out`: (lo, scale) of every bucket, then the packed levels.

    QSGD (Alistarh et al. 2017) on a max-min grid, as CGX ships it. Departure: lo and scale are bfloat16,
    rounded outwards so that the grid covers the bucket.
    """
    numel = grad_N.numel()
    if numel == 0:
        return
    num_buckets = -(-numel // bucket_size)
    # The last bucket is filled up with its last element, which changes neither its min nor its max.
    fill = grad_N[-1:].expand(num_buckets * bucket_size - numel)
    grad_BS = torch.cat([grad_N, fill]).view(num_buckets, bucket_size)
    lo_B, scale_B = _make_grids(grad_BS, (1 << bits) - 1)
    grid_B2 = torch.stack([_bf16_bits(lo_B), _bf16_bits(scale_B)], 1)
    out[: 4 * num_buckets] = grid_B2.view(-1).view(torch.uint8)

    inverse_B = torch.ones_like(scale_B) / scale_B
    # NaN and Inf fail the comparison: scale 0, a denormal scale and a NaN bucket send level 0.
    usable_B = inverse_B < torch.inf
    t_N = ((grad_BS - lo_B[:, None]) * inverse_B[:, None]).view(-1)[:numel]
    rounding_N = uniform(numel, key, grad_N.device) if stochastic else torch.full_like(t_N, 0.5)
    level_N = (t_N + rounding_N).floor().clamp(0, (1 << bits) - 1)
    usable_N = usable_B[:, None].expand(-1, bucket_size).reshape(-1)[:numel]
    level_N = torch.where(usable_N, level_N, torch.zeros_like(level_N)).to(torch.uint8)
    out[4 * num_buckets :] = pack_levels(level_N, bits)


def qsgd_decode(payload: Tensor, out_N: Tensor, bits: int, bucket_size: int, add: bool) -> None:
    """Write `lo + level * scale` to `out_N`, or add it: multiply, then add, float32, never fused."""
    numel = out_N.numel()
    if numel == 0:
        return
    num_buckets = -(-numel // bucket_size)
    # A slice may start at an odd address, which view(int16) refuses.
    grid_B2 = payload[: 4 * num_buckets].clone().view(torch.bfloat16).view(num_buckets, 2).to(torch.float32)
    lo_N, scale_N = (grid_B2[:, i, None].expand(-1, bucket_size).reshape(-1)[:numel] for i in (0, 1))
    level_N = unpack_levels(payload[4 * num_buckets :], numel, bits).to(torch.float32)
    decoded_N = lo_N + level_N * scale_N
    if add:
        out_N += decoded_N
    else:
        out_N.copy_(decoded_N)


def topk_select(grad_N: Tensor, index_K: Tensor, value_K: Tensor) -> None:
    """Write the K elements of `grad_N`, float32, that are largest in magnitude, in ascending order of index.

    NaN counts as largest (all NaNs alike), then Inf; of equal magnitudes the lowest indices win.
    """
    magnitude_N = (grad_N.view(torch.int32) & _MAGNITUDE).clamp(max=_NAN_MAGNITUDE)
    order_N = torch.sort(magnitude_N, descending=True, stable=True).indices
    kept_K = order_N[: index_K.numel()].sort().values
    index_K.copy_(kept_K)
    value_K.copy_(grad_N[kept_K])


def pack_levels(level_N: Tensor, bits: int) -> Tensor:
    """Pack uint8 levels: element i at bit i * bits, little-endian, unused bits zero."""
    bit_NW = level_N[:, None] >> torch.arange(bits, dtype=torch.uint8, device=level_N.device) & 1
    bit_M = torch.nn.functional.pad(bit_NW.view(-1), (0, -bit_NW.numel() % 8))
    shift_8 = torch.arange(8, dtype=torch.uint8, device=level_N.device)
    return (bit_M.view(-1, 8) << shift_8).sum(1, dtype=torch.uint8)


def unpack_levels(packed: Tensor, numel: int, bits: int) -> Tensor:
    """Undo `pack_levels`."""
    shift_8 = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bit_NW = (packed[:, None] >> shift_8 & 1).view(-1)[: numel * bits].view(numel, bits)
    return (bit_NW << shift_8[:bits]).sum(1, dtype=torch.uint8)


def _make_grids(grad_BS: Tensor, top_level: int) -> tuple[Tensor, Tensor]:
    """(lo, scale) of every bucket, float32 but exact in bfloat16; both NaN if decoding would overflow."""
    # As integers in the order of the floats, min and max are exact also for -0 against +0 and see every NaN.
    ordered_BS = _flip_negative(grad_BS.view(torch.int32))
    min_B = _flip_negative(ordered_BS.amin(1)).view(torch.float32)
    max_B = _flip_negative(ordered_BS.amax(1)).view(torch.float32)
    lo_B = _bf16_floor(min_B)
    top_level_B = torch.full_like(lo_B, top_level)  # a tensor: CUDA divides by a scalar through its reciprocal
    scale_B = _bf16_ceil((max_B - lo_B) / top_level_B)
    finite_B = torch.isfinite(max_B - min_B) & torch.isfinite(lo_B + top_level_B * scale_B)
    nan_B = torch.full_like(lo_B, torch.nan)
    return torch.where(finite_B, lo_B, nan_B), torch.where(finite_B, scale_B, nan_B)


def _flip_negative(bits: Tensor) -> Tensor:
    return bits ^ (bits >> 31 & _MAGNITUDE)


def _bf16_floor(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    return (bits + (bits >> 31 & 0xFFFF) & ~0xFFFF).view(torch.float32)


def _bf16_ceil(x: Tensor) -> Tensor:
    """Round up. `x` >= +0."""
    return (x.view(torch.int32) + 0xFFFF & ~0xFFFF).view(torch.float32)


def _bf16_bits(x: Tensor) -> Tensor:
    """(B,) int16 bits of float32 numbers that are exact in bfloat16."""
    return (x.view(torch.int32) >> 16).to(torch.int16)
