"""From measurements to the best plan: codec, scheme, hierarchy and where groups end, decided together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cgx_ray.errors import ConfigError
from cgx_ray.plan import DENSE, MAX_INDEXED_NUMEL, MAX_PAYLOAD_BYTES, Intra, Layer, Option, Scheme
from cgx_ray.planner.pipeline import GroupCost, GroupEnd, Pipeline, cheapest, group_cost, undominated
from cgx_ray.planner.prediction import Measured, PlannedGroup, Prediction, predict
from cgx_ray.planner.search import search

MAX_GAP = 0.001
# Scores nearer than this are equal.
TIE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class BestPlan:
    """The answer.

    best     of all plans
    dense    nothing compressed, summed by the vendor over all workers as DDP does, in dense's own best groups
    gap      what a better plan could save at most, as a share of the score; proven for `Pipeline`, which leaves out
             what passes until the first piece of an exchange is there
    """

    best: Prediction
    dense: Prediction
    gap: float

    @property
    def speedup(self) -> float:
        """Of progress over dense, 1 if nothing is better than dense."""
        return self.dense.score / self.best.score if self.best.score > 0 else 1.0

    @property
    def is_compute_bound(self) -> bool:
        """Compute takes all but 3 % of a dense step, so no plan can save more: compression does not help."""
        return self.dense.compute_s >= 0.97 * self.dense.step_s


def best_plan(
    measured: Measured, options: Iterable[Option], *, min_gain: float = 0.0, max_gap: float = MAX_GAP
) -> BestPlan:
    """The plan that minimises step seconds / efficiency, over all groupings and all choices from `options` and dense.

    min_gain  options that keep less are left out, as are those of unknown gain, and those that cannot carry the largest
              layer (4 GiB a payload, 2^31 elements of sparse codecs), and hierarchies where a node has one rank
    max_gap   proven, as a share; 0 is exact

    A plan keeps at least the least efficiency of its options. So for each efficiency e among them `search` finds the
    earliest finish of plans whose options keep e or more, and the least finish / e is the optimum: every plan is among
    those searched for its own e, and scores no less than what is found there. An e is passed over if a bound, compute
    and the cheapest last exchange or the cheapest network time, over e is no better than a plan known by then. Options
    that another one beats or equals in all four costs are left out; so `_var` and `_auto` take gains of their own.

    Groups are made as `make_plan` makes them: small layers (`Layer.is_small`) are not compressed, and go into groups of
    their own at the end; so do layers of another dtype than most of the model has. With nothing compressed, small
    layers stay where they are. Their backward counts with the next large layer's. Within 1e-9 of the same score the
    plan that keeps more is taken.
    """
    if not (math.isfinite(min_gain) and 0 <= min_gain <= 1):
        raise ConfigError(f"min_gain {min_gain!r} is not allowed; give a number from 0 to 1")
    chain, large = _Chain(measured, keeps_small=True), _Chain(measured, keeps_small=False)
    kept = {DENSE: 1.0}
    for option in options:
        share = measured.efficiency(option)
        is_twin = option.intra is not Intra.FLAT and measured.network.is_flat(option.intra)
        if share is not None and share >= min_gain and large.fits(option) and not is_twin:
            kept[option] = share
    lossless = [option for option in kept if option.codec.name == "none"]
    dense = chain.solve([DENSE], max_gap)
    best, score, bounds = dense, dense.finish_s, [dense.bound_s]
    levels = [(1.0, chain, lossless)]
    if large.layers:
        shares = sorted({share for option, share in kept.items() if option.codec.name != "none"}, reverse=True)
        levels += [(least, large, [option for option in kept if kept[option] >= least]) for least in shares]
    for least, layers, allowed in levels:
        bound = layers.bound_s(allowed) / least
        if bound < score * (1 - TIE):
            found = layers.solve(allowed, max_gap)
            bound = found.bound_s / least
            found_score = found.finish_s / min(kept[group.option] for group in found.groups)
            if found_score < score * (1 - TIE):
                best, score = found, found_score
        bounds.append(bound)
    predicted, predicted_dense = predict(measured, best.groups), predict(measured, dense.groups)
    if predicted.score > predicted_dense.score:
        predicted, score = predicted_dense, dense.finish_s
    gap = max(0.0, 1 - min(bounds) / score) if score > 0 else 0.0
    return BestPlan(best=predicted, dense=predicted_dense, gap=gap)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    groups: tuple[PlannedGroup, ...]
    finish_s: float
    bound_s: float


class _Chain:
    """The layers to cut into groups, in the order of backward, and those that are sent after them, dense."""

    def __init__(self, measured: Measured, *, keeps_small: bool) -> None:
        self._measured = measured
        num_bytes: dict[str, int] = {}
        for layer in measured.layers:
            num_bytes[layer.dtype] = num_bytes.get(layer.dtype, 0) + layer.dense_bytes
        self._dtype = max(num_bytes, key=lambda dtype: num_bytes[dtype])
        self.layers: list[Layer] = []
        self._backward_s: list[float] = []
        self._rest: dict[str, list[Layer]] = {}
        waiting_s = 0.0
        for layer, backward_s in zip(reversed(measured.layers), measured.backward_s, strict=True):
            waiting_s += backward_s
            if layer.dtype == self._dtype and (keeps_small or not layer.is_small):
                self.layers.append(layer)
                self._backward_s.append(waiting_s)
                waiting_s = 0.0
            else:
                self._rest.setdefault(layer.dtype, []).append(layer)
        if self.layers:
            self._backward_s[-1] += waiting_s
        self._costs: dict[tuple[Option, int], GroupCost] = {}

    def fits(self, option: Option) -> bool:
        return max((layer.numel for layer in self.layers), default=0) <= _max_numel(option)

    def bound_s(self, options: Sequence[Option]) -> float:
        """No grouping is over earlier: compute and the last layer's exchange, or the first layer's and the network."""
        costs = [self._cost(option) for option in options]
        numel = sum(layer.numel for layer in self.layers)
        after_s = min(cost.network_s(self.layers[-1].numel) for cost in costs)
        network_s = self._backward_s[0] + min(cost.network_s(numel) for cost in costs)
        return max(math.fsum(self._backward_s) + after_s, network_s) + self._rest_of(options)[1]

    def solve(self, options: Sequence[Option], max_gap: float) -> _Found:
        """The earliest finish with `options`."""
        rest, rest_s = self._rest_of(options)
        costs = [self._cost(option) for option in options]
        kept = undominated(costs)
        pipeline = Pipeline(
            backward_s=tuple(self._backward_s),
            numel=tuple(layer.numel for layer in self.layers),
            costs=tuple(costs[index] for index in kept),
        )
        joint = search(pipeline, max_gap=max_gap)
        chosen = [options[index] for index in kept]
        cut = tuple(self._cut(joint.groups, chosen))
        groups, start = [], 0
        for group in cut:
            groups.append(PlannedGroup.of(self.layers[start : group.end], chosen[group.option]))
            start = group.end
        finish_s = joint.finish_s if cut == joint.groups else pipeline.finish_s(cut)
        return _Found(groups=(*groups, *rest), finish_s=finish_s + rest_s, bound_s=joint.bound_s + rest_s)

    def _cut(self, groups: Sequence[GroupEnd], options: Sequence[Option]) -> Iterator[GroupEnd]:
        """End a group before the layer that would make it longer than messages may be."""
        start = 0
        for group in groups:
            limit, filled = _max_numel(options[group.option]), 0
            for index in range(start, group.end):
                if filled + self.layers[index].numel > limit:
                    yield GroupEnd(index, group.option)
                    filled = 0
                filled += self.layers[index].numel
            yield group
            start = group.end

    def _rest_of(self, options: Sequence[Option]) -> tuple[list[PlannedGroup], float]:
        """A group a dtype of the layers that are left, under the best option that drops nothing; seconds from there."""
        lossless = [option for option in options if option.codec.name == "none"]
        groups, seconds = [], self._measured.after_s
        for layers in self._rest.values():
            numel = sum(layer.numel for layer in layers)
            costs = [self._cost(option, layers[0].dense_bytes // layers[0].numel) for option in lossless]
            index = cheapest(costs, numel)
            groups.append(PlannedGroup.of(layers, lossless[index]))
            seconds += costs[index].network_s(numel)
        return groups, seconds

    def _cost(self, option: Option, item_bytes: int | None = None) -> GroupCost:
        item_bytes = item_bytes or self.layers[0].dense_bytes // self.layers[0].numel
        if (option, item_bytes) not in self._costs:
            self._costs[option, item_bytes] = group_cost(
                option,
                network=self._measured.network,
                codec_cost=self._measured.cost_of(option.codec),
                item_bytes=item_bytes,
            )
        return self._costs[option, item_bytes]


def _max_numel(option: Option) -> int:
    """Elements of the largest group that messages have room for. The vendor's sums have no messages of ours."""
    if option.scheme is Scheme.DENSE:
        return 1 << 62
    sample = 1 << 20
    longest = MAX_PAYLOAD_BYTES * sample // option.codec.payload_bytes(sample, 8)
    return min(longest, MAX_INDEXED_NUMEL) if option.codec.density is not None else longest
