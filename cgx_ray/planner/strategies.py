"""How others group layers and choose options, to compare with: all answer in groups of a `Pipeline`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from cgx_ray.errors import ConfigError
from cgx_ray.planner.pipeline import Group, Pipeline

DDP_BUCKET_NUMEL = 25 * (1 << 20) // 4
# Cupcake, section 5.3: thresholds of 2 to 64 MB, 2 to 32 groups, the best of each.
BUCKET_NUMELS = tuple((1 << 20) * megabytes // 4 for megabytes in (2, 4, 8, 16, 32, 64))
NUM_EVEN_GROUPS = range(2, 33)
CUPCAKE_MAX_NODES = 5_000
BYTECOMP_MAX_TRIALS = 4096

Groups = tuple[Group, ...]


def whole_model(pipeline: Pipeline, option: int) -> Groups:
    """One group."""
    return (Group(pipeline.num_layers, option),)


def layer_wise(pipeline: Pipeline, option: int) -> Groups:
    """One group a layer."""
    return tuple(Group(end, option) for end in range(1, pipeline.num_layers + 1))


def buckets(pipeline: Pipeline, option: int, numel: int = DDP_BUCKET_NUMEL) -> Groups:
    """Groups that end with the layer that brings them to `numel` elements, by default DDP's 25 MB."""
    ends, filled = [], 0
    for end, layer_numel in enumerate(pipeline.numel, start=1):
        filled += layer_numel
        if filled >= numel or end == pipeline.num_layers:
            ends.append(end)
            filled = 0
    return tuple(Group(end, option) for end in ends)


def even_split(pipeline: Pipeline, option: int, num_groups: int) -> Groups:
    """Groups of the same number of layers, as nearly as it goes; one a layer if there are fewer layers."""
    num_groups = min(num_groups, pipeline.num_layers)
    return tuple(Group(pipeline.num_layers * (index + 1) // num_groups, option) for index in range(num_groups))


def cupcake(pipeline: Pipeline, option: int, max_nodes: int = CUPCAKE_MAX_NODES) -> Groups:
    """Wang et al. 2023, algorithm 1: every grouping but those that its two prunings rule out, depth first.

    It takes exponential time at worst, so departing from the paper it gives up after `max_nodes` partial groupings
    with the best so far; up to there that is the optimum. It starts from the better of one group and two.
    """
    cost, N = pipeline.costs[option], pipeline.num_layers
    numel = [0, *itertools.accumulate(pipeline.numel)]
    backward_s = [0.0, *itertools.accumulate(pipeline.backward_s)]

    def compute_s(start: int, end: int) -> float:
        return backward_s[end] - backward_s[start] + cost.compute_s(numel[end] - numel[start])

    best = min((whole_model(pipeline, option), even_split(pipeline, option, 2)), key=pipeline.finish_s)
    best_s = pipeline.finish_s(best)
    open_groupings: list[tuple[Groups, float, float]] = [((), 0.0, 0.0)]
    for _ in range(max_nodes):
        if not open_groupings:
            break
        groups, computed_s, sent_s = open_groupings.pop()
        start = groups[-1].end if groups else 0
        # Insight 2: what is encoded while the network is still busy may as well be one group.
        first = start + 1
        while first < N and compute_s(start, first + 1) <= sent_s - computed_s:
            first += 1
        found = []
        for end in range(first, N + 1):
            done_s = computed_s + compute_s(start, end)
            next_sent_s = max(sent_s, done_s) + cost.network_s(numel[end] - numel[start])
            grouping = (*groups, Group(end, option))
            if end == N:
                if next_sent_s < best_s:
                    best, best_s = grouping, next_sent_s
                continue
            # Insight 1: at best the rest is one group that nothing waits for.
            least_s = max(done_s + compute_s(end, N), next_sent_s + cost.network_s(numel[N] - numel[end]))
            if least_s < best_s:
                found.append((grouping, done_s, next_sent_s))
        open_groupings += reversed(found)
    return best


def bytecomp(
    pipeline: Pipeline,
    *,
    dense: int,
    compressing: Sequence[int],
    offloaded: Mapping[int, int],
    max_trials: int = BYTECOMP_MAX_TRIALS,
) -> Groups:
    """Wang et al. 2022 (ByteComp, later Espresso): layer by layer, a greedy choice of options, then CPU offloading.

    dense        option of layers that are not compressed
    compressing  options that compress where backward runs (the paper's GPU options)
    offloaded    for such an option the one that does the same on the CPU

    Algorithm 1 tries options on layers from the largest down, among equals from the last in backward, and passes over
    uncompressed layers that are sent before a gap in the network's time. Algorithm 2 tries on each set of equal layers
    with equal options how many, from the first in backward, to offload. Departure: where that makes more than
    `max_trials` combinations, it takes one set after the other.
    """
    if not pipeline.costs[dense].compute_a_s == pipeline.costs[dense].compute_b_s_per_element == 0:
        raise ConfigError(f"option {dense} takes compute time, dense does not; give the option that encodes nothing")
    chosen = _offload(pipeline, _compress(pipeline, dense, compressing), offloaded, max_trials)
    return _one_by_one(chosen)


def _one_by_one(options: Sequence[int]) -> Groups:
    return tuple(Group(end, option) for end, option in enumerate(options, start=1))


def _compress(pipeline: Pipeline, dense: int, compressing: Sequence[int]) -> list[int]:
    """ByteComp's algorithm 1: an option for every layer."""
    chosen = [dense] * pipeline.num_layers
    for layer in sorted(range(pipeline.num_layers), key=lambda layer: (-pipeline.numel[layer], -layer)):
        if layer >= _last_gap(pipeline, chosen):
            trials = [[*chosen[:layer], option, *chosen[layer + 1 :]] for option in (dense, *compressing)]
            chosen = min(trials, key=lambda options: pipeline.finish_s(_one_by_one(options)))
    return chosen


def _offload(pipeline: Pipeline, chosen: Sequence[int], offloaded: Mapping[int, int], max_trials: int) -> Sequence[int]:
    """ByteComp's algorithm 2: of each set of equal layers with equal options, the first few on the CPU."""
    alike: dict[tuple[int, int], list[int]] = {}
    for layer, option in enumerate(chosen):
        if option in offloaded:
            alike.setdefault((pipeline.numel[layer], option), []).append(layer)
    sets = list(alike.values())

    def moved(counts: Iterable[int]) -> list[int]:
        to_cpu = {layer for layers, count in zip(sets, counts, strict=True) for layer in layers[:count]}
        return [offloaded[option] if layer in to_cpu else option for layer, option in enumerate(chosen)]

    def finish_s(counts: Iterable[int]) -> float:
        return pipeline.finish_s(_one_by_one(moved(counts)))

    if math.prod(len(layers) + 1 for layers in sets) <= max_trials:
        return moved(min(itertools.product(*(range(len(layers) + 1) for layers in sets)), key=finish_s))
    counts = (0,) * len(sets)
    for index, layers in enumerate(sets):
        trials = [(*counts[:index], count, *counts[index + 1 :]) for count in range(len(layers) + 1)]
        counts = min(trials, key=finish_s)
    return moved(counts)


def _last_gap(pipeline: Pipeline, options: Sequence[int]) -> int:
    """The last layer, of those sent one by one, for which the network has to wait: 0 if it never does."""
    computed_s = sent_s = 0.0
    last = 0
    for layer, option in enumerate(options):
        cost, numel = pipeline.costs[option], pipeline.numel[layer]
        computed_s += pipeline.backward_s[layer] + cost.compute_s(numel)
        if computed_s > sent_s:
            last = layer
        sent_s = max(computed_s, sent_s) + cost.network_s(numel)
    return last


def named_strategies(
    pipeline: Pipeline, *, dense: int, compressing: Sequence[int], offloaded: Mapping[int, int]
) -> dict[str, Groups]:
    """Each strategy at its best: with the option, bucket size or number of groups that suits it most.

    The options are those of `bytecomp`; strategies with one option for all groups may take any of the pipeline's.
    """
    options = range(len(pipeline.costs))

    def best(make: Callable[..., Groups], *parameters: Sequence[int]) -> Groups:
        return min((make(pipeline, *given) for given in itertools.product(options, *parameters)), key=pipeline.finish_s)

    return {
        "whole model": best(whole_model),
        "layer-wise": best(layer_wise),
        "DDP buckets of 25 MB": best(buckets),
        "best of buckets": best(buckets, BUCKET_NUMELS),
        "best of even splits": best(even_split, NUM_EVEN_GROUPS),
        "Cupcake": best(cupcake),
        "ByteComp": bytecomp(pipeline, dense=dense, compressing=compressing, offloaded=offloaded),
    }
