"""Plans of published systems for a measured model and network, with codecs and schemes of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.planner.strategies import BUCKET_NUMELS, NUM_EVEN_GROUPS, buckets, even_split, layer_wise
from cgx_ray.plan import DENSE, CodecSpec, Intra, Layer, Option, Scheme, options_of
from cgx_ray.planner.bits import QSGD
from cgx_ray.planner.papers.bytecomp import bytecomp
from cgx_ray.planner.papers.cupcake import cupcake
from cgx_ray.planner.pipeline import GroupEnd, Groups, Pipeline, group_cost
from cgx_ray.planner.prediction import Measured, PlannedGroup

# Partial groupings of Cupcake's search, less than a second.
CUPCAKE_NODES = 2_000
QSGD_SRA = Option(codec=QSGD, scheme=Scheme.SRA)
TOPK_ALLGATHER = Option(codec=CodecSpec(name="topk", density=0.01), scheme=Scheme.ALLGATHER)


def cupcake_groups(measured: Measured) -> tuple[PlannedGroup, ...]:
    """Return Cupcake's fusion of all layers under qsgd 4/128 over sra."""
    return _fused(measured, lambda pipeline: cupcake(pipeline, 0, CUPCAKE_NODES)[0])


def layer_wise_groups(measured: Measured) -> tuple[PlannedGroup, ...]:
    """Return a group per layer under qsgd 4/128 over sra: Cupcake's first baseline."""
    return _fused(measured, lambda pipeline: layer_wise(pipeline, 0))


def bucket_groups(measured: Measured) -> tuple[PlannedGroup, ...]:
    """Return buckets of 2 to 64 MB, of the size that is predicted to be the best: Cupcake's second baseline."""
    return _fused(measured, lambda pipeline: _best(pipeline, [buckets(pipeline, 0, one) for one in BUCKET_NUMELS]))


def even_groups(measured: Measured) -> tuple[PlannedGroup, ...]:
    """Return 2 to 32 groups of as many layers each, the number predicted to be the best: Cupcake's third baseline."""
    return _fused(measured, lambda pipeline: _best(pipeline, [even_split(pipeline, 0, one) for one in NUM_EVEN_GROUPS]))


def bytecomp_groups(measured: Measured) -> tuple[PlannedGroup, ...]:
    """Return ByteComp's choice for each layer by itself: dense, or qsgd 4/128 over one of its schemes."""
    options = [DENSE, *(option for option in options_of(QSGD) if option.intra is Intra.FLAT)]
    found = bytecomp(_pipeline(measured, options), dense=0, compressing=range(1, len(options)), offloaded={})
    return _cut(measured, found, options)


def hipress_groups(measured: Measured) -> tuple[PlannedGroup, ...]:
    """Return HiPress' choice for each layer: qsgd 4/128 over sra if it takes less time alone than dense.

    Cupcake, section 5.1: it "only compresses tensors greater than a threshold, which is determined by the tensor size,
    network bandwidth, and compression overhead".
    """
    options = [DENSE, QSGD_SRA]
    pipeline = _pipeline(measured, options)
    choice = [
        min(range(2), key=lambda at: pipeline.costs[at].compute_s(numel) + pipeline.costs[at].alone_s(numel))
        for numel in pipeline.numel
    ]
    return _cut(measured, tuple(GroupEnd(end, at) for end, at in enumerate(choice, start=1)), options)


def hitopkcomm_groups(measured: Measured) -> tuple[PlannedGroup, ...]:
    """Return HiTopKComm's choice: the top 1 % of each layer, which it gathers from the nodes, here of one rank each.

    ByteComp, section 5.2: "it compresses all the tensors".
    """
    return tuple(PlannedGroup.of([layer], TOPK_ALLGATHER) for layer in reversed(measured.layers))


def _fused(measured: Measured, fuse: Callable[[Pipeline], Groups]) -> tuple[PlannedGroup, ...]:
    """Return the groups of all layers that `fuse` makes, under qsgd 4/128 over sra, which is its only option."""
    options = [QSGD_SRA]
    return _cut(measured, fuse(_pipeline(measured, options)), options)


def _best(pipeline: Pipeline, fusions: Sequence[Groups]) -> Groups:
    return min(fusions, key=pipeline.finish_s)


def _pipeline(measured: Measured, options: Sequence[Option]) -> Pipeline:
    costs = (
        group_cost(
            option,
            network=measured.network,
            codec_cost=measured.cost_of(option),
            # As the papers do, which know no thread beside backward and dense sums that take no compute.
            encodes_on="backward",
        )
        for option in options
    )
    numels = tuple(layer.numel for layer in reversed(measured.layers))
    return Pipeline(backward_s=measured.backward_s, numel=numels, costs=tuple(costs))


def _cut(measured: Measured, found: Groups, options: Sequence[Option]) -> tuple[PlannedGroup, ...]:
    """Return the groups that end as `found` says, each under its option of `options`."""
    layers: list[Layer] = list(reversed(measured.layers))
    starts = [0, *(group.end for group in found)]
    return tuple(
        PlannedGroup.of(layers[start : group.end], options[group.option])
        for start, group in zip(starts, found, strict=False)
    )
