"""Loss after training with every codec, against dense training on the same data, steps and learning rate."""

from __future__ import annotations

import pytest
import torch
from support.branches import Branches
from support.ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import cgx_ray
from cgx_ray.plan import BUILT_IN, CodecSpec

NUM_STEPS = 150
BATCH_SIZE = 16
# Largest allowed ratio of the loss to that of dense training, by codec and scheme. 13 thousand parameters train for 150
# steps only, so the density is 5 % where the default is 1 %. Measured ratios at this seed: 1.00 for casts, 1.00 to 1.02
# for qsgd, the signs and the selections, 1.15 for terngrad, 1.20 for randomk, 1.04 for powersgd, 1.20 and 1.21 for dgc.
LIMITS = {
    ("fp16", "allreduce"): 1.01,
    ("bf16", "sra"): 1.01,
    ("bf16", "broadcast"): 1.01,
    ("qsgd", "sra"): 1.05,
    ("qsgd", "ring"): 1.05,
    ("qsgd", "tree"): 1.05,
    ("qsgd:bits=2,rounding=nearest", "sra"): 1.05,
    ("qsgd:grid=l2", "allgather"): 1.1,
    ("terngrad", "sra"): 1.3,
    ("topk:density=0.05", "allgather"): 1.05,
    ("topk:density=0.05", "artopk_ring"): 1.1,
    ("topk:density=0.05", "artopk_tree_var"): 1.1,
    ("topk:density=0.05", "artopk_tree_auto"): 1.1,
    ("topk:density=0.05,value_bits=4", "allgather"): 1.05,
    ("lwtopk:density=0.05", "allgather"): 1.05,
    ("mstopk:density=0.05", "allgather"): 1.05,
    ("sidco:density=0.05", "allgather"): 1.05,
    ("dgc:density=0.05", "allgather"): 1.5,
    ("dgc:density=0.05,warmup_steps=40", "artopk_ring"): 1.5,
    ("randomk:density=0.05", "allreduce"): 1.4,
    ("ef_signsgd", "sra"): 1.05,
    ("ef_signsgd", "ring"): 1.05,
    ("onebit", "tree"): 1.05,
    ("onebit", "broadcast"): 1.05,
    ("onebit", "allgather"): 1.05,
    ("powersgd", "allreduce"): 1.1,
}


# For `make test`: each codec once, and what artopk does to one. Of pairs that differ by their scheme alone, other tests
# show that the averages are the same.
FEW = [
    ("fp16", "allreduce"),
    ("bf16", "sra"),
    ("qsgd", "tree"),
    ("terngrad", "sra"),
    ("topk:density=0.05", "artopk_tree_auto"),
    ("topk:density=0.05,value_bits=4", "allgather"),
    ("lwtopk:density=0.05", "allgather"),
    ("mstopk:density=0.05", "allgather"),
    ("sidco:density=0.05", "allgather"),
    ("dgc:density=0.05,warmup_steps=40", "artopk_ring"),
    ("randomk:density=0.05", "allreduce"),
    ("ef_signsgd", "ring"),
    ("onebit", "sra"),
    ("powersgd", "allreduce"),
]


def _losses(rank: int, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], float]:
    """Return the loss on fresh data after training, by codec and scheme."""
    target = torch.randn(33, 33, generator=torch.Generator().manual_seed(5)) / 33**0.5
    fresh_BD = torch.randn(256, 33, generator=torch.Generator().manual_seed(6))
    losses = {}
    for codec, scheme in [("none", "dense"), ("prefix:ratio=2", "allreduce"), *pairs]:
        model = DistributedDataParallel(Branches())
        attachment = cgx_ray.attach(model, codec=codec, scheme=scheme)
        # Elements that dgc sends rarely move up to ten times as far, because dgc has its own momentum.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3 * (0.2 if codec.startswith("dgc") else 1))
        for step in range(NUM_STEPS):
            x_BD = torch.randn(BATCH_SIZE, 33, generator=torch.Generator().manual_seed(1000 * rank + step))
            optimizer.zero_grad()
            (model(x_BD) - x_BD @ target).square().mean().backward()
            optimizer.step()
        attachment.close()
        with torch.no_grad():
            losses[codec, scheme] = float((model.module(fresh_BD) - fresh_BD @ target).square().mean())
    return losses


@pytest.mark.parametrize("pairs", [FEW, pytest.param([*LIMITS], marks=pytest.mark.slow)], ids=["once", "all pairs"])
def test_every_codec_trains_about_as_well_as_dense(pairs: list[tuple[str, str]]) -> None:
    losses, others = run_ranks(2, _losses, pairs)
    assert losses == others
    dense = losses.pop(("none", "dense"))
    assert dense < 0.1, f"dense training came to {dense}; guessing zero has a loss of 1"
    ratios = {f"{codec} over {scheme}": loss / dense for (codec, scheme), loss in losses.items()}
    # prefix never trains half of every group, so its loss must be high.
    assert ratios.pop("prefix:ratio=2 over allreduce") > 1.4
    too_high = {
        f"{codec} over {scheme}": (ratios[f"{codec} over {scheme}"], limit)
        for (codec, scheme), limit in LIMITS.items()
        if (codec, scheme) in pairs and ratios[f"{codec} over {scheme}"] > limit
    }
    assert not too_high, too_high
    assert {CodecSpec.parse(codec).name for codec, _ in losses} | {"none"} == set(BUILT_IN)
