"""Plans of published systems that are no policies here, for a measured model and network, with codecs of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.planner.strategies import BUCKET_NUMELS, NUM_EVEN_GROUPS, buckets, even_split, layer_wise
from cgx_ray.plan import DENSE, CodecSpec, Option, Scheme
from cgx_ray.planner.bits import QSGD
from cgx_ray.planner.papers.groups import groups_on, pipeline_of
from cgx_ray.planner.pipeline import GroupEnd, Groups, Pipeline
from cgx_ray.planner.planned_group import PlannedGroup
from cgx_ray.planner.prediction import Measured

QSGD_SRA = Option(codec=QSGD, scheme=Scheme.SRA)
TOPK_ALLGATHER = Option(codec=CodecSpec(name="topk", density=0.01), scheme=Scheme.ALLGATHER)


def layer_wise_groups(measured: Measured) -> tuple[PlannedGroup, ...]:
    """Return a group per layer under qsgd 4/128 over sra: Cupcake's first baseline."""
    return _fused(measured, lambda pipeline: layer_wise(pipeline, 0))


def bucket_groups(measured: Measured) -> tuple[PlannedGroup, ...]:
    """Return buckets of 2 to 64 MB, of the size that is predicted to be the best: Cupcake's second baseline."""
    return _fused(measured, lambda pipeline: _best(pipeline, [buckets(pipeline, 0, one) for one in BUCKET_NUMELS]))


def even_groups(measured: Measured) -> tuple[PlannedGroup, ...]:
    """Return 2 to 32 groups of as many layers each, the number predicted to be the best: Cupcake's third baseline."""
    return _fused(measured, lambda pipeline: _best(pipeline, [even_split(pipeline, 0, one) for one in NUM_EVEN_GROUPS]))


def hipress_groups(measured: Measured) -> tuple[PlannedGroup, ...]:
    """Return HiPress' choice for each layer: qsgd 4/128 over sra if it takes less time alone than dense.

    Cupcake, section 5.1: it "only compresses tensors greater than a threshold, which is determined by the tensor size,
    network bandwidth, and compression overhead".
    """
    options = [DENSE, QSGD_SRA]
    pipeline = pipeline_of(measured, options)
    choice = [
        min(range(2), key=lambda at: pipeline.costs[at].compute_s(numel) + pipeline.costs[at].alone_s(numel))
        for numel in pipeline.numel
    ]
    return groups_on(measured, options, tuple(GroupEnd(end, at) for end, at in enumerate(choice, start=1)))


def hitopkcomm_groups(measured: Measured) -> tuple[PlannedGroup, ...]:
    """Return HiTopKComm's choice: the top 1 % of each layer, which it gathers from the nodes, here of one rank each.

    ByteComp, section 5.2: "it compresses all the tensors".
    """
    return tuple(PlannedGroup.of([layer], TOPK_ALLGATHER) for layer in reversed(measured.layers))


def _fused(measured: Measured, fuse: Callable[[Pipeline], Groups]) -> tuple[PlannedGroup, ...]:
    """Return the groups of all layers that `fuse` makes, under qsgd 4/128 over sra, which is its only option."""
    options = [QSGD_SRA]
    return groups_on(measured, options, fuse(pipeline_of(measured, options)))


def _best(pipeline: Pipeline, fusions: Sequence[Groups]) -> Groups:
    return min(fusions, key=pipeline.finish_s)
