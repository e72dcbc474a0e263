"""The sizes of DDP's buckets decide when layers arrive, and nothing else."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from support.branches import Branches, train
from support.device.counted_memory import CountedMemory
from support.ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.step import PendingBucket
from cgx_ray.torch_compat import bucket_parameters

SIZES: list[dict[str, object]] = [
    {},
    {"bucket_cap_mb": 0.01},
    {"bucket_cap_mb_list": [0.001, 0.02, 0.01]},
    {"bucket_cap_mb_list": [0.001, 0.02], "gradient_as_bucket_view": True},
]


def _train(rank: int, codec: str, scheme: str) -> list[tuple[list[str], int]]:
    """Return for each of SIZES the weights by step, and the number of buckets in the last step."""
    outcomes = []
    for sizes in SIZES:
        model = DistributedDataParallel(Branches(), **sizes)
        plan = cgx_ray.make_plan(
            cgx_ray.layers_of(model), version=0, world_size=2, codec=codec, scheme=scheme, group_bytes=1 << 14
        )
        attachment = cgx_ray.attach(model, plan=plan)
        hashes = train(model, rank, range(4))
        with patch.object(Engine, "submit", autospec=True, side_effect=Engine.submit) as submit:
            hashes += train(model, rank, range(4, 5))
        # Most gradients come before their buckets.
        num_buckets = sum(isinstance(call.args[1], PendingBucket) for call in submit.call_args_list)
        outcomes.append((hashes, num_buckets))
        attachment.close()
    return outcomes


@pytest.mark.parametrize(
    ("codec", "scheme"), [("none", "dense"), ("qsgd", "sra"), ("topk:density=0.05", "artopk_ring_auto")]
)
def test_the_sizes_of_ddps_buckets_change_no_bit(codec: str, scheme: str) -> None:
    first, other = run_ranks(2, _train, codec, scheme)
    assert first == other
    for hashes, _ in first:
        assert hashes == first[0][0]
    num_buckets = [num for _, num in first]
    assert num_buckets[0] == 1 < min(num_buckets[1:]), f"the sizes were not used: {num_buckets}"


def _dense_groups_and_buckets(rank: int, codec: str) -> tuple[list[int], list[int]]:
    """Return the number of layers in each group and in each bucket that DDP has rebuilt."""
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), bucket_cap_mb=0.03)
    attachment = cgx_ray.attach(model, codec=codec)
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
    assert attachment.plan is not None
    groups = [len(group.layers) for group in attachment.plan.groups]
    buckets = [len(parameters) for parameters in bucket_parameters(model)]
    attachment.close()
    return groups, buckets


def test_dense_groups_are_ddps_buckets_where_those_are_smaller_than_25_mib() -> None:
    for groups, buckets in run_ranks(2, _dense_groups_and_buckets, "none"):
        assert groups == buckets == [4, 4, 4]
    assert run_ranks(2, _dense_groups_and_buckets, "qsgd")[0][0] == [6, 6]


def _bytes_to_list_buckets(rank: int) -> tuple[int, int]:
    """Return the number of buckets, and the bytes that are taken to find what is in them."""
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), bucket_cap_mb=0.03)
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
    with CountedMemory() as counted:
        buckets = bucket_parameters(model)
    assert {parameter for bucket in buckets for parameter in bucket} == set(model.parameters())
    return len(buckets), counted.num_bytes


def test_to_list_what_is_in_buckets_takes_no_memory_for_gradients() -> None:
    for num_buckets, num_bytes in run_ranks(2, _bytes_to_list_buckets):
        assert (num_buckets, num_bytes) == (3, 3 * 4)


class _WithEmpty(Branches):
    """The same model with parameters that have no elements. One is used first, so its gradient comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.tail = nn.ParameterList([torch.empty(0), torch.empty(3, 0)])

    def forward(self, x_BD: torch.Tensor, use_right: bool = True) -> torch.Tensor:
        used = self.tail if use_right else []
        return super().forward(x_BD + self.empty.sum(), use_right) + sum(parameter.sum() for parameter in used)


def _train_empty(rank: int, codec: str, ddp: dict[str, object], use_right: bool) -> list[list[str]]:
    """Return the weights by step, without and with empty parameters."""
    outcomes = []
    for make_model in (Branches, _WithEmpty):
        model = DistributedDataParallel(make_model(), **ddp)
        attachment = cgx_ray.attach(model, codec=codec)
        hashes = train(model, rank, range(3))
        # What the model leaves out, DDP must look for.
        hashes += train(model, rank, range(3, 5), use_right=use_right)
        outcomes.append(hashes)
        assert attachment.plan is not None
        planned = {name for group in attachment.plan.groups for name in group.layers}
        assert planned == {name for name, parameter in model.module.named_parameters() if parameter.numel() > 0}
        attachment.load_state_dict(attachment.state_dict())
        attachment.close()
    return outcomes


EMPTY_CASES: list[tuple[dict[str, object], bool]] = [
    ({}, True),
    # Buckets of one layer each, so the last one has no elements.
    ({"bucket_cap_mb": 1e-6}, True),
    ({"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-6}, True),
    ({"find_unused_parameters": True}, False),
    ({"find_unused_parameters": True, "bucket_cap_mb": 1e-6}, False),
    ({"static_graph": True, "bucket_cap_mb": 1e-6}, True),
]


# In `make test` one codec meets every kind of DDP, and every codec the last bucket without elements.
@pytest.mark.parametrize(
    ("codec", "ddp", "use_right"),
    [
        pytest.param(codec, *case, marks=[] if codec == "qsgd" or case is EMPTY_CASES[1] else pytest.mark.slow)
        for codec in ("none", "qsgd", "topk:density=0.05", "powersgd")
        for case in EMPTY_CASES
    ],
)
def test_a_parameter_without_elements_changes_nothing(codec: str, ddp: dict[str, object], use_right: bool) -> None:
    first, other = run_ranks(2, _train_empty, codec, ddp, use_right)
    assert first == other
    assert first[0] == first[1]
