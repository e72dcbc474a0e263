"""Selection of the elements that a sparse codec sends: exactly K, or those that pass thresholds.

N elements of a gradient, K kept elements
"""

from __future__ import annotations

import torch
from torch import Tensor

from .bits import magnitudes
from .hashes import random_below


def topk_select(grad_N: Tensor, index_K: Tensor, value_K: Tensor) -> None:
    """Write the K elements of `grad_N`, float32, that are largest in magnitude, in ascending order of index.

    Among equal magnitudes the lowest indices win.
    """
    order_N = torch.sort(magnitudes(grad_N), descending=True, stable=True).indices
    kept_K = order_N[: index_K.numel()].sort().values
    index_K.copy_(kept_K)
    value_K.copy_(grad_N[kept_K])


def collect(grad_N: Tensor, thresholds: tuple[int, int], key: int, index_K: Tensor, value_K: Tensor) -> int:
    """Write the elements that pass `thresholds` (sure, maybe), ascending in index, then zeros; return their number.

    1. Every magnitude >= sure is written. There are at most K of them.
    2. Magnitudes in [maybe, sure) fill the remaining places. If there are too many, a run of them in index order is
       written. It starts at a random one, given by `key`, and wraps around at the end.
    """
    sure, maybe = thresholds
    magnitude_N = magnitudes(grad_N).long()
    is_sure_N = magnitude_N >= sure
    is_maybe_N = (magnitude_N >= maybe) & ~is_sure_N
    num_maybe = int(is_maybe_N.sum())
    room = index_K.numel() - int(is_sure_N.sum())
    assert room >= 0, "more than K elements are sure"
    rank_N = is_maybe_N.cumsum(0) - 1
    start = random_below(key, num_maybe)
    chosen_N = is_sure_N | (is_maybe_N & ((rank_N - start) % max(num_maybe, 1) < room))
    kept = chosen_N.nonzero().view(-1)
    index_K.zero_()
    value_K.zero_()
    index_K[: kept.numel()] = kept.to(torch.int32)
    value_K[: kept.numel()] = grad_N[kept]
    return kept.numel()
