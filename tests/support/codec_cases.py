"""Codecs for parametrized tests, and short functions to encode and decode with them."""

from __future__ import annotations

import torch

from cgx_ray.codecs import Codec, Memory, make_codec
from cgx_ray.plan import CodecSpec

SPARSE = ("topk", "lwtopk", "mstopk", "dgc", "sidco")
TEXTS = [
    "none",
    "fp16",
    "bf16",
    "prefix:ratio=3",
    "qsgd",
    "qsgd:bits=1,bucket_size=8",
    "qsgd:bits=8,bucket_size=64,grid=l2",
    "qsgd:bits=3,grid=linf,rounding=nearest",
    "qsgd:rounding=nearest",
    "terngrad",
    *(f"{name}:density=0.05" for name in SPARSE),
    *(f"topk:density=0.1,value_bits={bits}" for bits in (16, 8, 4)),
    "dgc:density=0.1,momentum=0.5,clip=10,value_bits=8",
    "randomk:density=0.1",
    "ef_signsgd:bucket_size=64",
    "onebit",
    "powersgd:rank=2",
]
SPECS = [CodecSpec.parse(text) for text in TEXTS]
FED_BACK = [spec for spec in SPECS if make_codec(spec).needs_feedback]
KEY = 7


def noise(numel: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def encoded(codec: Codec, grad_N: torch.Tensor, key: int = KEY, memory: Memory | None = None) -> torch.Tensor:
    payload = torch.full((codec.payload_bytes(grad_N.numel()),), 0xEE, dtype=torch.uint8)
    codec.encode(grad_N, payload, key, memory)
    return payload


def decoded(codec: Codec, payload: torch.Tensor, numel: int, key: int = KEY) -> torch.Tensor:
    out_N = torch.full((numel,), 3.0)
    codec.decode(payload, out_N, add=False, key=key)
    return out_N
