"""Cupcake (Wang et al. 2023): which neighbouring layers to fuse into groups under one option (algorithm 1).

Depth first, a partial grouping is extended by every next group, except where one of two insights rules it out:

1. At best the remaining layers are one group that nothing waits for. If even that ends later than the best grouping
   found, the partial grouping is dropped.
2. Layers that are encoded while the network is still busy may as well be one group.

The search starts from the better of one group and two. The paper knows no lead and no tail (`GroupCost`); with these,
insight 2 may miss the optimum.

It takes exponential time at worst. With qsgd, 8 workers and 0.2 s of compute it ended by itself:

| network | ResNet-101 | BERT base |
|---|---|---|
| 1 Gbit/s | all 314 tensors: 632 groupings, 0.1 s | all 207: 0.02 s |
| 10 Gbit/s | up to 40: 40,029 groupings, 1 s; not for 48 | up to 56: 3,292 groupings, 0.1 s; not for 80 |
| 25 Gbit/s | up to 34: 90,423 groupings, 2 s; not for 40 | up to 40: 140,150 groupings, 3 s; not for 56 |

"Not": it did not end within 600,000 groupings. On a fast network, which often idles, insight 2 rules out little.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection

from cgx_ray.planner.pipeline import GroupEnd, Groups, Pipeline

# A minute or more, depending on the number of layers.
MAX_NODES = 1_000_000


def cupcake(
    pipeline: Pipeline, option: int, max_nodes: int = MAX_NODES, insights: Collection[int] = (1, 2)
) -> tuple[Groups, bool]:
    """Return the groups with the earliest finish when all use `option`, and whether the search ended by itself.

    insights  those that rule out groupings; fewer find the same, later (table 1)

    Departure: it gives up after `max_nodes` partial groupings and returns the best so far. If it ends before that, the
    answer is the optimum unless the option has a lead or a tail.
    """
    cost, N = pipeline.costs[option], pipeline.num_layers
    numel = [0, *itertools.accumulate(pipeline.numel)]
    backward_s = [0.0, *itertools.accumulate(pipeline.backward_s)]

    def compute_s(start: int, end: int) -> float:
        return backward_s[end] - backward_s[start] + cost.compute_s(numel[end] - numel[start])

    whole = (GroupEnd(N, option),)
    halves = tuple(GroupEnd(end, option) for end in (N // 2, N) if end > 0)
    best = min((whole, halves), key=pipeline.finish_s)
    best_s = pipeline.finish_s(best)
    open_groupings: list[tuple[Groups, float, float]] = [((), 0.0, 0.0)]
    for _ in range(max_nodes):
        if not open_groupings:
            break
        groups, computed_s, sent_s = open_groupings.pop()
        start = groups[-1].end if groups else 0
        # Insight 2.
        first = start + 1
        while 2 in insights and first < N and compute_s(start, first + 1) <= sent_s - computed_s:
            first += 1
        found = []
        for end in range(first, N + 1):
            done_s = computed_s + compute_s(start, end)
            group_numel = numel[end] - numel[start]
            next_sent_s = max(sent_s, done_s + cost.lead_s(group_numel)) + cost.network_s(group_numel)
            grouping = (*groups, GroupEnd(end, option))
            if end == N:
                finish_s = pipeline.finish_s(grouping)
                if finish_s < best_s:
                    best, best_s = grouping, finish_s
                continue
            # Insight 1.
            least_s = max(done_s + compute_s(end, N), next_sent_s + cost.network_s(numel[N] - numel[end]))
            if 1 not in insights or least_s + pipeline.after_s < best_s:
                found.append((grouping, done_s, next_sent_s))
        open_groupings += reversed(found)
    return best, not open_groupings
