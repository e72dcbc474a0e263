"""Tensors for backend "cgx", and the errors that its codecs may make."""

from __future__ import annotations

import torch


def noise(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


# The largest error of one rounding, relative to the largest magnitude, as in test_schemes.
ERRORS = {
    "qsgd": 2 * (1 + 2**-6) / 15,
    "qsgd:bits=8,bucket_size=64": 2 * (1 + 2**-6) / 255,
    "terngrad": 1 + 2**-7,
    "fp16": 2**-11,
    "bf16": 2**-8,
}
