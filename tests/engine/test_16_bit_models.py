"""Models with 16-bit gradients get the averages that float32 models get, rounded once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.scheme_cases import Given, noise
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.plan import CodecSpec, GroupPlan, Option, Plan, Scheme

# By group: its layers, its option of the first plan, and that of the second. Layers 0 and 8 are not neighbours in
# DDP's bucket. The residuals that onebit leaves are sent in the second plan.
GROUPS = (
    ((1,), ("qsgd:bits=4,bucket_size=64", "sra"), ("qsgd", "sra")),
    ((2,), ("onebit", "sra"), ("terngrad", "allgather")),
    ((3, 4), ("onebit", "sra"), ("qsgd", "sra")),
    ((5,), ("bf16", "sra"), ("fp16", "allgather")),
    ((6,), ("fp16", "allreduce"), ("bf16", "allreduce")),
    ((7,), ("terngrad", "sra"), ("onebit", "allgather")),
    ((8, 0), ("qsgd", "allgather"), ("bf16", "ring")),
)
SHAPES = ((60, 50), (33, 7), (1,), (127, 3), (64, 64), (2001,), (500, 5), (77, 20), (31, 31))


def _plan(version: int) -> Plan:
    groups = tuple(
        GroupPlan(
            layers=tuple(f"layers.{number}" for number in numbers),
            option=Option(codec=CodecSpec.parse(options[version][0]), scheme=Scheme(options[version][1])),
        )
        for numbers, *options in GROUPS
    )
    return Plan(version=version, world_size=dist.get_world_size(), groups=groups)


def _gradients(rank: int, step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    gradients = [grad.to(dtype) for grad in noise(rank, *SHAPES, step=step)]
    if rank == 1:
        # The smallest positive number of the type, which is denormal.
        gradients[5][:9] = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    if step == 4:
        gradients[1][3, 3], gradients[5][-1] = torch.nan, torch.inf
    return gradients


def _averages(rank: int, dtype: torch.dtype, is_wide: bool) -> list[list[torch.Tensor]]:
    """Return by step and layer what the model gets, as `dtype`; `is_wide`: from float32 copies of the gradients."""
    module = Given(*SHAPES)
    for layer in module.layers:
        layer.data = layer.data.to(torch.float32 if is_wide else dtype)
    model = DistributedDataParallel(module)
    attachment = cgx_ray.attach(model, plan=_plan(0))
    averages = []
    for step in range(6):
        if step == 2:
            attachment.hold(_plan(1))
        model.zero_grad()
        grads = _gradients(rank, step, dtype)
        model(*[grad.to(layer.dtype) for grad, layer in zip(grads, module.layers, strict=True)]).backward()
        averages.append([layer.grad.to(dtype) for layer in module.layers if layer.grad is not None])
    assert attachment.last_step is not None
    assert attachment.last_step.plan_version == 1
    attachment.close()
    return averages


@pytest.mark.parametrize(("world_size", "dtype"), [(2, torch.bfloat16), (3, torch.float16), (4, torch.bfloat16)])
def test_groups_side_by_side_have_the_bits_of_float32_rounded_once(world_size: int, dtype: torch.dtype) -> None:
    narrow, wide = (run_ranks(world_size, _averages, dtype, is_wide) for is_wide in (False, True))
    for rank in range(world_size):
        for step, (given, expected) in enumerate(zip(narrow[rank], wide[rank], strict=True)):
            assert len(given) == len(SHAPES)
            for number, (average, wanted) in enumerate(zip(given, expected, strict=True)):
                same = average.isnan() & wanted.isnan() | (average == wanted)
                assert same.all(), f"rank {rank}, step {step}, layer {number}: {average[~same]} != {wanted[~same]}"
            for average, of_first in zip(given, narrow[0][step], strict=True):
                assert torch.equal(average.view(torch.int16), of_first.view(torch.int16)), (
                    f"ranks 0 and {rank} differ in step {step}"
                )
