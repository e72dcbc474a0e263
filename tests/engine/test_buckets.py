"""The sizes of DDP's buckets decide when layers arrive, and nothing else."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from support.branches import Branches, train
from support.ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.step import PendingBucket

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
