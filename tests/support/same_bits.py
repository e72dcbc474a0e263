"""Comparison of tensors bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_same(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Fail unless both hold the same bits; all NaNs count as equal."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} != {tuple(expected.shape)}"
    left, right = (_bits_of(x) if x.is_floating_point() else x for x in (actual, expected))
    different = (left != right).nonzero().view(-1)
    first = different[:5]
    pairs = f"{actual[first].tolist()} != {expected[first].tolist()}"
    assert not different.numel(), f"{what}: {different.numel()} differ, at {first.tolist()}: {pairs}"


def _bits_of(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)
