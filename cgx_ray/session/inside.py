"""Measure the link between the ranks of a node when they attach: trainings show it only while plans use it.

L ranks of a node, M bytes of a group
"""

from __future__ import annotations

import itertools
import math
import time

import torch

from cgx_ray.monitors.sample import InsideLink
from cgx_ray.runtime_ext.shm import LocalGroup

# Elements of float32 of a group that shows the latency, and of one that shows the rate: 8 MiB fill no usual cache.
SMALL_NUMEL, LARGE_NUMEL = 1 << 10, 2 << 20
# The fastest counts: a late rank, or one without a processor, makes all others wait.
NUM_ROUNDS = 7
# Least share of the large group's time that is its bytes': where that is wrong, other work was in the way.
MIN_SHARE = 0.1


def measure_inside(local: LocalGroup) -> InsideLink:
    """Return the link as the planner uses it: sums inside a node take 2 alpha + 2 (L-1)/L M beta seconds.

    Call it on all ranks of the node. It takes some 50 ms, as other nodes measure at the same time. Raises RuntimeError
    as `LocalGroup` does.
    """
    small_s, large_s = _best_s(local, SMALL_NUMEL), _best_s(local, LARGE_NUMEL)
    num_bytes = 2 * (local.size - 1) / local.size * 4 * (LARGE_NUMEL - SMALL_NUMEL)
    beta = max(large_s - small_s, MIN_SHARE * large_s) / num_bytes
    return InsideLink(alpha_s=small_s / 2, beta_s_per_byte=beta)


def _best_s(local: LocalGroup, numel: int) -> float:
    """Return the least seconds of a sum of `numel` elements inside the node: a reduce-scatter and an all-gather."""
    values_N = torch.zeros(numel, dtype=torch.float32, device="cpu")
    cuts = [numel * place // local.size for place in range(local.size + 1)]
    bounds = list(itertools.pairwise(cuts))
    best_s = math.inf
    for _ in range(NUM_ROUNDS):
        start_s = time.perf_counter()
        local.reduce_scatter(values_N, bounds)
        local.all_gather(values_N, bounds)
        best_s = min(best_s, time.perf_counter() - start_s)
    return best_s
