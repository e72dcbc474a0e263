"""Best grouping of layers under one option, exact."""

from __future__ import annotations

import numpy as np

from cgx_ray.planner.pipeline import GroupEnd, Groups, Pipeline

# Largest rounding error of a sum of a few thousand doubles, relative to the finish.
ROUNDING = 1e-12


def fuse(pipeline: Pipeline, option: int = 0) -> tuple[Groups, float]:
    """Return the groups with the earliest finish when all use `option`, and that finish in seconds.

    This is the problem of Cupcake (Wang et al. 2023, equations 2 and 3), which searches 2^(N-1) groupings. The
    recursion

        D(k, y) = min over j < k of max(D(j, y-1), C(k, y) + lead_s(j..k)) + network_s(j..k)

    gives D(k, y), the earliest network finish of the first k layers in y groups. It is exact because:
    1. Encoding costs a + b x. So wherever the first k layers are cut into y groups, their compute finishes at the same
       time C(k, y) = backward(1..k) + y a + b x(1..k).
    2. So the layers after k see only one difference between these groupings, the network finish.
    3. Every later finish is max(network finish, ...) + ..., which never falls when the network finish rises. So the
       earliest one is the best.
    Without 1 (options that differ by group, encoding that is not affine) an earlier network finish may come with a
    later compute finish, and neither is better; `search` keeps both. Network times may be any function of the group.

    It takes O(N^2 Y) time for N layers and Y groups. More groups reduce neither C(N, y) nor the network's total, so y
    stops rising when these alone reach the best finish.

    The recursion finds the grouping whose last group is done first. If another of its groups is done later than that,
    the recursion is repeated without groups that are done no earlier, until it finds nothing better. (By 3 the earliest
    D is also the best among the groupings that remain.) Tails are short, so the first recursion is nearly always the
    last.
    """
    groups: Groups = (GroupEnd(pipeline.num_layers, option),)
    best_s = np.inf
    while True:
        found, last_s = _fuse_before(pipeline, option, best_s)
        if last_s >= best_s * (1 - ROUNDING):
            return groups, float(best_s)
        groups, best_s = found, pipeline.finish_s(found)
        if best_s <= last_s * (1 + ROUNDING):
            return groups, float(best_s)


def _fuse_before(pipeline: Pipeline, option: int, limit_s: float) -> tuple[Groups, float]:
    """Return the groups, each done earlier than `limit_s`, of which the last is done first, and the time of that.

    Without such groups the time is infinite.
    """
    cost, N = pipeline.costs[option], pipeline.num_layers
    backward_s, numel = (np.concatenate(([0.0], np.cumsum(each))) for each in (pipeline.backward_s, pipeline.numel))
    # Row k, column j: a group of the layers after j up to k.
    numels = numel[:, None] - numel[None, :]
    a_s, b_s = cost.terms[::2], cost.terms[1::2]
    _, network_s, lead_s, tail_s, alone_s = (a + b * numels for a, b in zip(a_s, b_s, strict=True))
    network_s[np.triu_indices(N + 1)] = np.inf
    one_group_s = backward_s + cost.compute_b_s_per_element * numel

    finish_s = np.full(N + 1, np.inf)
    finish_s[0] = 0.0
    last_starts: list[np.ndarray] = []
    best_s, best_y = np.inf, 0
    for y in range(1, N + 1):
        compute_s = one_group_s + y * cost.compute_a_s
        first_s = backward_s[1] + cost.compute_s(numel[1])
        all_s = y * cost.network_a_s + cost.network_b_s_per_element * numel[N]
        least_s = max(compute_s[N] + network_s[N, N - 1], first_s + all_s) + pipeline.after_s
        if least_s >= best_s:
            break
        # y groups need y layers, and y - 1 of them lie before the last group.
        part = np.s_[y:, y - 1 : N]
        before_s, ready_s = finish_s[None, y - 1 : N], compute_s[y:, None]
        done_s = np.maximum(before_s + network_s[part] + tail_s[part], ready_s + alone_s[part])
        table = np.maximum(before_s, ready_s + lead_s[part]) + network_s[part]
        table[done_s >= limit_s * (1 - ROUNDING)] = np.inf
        table[-1] = np.maximum(table[-1] + pipeline.after_s, done_s[-1])
        starts = table.argmin(axis=1)
        finish_s = np.concatenate((np.full(y, np.inf), table[np.arange(len(starts)), starts]))
        last_starts.append(np.concatenate((np.zeros(y, dtype=int), starts + y - 1)))
        if finish_s[N] < best_s:
            best_s, best_y = float(finish_s[N]), y

    ends = [N]
    for starts in reversed(last_starts[1:best_y]):
        ends.append(int(starts[ends[-1]]))
    return tuple(GroupEnd(end, option) for end in reversed(ends)), best_s
