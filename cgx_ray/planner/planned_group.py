"""Groups of a plan as the planner counts them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cgx_ray.plan import Layer, Option, Plan


class PlannedGroup(NamedTuple):
    """Names and sizes of the layers that are sent together, and their option.

    is_fixed  as in `GroupPlan`
    period    as in `Plan`, the same for all its groups
    """

    layers: tuple[str, ...]
    numel: int
    dense_bytes: int
    option: Option
    is_fixed: bool = False
    period: int = 1

    @classmethod
    def of(cls, layers: Sequence[Layer], option: Option, *, is_fixed: bool = False, period: int = 1) -> PlannedGroup:
        return cls(
            tuple(layer.name for layer in layers),
            sum(layer.numel for layer in layers),
            sum(layer.dense_bytes for layer in layers),
            option,
            is_fixed,
            period,
        )

    @property
    def wire_bytes(self) -> int:
        return self.option.codec.payload_bytes(self.numel, self.dense_bytes // self.numel)


def groups_of(plan: Plan, layers: Iterable[Layer]) -> tuple[PlannedGroup, ...]:
    """Return the groups of a plan for `layers`."""
    by_name = {layer.name: layer for layer in layers}
    return tuple(
        PlannedGroup.of(
            [by_name[name] for name in group.layers], group.option, is_fixed=group.is_fixed, period=plan.period
        )
        for group in plan.groups
    )


def fixed_groups(plan: Plan, layers: Iterable[Layer]) -> tuple[PlannedGroup, ...]:
    """Return the fixed groups of a plan, in an order that is the same for all plans that have them.

    A search adds up their times, and the last digit of a sum depends on its order.
    """
    return tuple(sorted((group for group in groups_of(plan, layers) if group.is_fixed), key=lambda one: one.layers))


def period_of(groups: Sequence[PlannedGroup]) -> int:
    """Return the period of the plan with `groups`."""
    return groups[0].period if groups else 1
