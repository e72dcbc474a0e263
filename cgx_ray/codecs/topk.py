"""Exact top-k over a whole group."""

from __future__ import annotations

import torch
from torch import Tensor

from cgx_ray.errors import WireError
from cgx_ray.plan import CodecSpec
from cgx_ray.runtime_ext import ops


class TopK:
    """Sends the `density` largest magnitudes: K int32 indices in ascending order, then K float32 values.

    NaN counts as the largest magnitude and Inf as the next, so that they are always sent.
    """

    granule = 1
    needs_feedback = True

    def __init__(self, spec: CodecSpec) -> None:
        self.spec = spec

    def encode(self, grad_N: Tensor, payload: Tensor, key: int) -> None:
        index_K, value_K = split(payload)
        ops.topk_select(grad_N, index_K, value_K)

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool) -> None:
        index_K, value_K = split(payload)
        check_indices(index_K, out_N.numel())
        if not add:
            out_N.zero_()
        out_N.index_add_(0, index_K, value_K)


def split(payload: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a top-k payload, as views."""
    half = payload.numel() // 2
    return payload[:half].view(torch.int32), payload[half:].view(torch.float32)


def check_indices(index_K: Tensor, numel: int) -> None:
    """Raise WireError unless `index_K` ascends inside [0, numel)."""
    if index_K.numel() == 0:
        return
    ascending = bool((index_K[1:] > index_K[:-1]).all())
    if not ascending or int(index_K[0]) < 0 or int(index_K[-1]) >= numel:
        raise WireError(f"top-k indices do not ascend inside [0, {numel}); the message is broken")
