"""A step counts as finite by the gradients that the model gets: float16 has Inf where float32 has numbers."""

from __future__ import annotations

import pytest
import torch
from support.ranks import run_ranks
from support.sharded import gradients_of, make_mesh
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import cgx_ray

NEAREST = "qsgd:bits=2,rounding=nearest"


def inputs_near_the_limit() -> torch.Tensor:
    """Return a gradient whose largest element is float16's largest number; qsgd rounds it to 65536, Inf in float16."""
    x_1D = 1000 * torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    x_1D[0, 7] = torch.finfo(torch.float16).max
    return x_1D.half()


def _overflow(rank: int, codec: str, scheme: str) -> tuple[bool, bool]:
    """Return whether the float16 model got a finite gradient, and whether the residual has changed."""
    layer = nn.Linear(50, 40, bias=False).half()
    model = DistributedDataParallel(layer)
    attachment = cgx_ray.attach(model, codec=codec, scheme=scheme)
    x_1D = inputs_near_the_limit()
    # The elements that a sparse codec leaves out of one step exceed float16 when it sends them in a later step.
    for _ in range(40):
        before = attachment.state_dict()["residuals"]["weight"]
        layer.weight.grad = None
        model(x_1D).sum().backward()
        assert layer.weight.grad is not None
        is_finite = bool(layer.weight.grad.isfinite().all())
        after = attachment.state_dict()["residuals"]["weight"]
        if not is_finite:
            break
    attachment.close()
    return is_finite, not torch.equal(before, after)


@pytest.mark.fault("residuals overflow float16", "GradScaler skips the step; no residual changes")
@pytest.mark.parametrize(
    ("codec", "scheme"), [("topk:density=0.01", "allgather"), (NEAREST, "sra"), ("randomk:density=0.2", "allreduce")]
)
def test_a_step_that_overflows_the_models_float16_is_not_remembered(codec: str, scheme: str) -> None:
    assert run_ranks(2, _overflow, codec, scheme) == [(False, False)] * 2


def _sharded_overflow(rank: int, num_replicas: int, reduce_dtype: torch.dtype | None) -> tuple[bool, bool]:
    layer = nn.Linear(50, 40, bias=False).half()
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    model = fully_shard(layer, mesh=make_mesh(num_replicas), mp_policy=policy)
    attachment = cgx_ray.attach(model, codec="onebit")
    # One of 50 elements is large. Messages hold means, so the residual of that element grows, and the means with it.
    x_1D = torch.zeros(1, 50)
    x_1D[0, 7] = 60000.0
    for _ in range(200):
        before = attachment.state_dict()["residuals"]["weight"]
        model.zero_grad()
        model(x_1D.half()).sum().backward()
        is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients_of(model).values())
        after = attachment.state_dict()["residuals"]["weight"]
        if not is_finite:
            break
    attachment.close()
    return is_finite, not torch.equal(before, after)


@pytest.mark.parametrize(
    ("num_ranks", "num_replicas", "reduce_dtype"), [(3, 1, torch.float32), (3, 1, None), (4, 2, None)]
)
def test_a_step_that_overflows_a_shards_float16_is_not_remembered(
    num_ranks: int, num_replicas: int, reduce_dtype: torch.dtype | None
) -> None:
    outcomes = run_ranks(num_ranks, _sharded_overflow, num_replicas, reduce_dtype)
    assert outcomes == [(False, False)] * num_ranks
