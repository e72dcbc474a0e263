"""Measure the link between the ranks of a node when they attach: trainings show it only while plans use it.

L ranks of a node, M bytes of a group
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from cgx_ray.collectives.transport.vendor_group import VendorGroup
from cgx_ray.monitors.sample import InsideLink
from cgx_ray.runtime_ext.shm import LocalGroup

# Elements of float32 of a group that shows the latency, and of one that shows the rate: 8 MiB fill no usual cache.
SMALL_NUMEL, LARGE_NUMEL = 1 << 10, 2 << 20
# The fastest counts: a late rank, or one without a processor, makes all others wait.
NUM_ROUNDS = 7
# Least share of the large group's time that is its bytes': where that is wrong, other work was in the way.
MIN_SHARE = 0.1


def measure_inside(local: LocalGroup | VendorGroup, device: torch.device) -> InsideLink:
    """Return the link as the planner uses it: sums inside a node take 2 alpha + 2 (L-1)/L M beta seconds.

    device  of the gradients, for groups of the vendor, which are timed by the marks of their stream

    Call it on all ranks of the node. It takes some 50 ms, as other nodes measure at the same time. Raises RuntimeError
    as `LocalGroup` does.
    """
    small_s, large_s = (_best_s(local, numel, device) for numel in (SMALL_NUMEL, LARGE_NUMEL))
    num_bytes = 2 * (local.size - 1) / local.size * 4 * (LARGE_NUMEL - SMALL_NUMEL)
    beta = max(large_s - small_s, MIN_SHARE * large_s) / num_bytes
    on_device = isinstance(local, VendorGroup)
    return InsideLink(alpha_s=small_s / 2, beta_s_per_byte=beta, is_of_device=on_device)


def _best_s(local: LocalGroup | VendorGroup, numel: int, device: torch.device) -> float:
    """Return the least seconds of a sum of `numel` elements inside the node: a reduce-scatter and an all-gather."""
    values_N = torch.zeros(numel, dtype=torch.float32, device="cpu" if isinstance(local, LocalGroup) else device)
    cuts = [numel * place // local.size for place in range(local.size + 1)]
    bounds = list(itertools.pairwise(cuts))
    return min(_seconds(local, values_N, bounds) for _ in range(NUM_ROUNDS))


def _seconds(local: LocalGroup | VendorGroup, values_N: Tensor, bounds: Sequence[tuple[int, int]]) -> float:
    if isinstance(local, VendorGroup):
        begin = local.mark()
        *_, end = (*local.reduce_scatter(values_N, bounds), *local.all_gather(values_N, bounds))
        end.wait()
        return end.seconds_since(begin)
    start_s = time.perf_counter()
    local.reduce_scatter(values_N, bounds)
    local.all_gather(values_N, bounds)
    return time.perf_counter() - start_s
