"""Joint search of groups and their options: the earliest finish of a step, exact or with a proven gap."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cgx_ray.errors import ConfigError
from cgx_ray.planner import _search
from cgx_ray.planner.pipeline import GroupEnd, Pipeline

# Labels of the last pass; they take about 50 ms.
MAX_LABELS = 30_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JointPlan:
    """Best groups found.

    finish_s    end of the step, plus tolls
    bound_s     lower bound: no groups and options have less
    num_labels  partial plans that the search kept
    """

    groups: tuple[GroupEnd, ...]
    finish_s: float
    bound_s: float
    num_labels: int

    @property
    def gap(self) -> float:
        """Largest share of `finish_s` that a better plan could save; 0 if this is the optimum."""
        return 1 - self.bound_s / self.finish_s if self.finish_s > 0 else 0.0


def search(pipeline: Pipeline, *, max_gap: float = 0.0, max_labels: int = MAX_LABELS) -> JointPlan:
    """Decide where groups end and which option each takes. No published system computes this joint optimum.

    max_gap     allowed gap, as a share of the finish; the search ends as soon as it is proven
    max_labels  partial plans that the last of three passes may keep; the others may keep a hundredth of it each. When
                a pass runs out, the next one has a finer bound; after the last pass the best plan is returned with its
                gap

    A label is a plan of the first k layers: compute finish C, network finish D, and E, when its last group is done. Of
    two labels at k, the one with neither the larger C nor the larger D ends the rest no later. It makes the other one
    needless, unless its E may be what ends the step. A* extends the label with the least bound by every next group and
    option, until no bound is below the best finish.

    The bound: a label's step ends at E or with the rest, which depends on D - C alone. From C on the rest takes
    V_k(D - C) seconds, where

        V_N(s) = s + after_s
        V_k(s) = min over end, option of  c + max(s - c + n + tail, alone, V_end(m)),  m = max(s - c, lead) + n

    with c, n, lead, tail and alone of the group (`GroupCost`; n is network_s). V_k never falls and never rises faster
    than s: both hold for V_N, and the recursion keeps them. So from values at the multiples of q,

        V_k(s) >= max(V_k(i q), V_k((i+1) q) - ((i+1) q - s))

    and the recursion over these is a lower bound everywhere. It is exact where V_k is flat or has slope 1, and loses
    only at kinks. If s is longer than the remaining compute and leads, the network never waits, and V_k(s) = s + W_k,
    where W_k is the least over end and option of n + max(tail, W_end), and W_N = after_s. The passes have 64, 512
    and 4,096 multiples. Each drops labels that cannot be part of a plan better than the one found before it: by
    the bound, and because, for w in [0, 1], w C + (1 - w) D of the first k layers is at least the sum of w compute_s +
    (1 - w) network_s over the groups that are the cheapest for w. (Their costs are sums over layers, so one pass over
    these finds them.)

    A toll delays C, D and E equally, so the bound also holds with tolls, whichever they are for a layer and an option.
    Only E is also delayed by the tolls of later groups: it may end the step if it is after the bound less the largest
    of these, layer by layer.

    Finishes that differ by less than 1e-12 of their value count as equal.
    """
    if not 0 <= max_gap < 1:
        raise ConfigError(f"max_gap {max_gap!r} is not allowed; give a share from 0, exact, to below 1")
    if max_labels < 1:
        raise ConfigError(f"max_labels {max_labels!r} is not allowed; give 1 or more")
    _, bound_s, found, num_labels = _search.search(
        pipeline.backward_s,
        pipeline.numel,
        [cost.terms for cost in pipeline.costs],
        pipeline.tolls_s,
        pipeline.after_s,
        max_gap,
        max_labels,
    )
    groups = tuple(GroupEnd(end, option) for end, option in found)
    finish_s = pipeline.finish_s(groups)
    is_best = math.isclose(bound_s, finish_s, rel_tol=1e-12)
    return JointPlan(groups=groups, finish_s=finish_s, bound_s=finish_s if is_best else bound_s, num_labels=num_labels)
