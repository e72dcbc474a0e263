"""Every tested pair of codec and scheme, averages of given gradients with them, and all codecs on the same ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.codecs import make_codec
from cgx_ray.codecs.codec import KINDS
from cgx_ray.plan import CODECS_OF_SCHEME, CodecSpec, Scheme
from support.ranks import run_ranks

# Specs for tests of codecs that are not tested with their defaults.
TEXTS = {name: f"{name}:density=0.05" for name in ("topk", "lwtopk", "mstopk", "dgc", "sidco", "randomk")}
# AR-Topk sums values in the same way whichever codec selects: topk is tested with all AR-Topk schemes, others with one.
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
    """A model whose layers get the arguments of `forward` as gradients."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in shapes])

    def forward(self, *gradients: torch.Tensor) -> torch.Tensor:
        return sum((layer * grad).sum() for layer, grad in zip(self.layers, gradients, strict=True))


def noise(rank: int, *shapes: tuple[int, ...], step: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def run_codecs(
    world_size: int, function: Callable[[int, str, str], Any], pairs: list[tuple[str, str]], scheme: str
) -> dict[str, list[Any]]:
    """Return the results of `function(rank, codec, scheme)` by codec and rank, for the pairs with this scheme.

    The codecs share the processes of the ranks, which take longer to start than to try one codec.
    """
    codecs = [codec for codec, other in pairs if other == scheme]
    results = run_ranks(world_size, _each_codec, function, codecs, scheme)
    return dict(zip(codecs, zip(*results, strict=True), strict=True))


def _each_codec(rank: int, function: Callable[[int, str, str], Any], codecs: list[str], scheme: str) -> list[Any]:
    return [function(rank, codec, scheme) for codec in codecs]


UNBIASED = [(codec, scheme) for codec, scheme in PAIRS if not make_codec(CodecSpec.parse(codec)).needs_feedback]
FED_BACK = [pair for pair in PAIRS if pair not in UNBIASED]


def averages(
    codec: str, scheme: str, steps: list[list[torch.Tensor]], *, one_group: bool = True
) -> tuple[list[torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Return the flat averages of `steps`' gradients, and this rank's memory at the end.

    one_group  all layers in one group; else each in its own
    """
    model = DistributedDataParallel(Given(*(grad.shape for grad in steps[0])))
    names = [layer.name for layer in cgx_ray.layers_of(model)]
    groups = tuple(
        cgx_ray.GroupPlan(layers=layers, option=cgx_ray.Option(codec=CodecSpec.parse(codec), scheme=Scheme(scheme)))
        for layers in ([tuple(names)] if one_group else [(name,) for name in names])
    )
    attachment = cgx_ray.attach(model, plan=cgx_ray.Plan(version=0, world_size=dist.get_world_size(), groups=groups))
    results = []
    for gradients in steps:
        model.zero_grad()
        model(*gradients).backward()
        results.append(torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None]))
    state = attachment.state_dict()
    attachment.close()
    return results, {kind: state[kind] for kind in KINDS}


SHAPES = ((60, 50), (7, 30))
