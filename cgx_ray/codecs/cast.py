"""Codecs that only change the number format."""

from __future__ import annotations

import torch
from torch import Tensor

from cgx_ray.plan import CodecSpec


class _Cast:
    granule = 1
    needs_feedback = False
    wire_dtype: torch.dtype

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec

    def encode(self, grad_N: Tensor, payload: Tensor, key: int) -> None:
        """Round each element to `wire_dtype`, to nearest even. NaN and Inf survive; `key` is not used."""
        payload.view(self.wire_dtype).copy_(grad_N)

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool) -> None:
        values_N = payload.view(self.wire_dtype)
        if add:
            out_N.add_(values_N)
        else:
            out_N.copy_(values_N)


class Raw(_Cast):
    """Codec none: float32 as it is."""

    wire_dtype = torch.float32


class Bf16(_Cast):
    """bfloat16: half the bytes, the range of float32, 8 bits of precision."""

    wire_dtype = torch.bfloat16
