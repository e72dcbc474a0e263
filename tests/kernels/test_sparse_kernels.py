"""The CPU kernels that select elements: native against the reference bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.same_bits import assert_same
from support.sparse_checks import (
    KEY,
    KINDS,
    SIZES,
    check_collect,
    check_encode,
    check_topk,
    gradient,
    kept_counts,
    outputs,
)
from torch import Tensor

from cgx_ray.runtime_ext import reference, sparse


def _topk(grad_N: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
    index_K, value_K = outputs(num_kept)
    sparse.topk_select(grad_N, index_K, value_K)
    return index_K, value_K


def _brute_force_topk(grad_N: Tensor, num_kept: int) -> list[int]:
    def order(index: int) -> tuple[bool, float, int]:
        x = grad_N[index].item()
        return (not math.isnan(x), 0.0 if math.isnan(x) else -abs(x), index)

    return sorted(sorted(range(grad_N.numel()), key=order)[:num_kept])


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_topk_equals_the_reference(kind: str, numel: int) -> None:
    for num_kept in kept_counts(numel):
        check_topk(gradient(kind, numel), num_kept)


@pytest.mark.parametrize("kind", KINDS)
def test_topk_and_its_reference_equal_a_brute_force_sort(kind: str) -> None:
    grad_N = gradient(kind, 1000)
    for num_kept in (1, 3, 27, 28, 100, 999, 1000):
        assert _topk(grad_N, num_kept)[0].tolist() == _brute_force_topk(grad_N, num_kept)


@settings(max_examples=200, deadline=None)
@given(
    levels=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0000001, 1e-45, math.inf, -math.inf, math.nan])),
    share=st.floats(0, 1),
)
def test_topk_gives_ties_to_the_lowest_index(levels: list[float], share: float) -> None:
    grad_N = torch.tensor(levels)
    num_kept = math.floor(share * len(levels))
    assert _topk(grad_N, num_kept)[0].tolist() == _brute_force_topk(grad_N, num_kept)


def test_topk_takes_strided_unaligned_and_half_precision_gradients() -> None:
    check_topk(torch.randn(10_000)[::2], 50)
    check_topk(torch.randn(5001)[1:], 50)
    check_topk(torch.randn(5000).bfloat16(), 50)
    check_topk(torch.randn(5000).half(), 50)


@pytest.mark.parametrize("num_kept", [1, 100, 1000, 4000])
def test_topk_is_exact_where_a_sample_misleads(num_kept: int) -> None:
    numel = 1 << 17
    small_N = torch.randn(numel) * 1e-6
    for begin, end in ((0, 4000), (numel - 4000, numel), (50_000, 50_001), (60_000, 60_900)):
        grad_N = small_N.clone()
        grad_N[begin:end] += 1.0
        check_topk(grad_N, num_kept)
        check_topk(1.0 - grad_N, num_kept)


@settings(max_examples=60, deadline=None)
@given(
    period=st.integers(1, 5000),
    width=st.integers(1, 64),
    offset=st.integers(0, 5000),
    share=st.floats(0, 0.3),
)
def test_topk_is_exact_on_periodic_gradients(period: int, width: int, offset: int, share: float) -> None:
    numel = 20_000
    is_large_N = (torch.arange(numel) + offset) % period < width
    grad_N = torch.randn(numel, generator=torch.Generator().manual_seed(period)) * torch.where(is_large_N, 1.0, 1e-4)
    check_topk(grad_N, math.floor(share * numel))


def test_topk_of_a_million_elements_equals_the_reference() -> None:
    grad_N = torch.randn((1 << 20) + 3)
    for num_kept in (1, 1 << 10, 10_486, 1 << 18, 1 << 20):
        check_topk(grad_N, num_kept)


@pytest.mark.parametrize("kind", ["normal", "ties", "mostly zero", "nan", "any bits"])
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("num_threads", [1, 3], indirect=True)
@pytest.mark.usefixtures("num_threads")
def test_topk_adds_the_residual_and_leaves_in_next_what_was_not_selected(kind: str, numel: int) -> None:
    grad_N, residual_N = gradient(kind, numel), torch.randn(numel) * 0.5
    before_N = residual_N.clone()
    for num_kept in kept_counts(numel):
        in_place_N = residual_N.clone()
        check_topk(grad_N, num_kept, residual_N, torch.full((numel,), 7.0))
        check_topk(grad_N, num_kept, in_place_N, in_place_N)
        check_topk(grad_N, num_kept, residual_N)
        assert_same(residual_N, before_N, "the residual was changed")


@pytest.mark.parametrize("numel", SIZES)
def test_topk_without_a_residual_leaves_the_rest_of_the_gradient_in_next(numel: int) -> None:
    grad_N = torch.where(torch.arange(numel) % 5 == 0, -0.0, torch.randn(numel))
    for num_kept in kept_counts(numel):
        check_topk(grad_N, num_kept, None, torch.full((numel,), 7.0))


@pytest.mark.long
@pytest.mark.parametrize("num_threads", [2], indirect=True)
@pytest.mark.usefixtures("num_threads")
def test_next_of_a_gradient_larger_than_caches_is_the_same_at_any_alignment() -> None:
    numel, num_kept = (1 << 22) + 5, 41_943
    grad_N, residual_N = torch.randn(numel), torch.randn(numel) * 0.5
    for owed_N in (residual_N, None):
        for offset in (0, 1, 4):
            buffer = torch.full((numel + 8,), 7.0)
            check_topk(grad_N, num_kept, owed_N, buffer[offset : offset + numel])
            assert (buffer[:offset] == 7).all()
            assert (buffer[offset + numel :] == 7).all(), "wrote past the end"


def test_topk_with_strided_residual_next_and_outputs_gives_what_contiguous_ones_get() -> None:
    grad_N, residual_N, next_N = torch.randn(1000), torch.randn(1000), torch.zeros(1000)
    expected = outputs(50)
    sparse.topk_select(grad_N, *expected, residual_N=residual_N, next_N=next_N)
    strided = [torch.zeros(2 * x.numel(), dtype=x.dtype)[::2].copy_(x) for x in (residual_N, next_N, *expected)]
    sparse.topk_select(grad_N, strided[2], strided[3], residual_N=strided[0], next_N=strided[1])
    for actual, wanted in zip(strided[1:], (next_N, *expected), strict=True):
        assert_same(actual.contiguous(), wanted)


def _uneven_gradient() -> Tensor:
    """Return enough elements for five threads of several blocks each, with all large elements in one thread's part."""
    grad_N = torch.randn(300_007)
    grad_N[100_000:110_000] *= 100
    grad_N[150_000:200_000] = 2.5
    return grad_N


@pytest.mark.long
@pytest.mark.parametrize("num_threads", [2, 3, 5], indirect=True)
@pytest.mark.usefixtures("num_threads")
def test_results_do_not_depend_on_the_number_of_threads() -> None:
    grad_N, residual_N = _uneven_gradient(), torch.randn(300_007)
    assert_same(sparse.magnitude_histogram(grad_N), reference.magnitude_histogram(grad_N))
    for num_kept in (0, 3000, 200_000, 300_007):
        check_topk(grad_N, num_kept)
        check_topk(grad_N, num_kept, residual_N, torch.zeros(300_007))
        for num_rounds in (3, 31):
            sure, maybe = sparse.bisect_thresholds(grad_N, num_kept, num_rounds).tolist()
            assert (sure, maybe) == reference.bisect_thresholds(grad_N, num_kept, num_rounds)
            for key in (0, 1, KEY):
                check_collect(grad_N, (sure, maybe), num_kept, key)


@pytest.mark.parametrize(("numel", "num_kept"), [(0, 0), (1, 1), (130, 40), (1000, 10), (9001, 90)])
def test_a_message_in_one_call_is_what_three_calls_make(numel: int, num_kept: int) -> None:
    grad_N, residual_N = torch.randn(numel), torch.randn(numel)
    check_encode(grad_N, num_kept)
    check_encode(grad_N.half(), num_kept, residual_N)
    check_encode(torch.randn(2 * numel)[::2], num_kept, None, torch.full((numel,), -77.0))
    check_encode(grad_N, num_kept, residual_N, residual_N.clone())


def test_wrong_arguments_are_refused_by_name() -> None:
    grad_N, (index_K, value_K), count_1 = torch.randn(128), outputs(3), torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="cannot keep 129 of 128"):
        sparse.topk_select(grad_N, *outputs(129))
    with pytest.raises(ValueError, match="index_K has 3 elements, value_K 4"):
        sparse.topk_select(grad_N, index_K, torch.empty(4))
    with pytest.raises(TypeError, match=r"index_K is torch\.int64"):
        sparse.topk_select(grad_N, index_K.long(), value_K)
    with pytest.raises(ValueError, match="next_N has 3 elements; give 128"):
        sparse.topk_select(grad_N, index_K, value_K, next_N=value_K)
    with pytest.raises(TypeError, match=r"residual_N is torch\.float16"):
        sparse.topk_select(grad_N, index_K, value_K, residual_N=grad_N.half())
    with pytest.raises(ValueError, match="num_rounds 32 is not allowed; give 1 to 31"):
        sparse.bisect_thresholds(grad_N, 3, 32)
    with pytest.raises(ValueError, match="cannot keep 129 of 128"):
        sparse.bisect_thresholds(grad_N, 129, 25)
    with pytest.raises(ValueError, match="stride 0 is not allowed"):
        sparse.sample_thresholds(grad_N, 3, 0, KEY)
    with pytest.raises(ValueError, match="key -1 is not a 32-bit number"):
        sparse.collect(grad_N, torch.zeros(2, dtype=torch.int64), index_K, value_K, count_1, key=-1)
    with pytest.raises(TypeError, match=r"thresholds_2 is torch\.float32"):
        sparse.collect(grad_N, torch.zeros(2), index_K, value_K, count_1, key=KEY)
    with pytest.raises(ValueError, match="cannot keep 3 of 2 elements"):
        sparse.random_indices(2, index_K, key=KEY)
    with pytest.raises(ValueError, match="out has 9 elements; give 8"):
        sparse.pack_indices(index_K, count_1, 128, torch.empty(9, dtype=torch.uint8))
