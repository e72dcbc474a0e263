"""Passes over whole gradients: native against the reference, and whether NaN and Inf are found wherever they are."""

from __future__ import annotations

import math

import pytest
import torch
from support.same_bits import assert_same
from support.sparse_checks import DTYPES, KINDS, LARGE, SIZES, gradient
from torch import Tensor

from cgx_ray.runtime_ext import ops, reference


def _added(
    kernel: str, grad_N: Tensor, memory: tuple[Tensor, Tensor | None], scale: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Return momentum and residual of the next step by the kernel or by the reference."""
    next_momentum_N, next_N = torch.full((2, grad_N.numel()), -77.0)
    if kernel == "native":
        ops.add_momentum(grad_N, *memory, next_momentum_N, next_N, factor=0.9, scale=scale)
    else:
        reference.add_momentum(grad_N, *memory, next_momentum_N, next_N, 0.9, scale)
    return next_momentum_N, next_N


@pytest.mark.long
@pytest.mark.parametrize("numel", [*SIZES, LARGE])
@pytest.mark.parametrize("kind", KINDS)
def test_momentum_equals_the_reference_bit_for_bit(kind: str, numel: int) -> None:
    grad_N, momentum_N = gradient(kind, numel), gradient("normal", numel)
    for residual_N in (None, gradient(kind, numel)):
        for scale in (1.0, 0.3, torch.tensor(0.3)):
            actual, expected = (
                _added(kernel, grad_N, (momentum_N, residual_N), scale) for kernel in ("native", "reference")
            )
            for name, left, right in zip(("momentum", "residual"), actual, expected, strict=True):
                assert_same(left, right, f"{name}, residual {residual_N is not None}, scale {scale}")


def test_momentum_takes_strided_memory_and_half_precision_gradients() -> None:
    for dtype in DTYPES:
        grad_N, momentum_N = torch.randn(1000).to(dtype)[::2], torch.randn(1000)[::2]
        expected = _added("reference", grad_N.float(), (momentum_N, momentum_N), 1.0)
        for memory_N in (momentum_N, momentum_N.contiguous()):
            for left, right in zip(_added("native", grad_N, (memory_N, memory_N), 1.0), expected, strict=True):
                assert_same(left, right, str(dtype))


@pytest.mark.parametrize("numel", [*SIZES, LARGE])
@pytest.mark.parametrize("kind", KINDS)
def test_poison_equals_the_reference(kind: str, numel: int) -> None:
    grad_N = gradient(kind, numel)
    expected = float(reference.poison(grad_N))
    assert str(abs(float(ops.poison(grad_N)))) == str(abs(expected))
    sent_K = torch.tensor([1.5, 2.5])
    ops.add_poison(grad_N, sent_K)
    assert_same(sent_K, torch.tensor([math.nan if math.isnan(expected) else 1.5, 2.5]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_poison_finds_one_element_wherever_it_is(value: float) -> None:
    for numel in (1, 15, 16, 17, 200):
        for position in range(numel):
            grad_N = torch.randn(numel)
            grad_N[position] = value
            assert math.isnan(ops.poison(grad_N)), f"element {position} of {numel}"
    for position in range(0, LARGE, LARGE // 7):
        grad_N = torch.randn(LARGE)
        grad_N[position] = value
        assert math.isnan(ops.poison(grad_N)), f"element {position} of {LARGE}"


def test_poison_takes_matrices_gaps_and_half_precision() -> None:
    for grad in (torch.randn(9, 5), torch.randn(9, 5).t()[::2], *(torch.randn(99).to(dtype) for dtype in DTYPES)):
        assert float(ops.poison(grad)) == 0
        grad[2] = math.inf
        assert math.isnan(ops.poison(grad)), f"{tuple(grad.shape)} {grad.dtype}"


def test_poison_leaves_an_empty_message_alone() -> None:
    ops.add_poison(torch.empty(0), torch.empty(0))
