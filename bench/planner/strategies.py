"""Common ways to group layers, to compare with: whole model, layer-wise, buckets, even splits, and those of papers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from cgx_ray.planner.papers.bytecomp import bytecomp
from cgx_ray.planner.papers.cupcake import cupcake
from cgx_ray.planner.pipeline import GroupEnd, Groups, Pipeline

# 25 MB of float32.
DDP_BUCKET_NUMEL = 25 * (1 << 20) // 4
# Cupcake, section 5.3: thresholds of 2 to 64 MB, 2 to 32 groups, the best of each.
BUCKET_NUMELS = tuple((1 << 20) * megabytes // 4 for megabytes in (2, 4, 8, 16, 32, 64))
NUM_EVEN_GROUPS = range(2, 33)
# Partial groupings, about a second for 314 layers: Cupcake's search is tried with every option of every model.
CUPCAKE_NODES = 5_000


def whole_model(pipeline: Pipeline, option: int) -> Groups:
    """Return one group."""
    return (GroupEnd(pipeline.num_layers, option),)


def layer_wise(pipeline: Pipeline, option: int) -> Groups:
    """Return one group per layer."""
    return tuple(GroupEnd(end, option) for end in range(1, pipeline.num_layers + 1))


def buckets(pipeline: Pipeline, option: int, numel: int = DDP_BUCKET_NUMEL) -> Groups:
    """Return groups that end as soon as they reach `numel` elements, by default DDP's 25 MB."""
    ends, filled = [], 0
    for end, layer_numel in enumerate(pipeline.numel, start=1):
        filled += layer_numel
        if filled >= numel or end == pipeline.num_layers:
            ends.append(end)
            filled = 0
    return tuple(GroupEnd(end, option) for end in ends)


def even_split(pipeline: Pipeline, option: int, num_groups: int) -> Groups:
    """Return groups of nearly the same number of layers; one group per layer if there are fewer layers."""
    num_groups = min(num_groups, pipeline.num_layers)
    return tuple(GroupEnd(pipeline.num_layers * (index + 1) // num_groups, option) for index in range(num_groups))


def named_strategies(
    pipeline: Pipeline, *, dense: int, compressing: Sequence[int], offloaded: Mapping[int, int]
) -> dict[str, Groups]:
    """Return the groups of each strategy, with its best option, bucket size and number of groups.

    `dense`, `compressing` and `offloaded` are for `bytecomp`; other strategies try all options of the pipeline.
    """
    options = range(len(pipeline.costs))

    def best(make: Callable[..., Groups], *parameters: Sequence[int]) -> Groups:
        return min((make(pipeline, *given) for given in itertools.product(options, *parameters)), key=pipeline.finish_s)

    return {
        "whole model": best(whole_model),
        "layer-wise": best(layer_wise),
        "DDP buckets of 25 MB": best(buckets),
        "best of buckets": best(buckets, BUCKET_NUMELS),
        "best of even splits": best(even_split, NUM_EVEN_GROUPS),
        "Cupcake": best(lambda pipeline, option: cupcake(pipeline, option, CUPCAKE_NODES)[0]),
        "ByteComp": bytecomp(pipeline, dense=dense, compressing=compressing, offloaded=offloaded),
    }
