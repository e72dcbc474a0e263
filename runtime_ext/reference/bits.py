"""Float32 numbers as bit patterns: order, rounding to bfloat16, and packing of small integers."""

from __future__ import annotations

import torch
from torch import Tensor

INF_MAGNITUDE = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF
_NAN_MAGNITUDE = 0x7F800001


def magnitudes(grad_N: Tensor) -> Tensor:
    """Return (N,) int32 in the order of |x|. NaN is the largest (all NaNs are equal), then Inf."""
    return (grad_N.view(torch.int32) & _MAGNITUDE).clamp(max=_NAN_MAGNITUDE)


def flip_negative(bits: Tensor) -> Tensor:
    """Map the bits of floats to int32 in the order of the floats. Applied twice, this gives the bits back."""
    return bits ^ (bits >> 31 & _MAGNITUDE)


def bf16_floor(x: Tensor) -> Tensor:
    """Round float32 down to bfloat16; the result is float32."""
    bits = x.view(torch.int32)
    return (bits + (bits >> 31 & 0xFFFF) & ~0xFFFF).view(torch.float32)


def bf16_ceil(x: Tensor) -> Tensor:
    """Round float32 up to bfloat16, for `x` >= +0; the result is float32."""
    return (x.view(torch.int32) + 0xFFFF & ~0xFFFF).view(torch.float32)


def bf16_bits(x: Tensor) -> Tensor:
    """Return the int16 bits of float32 numbers that are exact in bfloat16."""
    return (x.view(torch.int32) >> 16).to(torch.int16)


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
