"""Plans that the engine gets in `bench step` and `bench peers`: the planner's, and those of published systems."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from bench.shared.paper_plans import (
    bucket_groups,
    even_groups,
    hipress_groups,
    hitopkcomm_groups,
    layer_wise_groups,
)
from bench.step.workload import GAINS
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.policies.paper_policies import ByteComp, Cupcake, Flexible
from cgx_ray.control.policies.policy import PlannerInput, Situation
from cgx_ray.plan import DEFAULT_GROUP_BYTES, FIRST_GROUP_BYTES, Plan, Scheme, make_plan
from cgx_ray.planner.bits import QSGD
from cgx_ray.planner.papers.cgx import layer_bits
from cgx_ray.planner.papers.flexible import choose
from cgx_ray.planner.planned_group import PlannedGroup, groups_of
from cgx_ray.planner.prediction import Measured, predict
from cgx_ray.planner.scenario import TYPICAL_GAINS


def _joint_groups(measured: Measured) -> tuple[PlannedGroup, ...]:
    """Return what policy "adaptive" chooses in a run with these measurements."""
    first = make_plan(measured.layers, version=0, world_size=measured.network.num_workers)
    known = PlannerInput(now=measured, states=[measured])
    chosen = Adaptive().decide(Situation(cause="first measurements", plan=first, planner_input=known))
    return groups_of(chosen.plan, measured.layers)


_GROUPS: Mapping[str, Callable[[Measured], tuple[PlannedGroup, ...]]] = {
    "joint": _joint_groups,
    "layerwise": layer_wise_groups,
    "buckets": bucket_groups,
    "even": even_groups,
    "cupcake": Cupcake().groups,
    "bytecomp": ByteComp().groups,
    "hipress": hipress_groups,
    "hitopkcomm": hitopkcomm_groups,
}
# These fuse layers as DDP does.
_FUSED_AS_DDP = ("cgx", "flexible")
PLANNERS = (*_GROUPS, *_FUSED_AS_DDP)


def timed_codecs(planners: Collection[str]) -> tuple[str, ...]:
    """Return the codecs whose times `planners` need, beside those of the ways themselves."""
    return (*GAINS, *(map(str, Flexible().timed_codecs) if "flexible" in planners else ()))


def plan_of(planner: str, measured: Measured, *, divisor: float = 1.0) -> Plan:
    """Return a plan of `PLANNERS`.

    measured  for "cgx" with errors of the layers
    divisor   of the layers, and so of the groups of "cgx" and "flexible"
    """
    num_ranks = measured.network.num_workers
    if planner not in _FUSED_AS_DDP:
        groups = _GROUPS[planner](measured)
        return predict(measured, groups).plan(version=0, world_size=num_ranks)
    codec, scheme, bits = QSGD, Scheme.SRA, {}
    if planner == "cgx":
        bits = layer_bits(measured.layer_errors, "kmeans")
    else:
        # As the paper, which scores AR-Topk by what ranks would keep with indices of their own.
        trial = choose(measured, lambda option: TYPICAL_GAINS[str(option.codec)])
        codec, scheme = trial.codec, trial.scheme
    return make_plan(
        measured.layers,
        version=0,
        world_size=num_ranks,
        codec=codec,
        scheme=scheme,
        bits=bits,
        group_bytes=round(DEFAULT_GROUP_BYTES / divisor),
        first_bytes=round(FIRST_GROUP_BYTES / divisor),
    )
