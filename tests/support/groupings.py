"""Brute force over plans."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from cgx_ray.plan import Layer, Option
from cgx_ray.planner.planned_group import PlannedGroup


def all_plans(layers: Sequence[Layer], options: Sequence[Option]) -> Iterator[list[PlannedGroup]]:
    """Yield all groupings of `layers` with all options of each group."""
    in_backward_order = layers[::-1]
    for cuts in itertools.product((False, True), repeat=len(layers) - 1):
        ends = [end for end, is_end in enumerate((*cuts, True), start=1) if is_end]
        members = [in_backward_order[start:end] for start, end in itertools.pairwise((0, *ends))]
        for chosen in itertools.product(options, repeat=len(ends)):
            yield [PlannedGroup.of(part, option) for part, option in zip(members, chosen, strict=True)]
