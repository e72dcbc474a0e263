"""The sizes of DDP's buckets decide when layers arrive, and nothing else."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from support.branches import Branches, train
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
