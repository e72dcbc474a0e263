"""Plans of the papers, from what was measured: one codec in DDP's groups, or groups that a search on a pipeline found.

Layers with a rule of the user keep their groups, which stand among the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from cgx_ray.plan import DENSE, CodecSpec, Option, Scheme, make_plan
from cgx_ray.planner.candidates import FREE
from cgx_ray.planner.chain import backward_until, place_fixed
from cgx_ray.planner.pipeline import Groups, Pipeline, group_cost
from cgx_ray.planner.planned_group import PlannedGroup, groups_of
from cgx_ray.planner.prediction import Measured


def uniform_groups(
    measured: Measured, codec: CodecSpec, scheme: Scheme, bits: Mapping[str, int] | None = None
) -> tuple[PlannedGroup, ...]:
    """Return the groups of `make_plan` for the layers without a rule, with the fixed groups among them."""
    free = measured.free_layers
    plan = make_plan(
        free, version=0, world_size=measured.network.num_workers, codec=codec, scheme=scheme, bits=bits or {}
    )
    return tuple(place_fixed(measured, groups_of(plan, free)))


def pipeline_of(measured: Measured, options: Sequence[Option]) -> Pipeline:
    """Return the layers without a rule as a pipeline, under each of `options`.

    As in the papers, codecs take the device from backward, except where the host of a GPU encodes, and dense sums take
    nothing from it. Elements have the mean size of all layers, since a group may begin and end with any.
    """
    layers = measured.free_layers[::-1]
    numel = tuple(layer.numel for layer in layers)
    costs = (
        group_cost(
            option,
            network=measured.network,
            codec_cost=FREE if option == DENSE else measured.cost_of(option),
            item_bytes=sum(layer.dense_bytes for layer in layers) / sum(numel),
            encodes_on="backward",
            bus=measured.bus,
        )
        for option in options
    )
    return Pipeline(backward_s=tuple(backward_until(measured, layers)), numel=numel, costs=tuple(costs))


def groups_on(measured: Measured, options: Sequence[Option], found: Groups) -> tuple[PlannedGroup, ...]:
    """Return `found`, groups of `pipeline_of` these, as groups of a plan, with the fixed groups among them.

    A group has one dtype, so it is cut where that changes.
    """
    layers = measured.free_layers[::-1]
    groups, start = [], 0
    for end, option in found:
        for _, alike in itertools.groupby(layers[start:end], key=lambda layer: layer.dtype):
            groups.append(PlannedGroup.of(list(alike), options[option]))
        start = end
    return tuple(place_fixed(measured, groups))
