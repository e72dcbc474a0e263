"""Every pair of codec and scheme that is tested, and gradients to exchange with it."""

from __future__ import annotations

import torch
from torch import nn

from cgx_ray.plan import CODECS_OF_SCHEME, Scheme

# What a codec is tested with, where that is not its defaults.
TEXTS = {name: f"{name}:density=0.05" for name in ("topk", "lwtopk", "mstopk", "dgc", "sidco", "randomk")}
# How AR-Topk sums values has nothing to do with how indices were selected: topk goes over all of them, others over one.
PAIRS = [
    (TEXTS.get(name, name), str(scheme))
    for scheme, names in CODECS_OF_SCHEME.items()
    for name in sorted(names)
    if name == "topk" or not scheme.is_artopk or scheme is Scheme.ARTOPK_RING
]
PAIRS += [
    ("qsgd:bits=8,bucket_size=64,grid=l2", "sra"),
    *(("qsgd:bits=3,rounding=nearest", scheme) for scheme in ("sra", "ring", "tree", "broadcast")),
    ("qsgd:bits=3,grid=linf,rounding=nearest", "allgather"),
    ("topk:density=0.05,value_bits=4", "allgather"),
    ("dgc:density=0.05,value_bits=16,clip=0.1,warmup_steps=8", "allgather"),
    ("dgc:density=0.05,warmup_steps=8", "artopk_ring"),
]


class Given(nn.Module):
    """Two layers whose gradients are what `forward` gets."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, *gradients: torch.Tensor) -> torch.Tensor:
        return sum((layer * grad).sum() for layer, grad in zip(self.layers, gradients, strict=True))


def noise(rank: int, *shapes: tuple[int, ...], step: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(shape, generator=generator) for shape in shapes]
