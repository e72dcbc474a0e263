"""Groups of one codec for all layers except those of fixed groups: the plans of papers that fuse as DDP does."""

from __future__ import annotations

from collections.abc import Mapping

from cgx_ray.plan import CodecSpec, Scheme, make_plan
from cgx_ray.planner.chain import place_fixed
from cgx_ray.planner.prediction import Measured, PlannedGroup, groups_of


def uniform_groups(
    measured: Measured, codec: CodecSpec, scheme: Scheme, bits: Mapping[str, int] | None = None
) -> tuple[PlannedGroup, ...]:
    """Return the groups of `make_plan` for the layers without a rule, with the fixed groups among them."""
    fixed = {name for group in measured.fixed for name in group.layers}
    free = [layer for layer in measured.layers if layer.name not in fixed]
    plan = make_plan(
        free, version=0, world_size=measured.network.num_workers, codec=codec, scheme=scheme, bits=bits or {}
    )
    return tuple(place_fixed(measured, groups_of(plan, free)))
