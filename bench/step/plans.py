"""Plans that the engine gets in `bench step` and `bench peers`: the planner's, and those of published systems."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from bench.shared.paper_plans import (
    bucket_groups,
    bytecomp_groups,
    cupcake_groups,
    even_groups,
    hipress_groups,
    hitopkcomm_groups,
    layer_wise_groups,
)
from bench.step.workload import GAINS
from cgx_ray.plan import DEFAULT_GROUP_BYTES, FIRST_GROUP_BYTES, NONE, CodecSpec, Plan, Scheme, make_plan
from cgx_ray.planner.bits import QSGD
from cgx_ray.planner.candidates import codec_options
from cgx_ray.planner.fidelity import LOSS_COSTS, Fidelity, codecs_of
from cgx_ray.planner.joint import best_plan
from cgx_ray.planner.papers.cgx import layer_bits
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES, choose
from cgx_ray.planner.prediction import Measured, PlannedGroup, predict

# The default of `CGXConfig` and of `cgx-ray plan`.
MIN_GAIN = 0.8
# Of what `Adaptive` chooses from by default; what is not typical was measured with the losses.
STRICT_GAINS = {
    str(codec): GAINS.get(str(codec), 1 - (LOSS_COSTS[str(codec)].relative_error or 0.0))
    for codec in codecs_of(Fidelity.STRICT)
    if codec != NONE
}


def _typical_groups(measured: Measured) -> tuple[PlannedGroup, ...]:
    """Return the best plan over all schemes and over the codecs that `cgx-ray plan` considers."""
    return best_plan(measured, codec_options((NONE, *map(CodecSpec.parse, GAINS))), min_gain=MIN_GAIN).best.groups


def _strict_groups(measured: Measured) -> tuple[PlannedGroup, ...]:
    """Return the best plan over all schemes and over the codecs that policy "adaptive" may choose by default."""
    measured = replace(measured, gain=STRICT_GAINS)
    return best_plan(measured, codec_options(codecs_of(Fidelity.STRICT)), min_gain=MIN_GAIN).best.groups


_GROUPS: Mapping[str, Callable[[Measured], tuple[PlannedGroup, ...]]] = {
    "typical": _typical_groups,
    "strict": _strict_groups,
    "layerwise": layer_wise_groups,
    "buckets": bucket_groups,
    "even": even_groups,
    "cupcake": cupcake_groups,
    "bytecomp": bytecomp_groups,
    "hipress": hipress_groups,
    "hitopkcomm": hitopkcomm_groups,
}
# These fuse layers as DDP does.
_FUSED_AS_DDP = ("cgx", "flexible")
PLANNERS = (*_GROUPS, *_FUSED_AS_DDP)


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
        gains = {density: GAINS[f"topk:density={density:g}"] for density in CANDIDATE_DENSITIES}
        trial = choose(replace(measured, gain_curve=gains))
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
