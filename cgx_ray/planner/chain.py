"""Layers of a model as the planner's search sees them: a chain to cut into groups, and what is sent beside it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cgx_ray.plan import MAX_INDEXED_NUMEL, MAX_PAYLOAD_BYTES, NONE, CodecSpec, Layer, Option, Scheme
from cgx_ray.planner.pipeline import GroupCost, GroupEnd, Pipeline, cheapest, group_cost, undominated
from cgx_ray.planner.planned_group import PlannedGroup
from cgx_ray.planner.prediction import Measured
from cgx_ray.planner.search import search

# Places at which the search may end a group. Its time grows with their square: for 2,000 it took 4.4 s.
MAX_ENDS = 350


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGroups:
    """Groups, when the step with them ends, their tolls, and a lower bound of the sum of both."""

    groups: tuple[PlannedGroup, ...]
    finish_s: float
    toll_s: float
    bound_s: float


class LayerChain:
    """Layers to cut into groups, in the order of backward, and the layers that are sent dense before the last group.

    In models with more than MAX_ENDS layers, neighbours are joined into units of similar work, where groups end.
    So groups may be 2 / MAX_ENDS of the model longer than the best ones, and lower bounds are those of such plans.

    Fixed groups (`Measured.fixed`) are sent when they are ready. In the search, all their seconds come after the rest.

    layers   to cut, without those of fixed groups
    fixed_s  seconds of the fixed groups in a row
    """

    def __init__(self, measured: Measured, *, keeps_small: bool, shares_time: bool = True) -> None:
        """`keeps_small`: with the small layers. `shares_time` as in `group_cost`."""
        self._measured = measured
        self._shares_time = shares_time
        num_bytes: dict[str, int] = {}
        for layer in measured.free_layers:
            num_bytes[layer.dtype] = num_bytes.get(layer.dtype, 0) + layer.dense_bytes
        self._dtype = max(num_bytes, key=lambda dtype: num_bytes[dtype])
        self.layers: list[Layer] = []
        self._rest: dict[str, list[Layer]] = {}
        for layer in reversed(measured.free_layers):
            if layer.dtype == self._dtype and (keeps_small or not layer.is_small):
                self.layers.append(layer)
            else:
                self._rest.setdefault(layer.dtype, []).append(layer)
        self._backward_s = backward_until(measured, self.layers)
        self._costs: dict[tuple[Option, int], GroupCost] = {}
        self.fixed_s = self._row_s(
            measured.fixed,
            [self._cost(group.option, group.dense_bytes // group.numel) for group in measured.fixed],
        )

    def fits(self, option: Option) -> bool:
        return max((layer.numel for layer in self.layers), default=0) <= max_numel(option)

    def soonest(self, options: Sequence[Option], numel: int) -> list[Option]:
        """Return the `options` that can carry a group of `numel` elements, first the one that takes least alone."""
        able = [option for option in options if self.layers and numel <= max_numel(option)]
        return sorted(able, key=lambda option: self._cost(option).alone_s(numel))

    def bound_s(self, options: Sequence[Option]) -> float:
        """Return a lower bound of the finish: compute and the last exchange, or the first layer and the network."""
        costs = [self._cost(option) for option in options]
        rest_s = self._rest_of(options)[1]
        numel, last = sum(layer.numel for layer in self.layers), self.layers[-1].numel
        last_s = min(max(cost.alone_s(last), cost.lead_s(last) + cost.network_s(last) + rest_s) for cost in costs)
        network_s = self._backward_s[0] + min(cost.network_s(numel) for cost in costs) + rest_s
        return max(math.fsum(self._backward_s) + last_s, network_s) + self._measured.after_s

    def solve(
        self, options: Sequence[Option], max_gap: float, tolls: Mapping[Option, float] | None = None
    ) -> FoundGroups:
        """Return the groups with the earliest finish under `options`.

        tolls  seconds per element that a layer counts as (`Measured.counted_numel`), to be added
        """
        rest, rest_s = self._rest_of(options)
        costs = [self._cost(option) for option in options]
        toll_CL = self._tolls({option: tolls[option] for option in options}) if tolls else None
        kept = undominated(costs, toll_CL)
        pipeline = Pipeline(
            backward_s=tuple(self._backward_s),
            numel=tuple(layer.numel for layer in self.layers),
            costs=tuple(costs[index] for index in kept),
            after_s=rest_s,
            tolls_s=tuple(map(tuple, toll_CL[kept].tolist())) if toll_CL is not None else (),
        )
        ends = self._unit_ends()
        joint = search(_joined(pipeline, ends), max_gap=max_gap)
        chosen = [options[index] for index in kept]
        uncut = tuple(GroupEnd(ends[group.end - 1], group.option) for group in joint.groups)
        cut = tuple(self._cut(uncut, chosen))
        groups, start = [], 0
        for group in cut:
            groups.append(PlannedGroup.of(self.layers[start : group.end], chosen[group.option]))
            start = group.end
        toll_s = pipeline.toll_s(cut)
        finish_s = (joint.finish_s if cut == uncut else pipeline.finish_s(cut)) - toll_s
        after_s = self._measured.after_s
        # The rest is ready when the last group is, at the end of backward. Short messages must not queue behind its
        # long ones. In the model, which has one network, the order of the two makes no difference.
        return FoundGroups(
            groups=tuple(place_fixed(self._measured, (*groups[:-1], *rest, groups[-1]))),
            finish_s=finish_s + after_s,
            toll_s=toll_s,
            bound_s=joint.bound_s + after_s,
        )

    def most_toll_s(self, tolls: Mapping[Option, float]) -> float:
        """Return the most that groups can add up to, each layer under its worst option. `tolls`: as in `solve`."""
        return float(self._tolls(tolls).max(axis=0).sum())

    def _tolls(self, tolls: Mapping[Option, float]) -> NDArray[np.float64]:
        """Return the seconds of each option, in the order of `tolls`, and each layer."""
        counted: dict[CodecSpec, NDArray[np.float64]] = {}
        for option in tolls:
            if option.codec not in counted:
                numels = self._measured.counted_numel(option.codec)
                counted[option.codec] = np.array([numels.get(layer.name, layer.numel) for layer in self.layers])
        return np.array([toll * counted[option.codec] for option, toll in tolls.items()])

    def _unit_ends(self) -> list[int]:
        """Return the places at which groups may end: after each layer, or after each unit if there are too many."""
        count = len(self.layers)
        if count <= MAX_ENDS:
            return list(range(1, count + 1))
        numel, backward_s = sum(layer.numel for layer in self.layers), math.fsum(self._backward_s) or 1.0
        ends, work = [], 0.0
        for index, (layer, seconds) in enumerate(zip(self.layers, self._backward_s, strict=True), start=1):
            work += layer.numel / numel + seconds / backward_s
            if work >= 2 / MAX_ENDS or index == count:
                ends.append(index)
                work = 0.0
        return ends

    def _cut(self, groups: Sequence[GroupEnd], options: Sequence[Option]) -> Iterator[GroupEnd]:
        """Yield `groups`, cut before each layer that would make a group too long for a message."""
        start = 0
        for group in groups:
            limit, filled = max_numel(options[group.option]), 0
            for index in range(start, group.end):
                if filled + self.layers[index].numel > limit:
                    yield GroupEnd(index, group.option)
                    filled = 0
                filled += self.layers[index].numel
            yield group
            start = group.end

    @staticmethod
    def _row_s(groups: Sequence[PlannedGroup], costs: Sequence[GroupCost]) -> float:
        """Return the seconds that `groups` take in a row."""
        if not groups:
            return 0.0
        row = Pipeline(backward_s=(0.0,) * len(groups), numel=tuple(g.numel for g in groups), costs=tuple(costs))
        return row.finish_s([GroupEnd(index + 1, index) for index in range(len(groups))])

    def _rest_of(self, options: Sequence[Option]) -> tuple[list[PlannedGroup], float]:
        """Return one lossless group per dtype of the remaining layers, and their seconds and `fixed_s` in a row."""
        lossless = [option for option in options if option.codec == NONE]
        groups: list[PlannedGroup] = []
        chosen: list[GroupCost] = []
        for layers in self._rest.values():
            numel = sum(layer.numel for layer in layers)
            costs = [self._cost(option, layers[0].dense_bytes // layers[0].numel) for option in lossless]
            index = cheapest(costs, numel)
            groups.append(PlannedGroup.of(layers, lossless[index]))
            chosen.append(costs[index])
        return groups, self._row_s(groups, chosen) + self.fixed_s

    def _cost(self, option: Option, item_bytes: int | None = None) -> GroupCost:
        item_bytes = item_bytes or self.layers[0].dense_bytes // self.layers[0].numel
        if (option, item_bytes) not in self._costs:
            self._costs[option, item_bytes] = group_cost(
                option,
                network=self._measured.network,
                codec_cost=self._measured.cost_of(option),
                item_bytes=item_bytes,
                encodes_on=self._measured.encodes_on,
                shares_time=self._shares_time,
                bus=self._measured.bus,
                engine=self._measured.engine,
            )
        return self._costs[option, item_bytes]


def backward_until(measured: Measured, layers: Sequence[Layer]) -> list[float]:
    """Return for each of `layers`, in the order of backward, the seconds of backward since the one before.

    The last one's include the rest of backward: the last group ends no earlier than that.
    """
    names, found, waiting_s = {layer.name for layer in layers}, [], 0.0
    for layer, seconds in zip(reversed(measured.layers), measured.backward_s, strict=True):
        waiting_s += seconds
        if layer.name in names:
            found.append(waiting_s)
            waiting_s = 0.0
    if found:
        found[-1] += waiting_s
    return found


def _joined(pipeline: Pipeline, ends: Sequence[int]) -> Pipeline:
    """Return `pipeline` with its layers joined into units that end at `ends`."""
    if len(ends) == pipeline.num_layers:
        return pipeline
    spans = [slice(start, end) for start, end in itertools.pairwise((0, *ends))]
    return replace(
        pipeline,
        backward_s=tuple(math.fsum(pipeline.backward_s[span]) for span in spans),
        numel=tuple(sum(pipeline.numel[span]) for span in spans),
        tolls_s=tuple(tuple(math.fsum(row[span]) for span in spans) for row in pipeline.tolls_s),
    )


def place_fixed(measured: Measured, groups: Sequence[PlannedGroup]) -> Iterator[PlannedGroup]:
    """Yield `groups` with the fixed ones among them, each before the first group that is ready later.

    Small layers come before the last group: the short messages must not queue behind its long ones.
    """
    place = {layer.name: index for index, layer in enumerate(reversed(measured.layers))}
    small = {layer.name for layer in measured.layers if layer.is_small}

    def ready(group: PlannedGroup) -> int:
        return max(place[name] for name in group.layers)

    waiting = sorted(measured.fixed, key=ready)
    for index, group in enumerate(groups):
        is_last = index == len(groups) - 1
        before = [one for one in waiting if ready(one) < ready(group) or (is_last and small.issuperset(one.layers))]
        yield from before
        yield group
        waiting = [one for one in waiting if one not in before]
    yield from waiting


def max_numel(option: Option) -> int:
    """Return the elements of the largest group that fits a message. The vendor's sums do not use our messages."""
    if option.scheme is Scheme.DENSE:
        return 1 << 62
    sample = 1 << 20
    longest = MAX_PAYLOAD_BYTES * sample // option.codec.payload_bytes(sample, 8)
    return min(longest, MAX_INDEXED_NUMEL) if option.codec.density is not None else longest
