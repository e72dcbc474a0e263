"""The CUDA kernels of selection, in the emulator and on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cuda_emulator import Emulator
from support.same_bits import assert_same
from support.sparse_checks import (
    CPU,
    CUDA_KINDS,
    CUDA_SIZES,
    DTYPES,
    HUGE,
    KEY,
    LARGE,
    SEVERAL_BLOCKS,
    check_collect,
    check_encode,
    check_topk,
    count_of,
    emulated,
    gradient,
    outputs,
    without_waiting,
)
from torch import Tensor

from cgx_ray.runtime_ext import cuda_launch, cuda_sparse, reference, sparse


@pytest.mark.usefixtures("emulated_cuda")
@pytest.mark.parametrize("kind", CUDA_KINDS)
def test_topk_selects_what_the_reference_selects(kind: str) -> None:
    for numel in CUDA_SIZES:
        for num_kept in {0, min(numel, 1), numel // 10, numel}:
            check_topk(gradient(kind, numel), num_kept)


@pytest.mark.usefixtures("emulated_cuda")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(("special", dtype) for dtype in DTYPES),
        *(pytest.param("normal", dtype, marks=pytest.mark.slow) for dtype in DTYPES),
    ],
)
def test_topk_keeps_in_next_what_it_does_not_send(kind: str, dtype: torch.dtype) -> None:
    for numel in (0, 1, 129, 4099):
        num_kept = -(-numel // 10)
        grad_N = gradient(kind, numel).to(dtype)
        residual_N = gradient(kind, numel)
        check_topk(grad_N, num_kept)
        check_topk(grad_N, num_kept, residual_N)
        check_topk(grad_N, num_kept, None, torch.full((numel,), -77.0))
        check_topk(grad_N, num_kept, residual_N, torch.full((numel,), -77.0))


@pytest.mark.usefixtures("emulated_cuda")
def test_a_message_in_one_call_is_what_three_calls_make() -> None:
    for numel, num_kept in ((0, 0), (1, 1), (4099, 41)):
        check_encode(torch.randn(numel), num_kept, torch.randn(numel), torch.full((numel,), -77.0))


@pytest.mark.usefixtures("emulated_cuda")
@pytest.mark.parametrize("num_kept", [0, 50, 4099])
def test_next_may_be_the_residual(num_kept: int) -> None:
    grad_N, residual_N = torch.randn(4099), torch.randn(4099)
    expected_N = grad_N + residual_N
    expected = outputs(num_kept, CPU)
    reference.topk_select(expected_N, *expected)
    expected_N[expected[0].long()] = 0.0
    index_K, value_K = outputs(num_kept, CPU)
    sparse.topk_select(grad_N, index_K, value_K, residual_N=residual_N, next_N=residual_N)
    assert_same(index_K, expected[0], "index")
    assert_same(value_K, expected[1], "value")
    assert_same(residual_N, expected_N, "next")


@pytest.mark.usefixtures("emulated_cuda")
def test_tensors_with_gaps_give_the_same_and_keep_what_is_between() -> None:
    grad_N, residual_N, next_2N = torch.randn(2000)[::2], torch.randn(3000)[::3], torch.full((2000,), 5.0)
    check_topk(grad_N, 30, residual_N, next_2N[::2])
    assert (next_2N[1::2] == 5).all()
    index_2K, value_2K = torch.full((60,), 3, dtype=torch.int32), torch.full((60,), 3.0)
    sparse.topk_select(grad_N, index_2K[::2], value_2K[::2])
    expected = outputs(30, CPU)
    reference.topk_select(grad_N.contiguous(), *expected)
    assert_same(index_2K[::2], expected[0], "index")
    assert_same(value_2K[::2], expected[1], "value")
    assert (index_2K[1::2] == 3).all()
    assert (value_2K[1::2] == 3).all()


def _sampled_rows(numel: int) -> Tensor:
    """Return (N,) bool: the elements of the sample, a row of 32 in each tile of 1024."""
    index_N = torch.arange(numel)
    return reference.lowbias32(index_N // 1024) % 32 == index_N // 32 % 32


@pytest.mark.parametrize("next_mode", ["none", "next"])
@pytest.mark.parametrize("where", ["everywhere", "sampled", "not sampled"])
def test_a_guess_from_a_sample_changes_no_selection(
    where: str, next_mode: str, emulated_cuda: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Large elements inside the sample make the guess too high, large elements outside make it too low.
    numel, num_kept = 20_011, 2_000
    monkeypatch.setattr(cuda_sparse, "_MIN_SAMPLED", 0)
    grad_N = torch.randn(numel)
    if where != "everywhere":
        grad_N[_sampled_rows(numel) == (where == "sampled")] *= 1e3
    next_N = torch.full((numel,), -77.0) if next_mode == "next" else None
    launches = emulated_cuda.num_launches
    check_topk(grad_N, num_kept, torch.randn(numel), next_N)
    assert emulated_cuda.num_launches - launches == 7  # sample, 4 splits, the retry, write


@pytest.mark.usefixtures("emulated_cuda")
@pytest.mark.parametrize("max_blocks", [1, 3])
def test_the_number_of_blocks_changes_no_selection(max_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_launch, "max_blocks", lambda *_: max_blocks)
    grad_N = (torch.randn(SEVERAL_BLOCKS) * 3).round()
    check_topk(grad_N, 5_000, torch.zeros(SEVERAL_BLOCKS), torch.empty(SEVERAL_BLOCKS))
    check_collect(grad_N, (0x40C00000, 0x3F800000), 10_000, KEY)
    assert_same(sparse.magnitude_histogram(grad_N), reference.magnitude_histogram(grad_N), "histogram")


@pytest.mark.usefixtures("emulated_cuda")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CUDA_KINDS)
def test_the_histogram_counts_every_magnitude(kind: str, dtype: torch.dtype) -> None:
    for numel in CUDA_SIZES:
        grad_N = gradient(kind, numel).to(dtype)
        expected = reference.magnitude_histogram(grad_N.to(torch.float32))
        assert_same(sparse.magnitude_histogram(grad_N), expected, f"{numel} elements")


@pytest.mark.usefixtures("emulated_cuda")
@pytest.mark.parametrize(
    "num_rounds", [n if n in (1, 2, 5, 13, 30, 31) else pytest.param(n, marks=pytest.mark.slow) for n in range(1, 32)]
)
def test_bisected_thresholds_are_those_of_as_many_halvings(num_rounds: int) -> None:
    for kind, num_kept in (("normal", 10), ("ties", 300), ("special", 1), ("special", 0), ("all equal", 1000)):
        grad_N = gradient(kind, 1000)
        expected = reference.bisect_thresholds(grad_N, num_kept, num_rounds)
        thresholds_2 = sparse.bisect_thresholds(grad_N, num_kept, num_rounds)
        assert tuple(thresholds_2.tolist()) == expected, f"{kind}, {num_kept} of 1000"
    thresholds_2 = sparse.bisect_thresholds(torch.empty(0), 0, num_rounds)
    assert tuple(thresholds_2.tolist()) == reference.bisect_thresholds(torch.empty(0), 0, num_rounds)


@pytest.mark.usefixtures("emulated_cuda")
@pytest.mark.parametrize("kind", CUDA_KINDS)
def test_fitted_thresholds_are_those_of_the_reference(kind: str) -> None:
    for ratios in ((), (4.6,), (1.4, 1.4, 1.8), (200.0, 100.0)):
        for numel in (0, 1, 4099):
            grad_N = gradient(kind, numel)
            counts = reference.magnitude_histogram(grad_N)
            for num_kept in {0, min(1, numel), numel // 100, numel}:
                expected = [sparse.NEVER, reference.sidco_threshold(counts, ratios, num_kept)]
                thresholds_2 = sparse.sidco_thresholds(grad_N, ratios, num_kept)
                assert thresholds_2.tolist() == expected, f"{num_kept} of {numel}, ratios {ratios}"


@pytest.mark.usefixtures("emulated_cuda")
@emulated
@given(
    st.sampled_from(sorted(CUDA_KINDS)),
    st.sampled_from(DTYPES),
    st.integers(0, 3000),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, (1 << 32) - 1),
)
def test_collect_writes_what_the_reference_writes(
    kind: str, dtype: torch.dtype, numel: int, sure_share: float, maybe_share: float, room: float, key: int
) -> None:
    grad_N = gradient(kind, numel).to(dtype)
    magnitude_N = reference.magnitudes(grad_N.to(torch.float32)).sort().values.tolist()
    # Each threshold is the magnitude of an element, or one that no element reaches.
    sure, maybe = (
        magnitude_N[int(share * numel)] if int(share * numel) < numel else sparse.NEVER
        for share in (sure_share, maybe_share)
    )
    num_sure = sum(magnitude >= sure for magnitude in magnitude_N)
    check_collect(grad_N, (sure, maybe), num_sure + round(room * (numel - num_sure)), key)


@pytest.mark.usefixtures("emulated_cuda")
def test_more_sure_elements_than_there_is_room_for_are_cut_off() -> None:
    grad_N, count_1 = torch.randn(3000), count_of(-1)
    index_K, value_K = outputs(10, CPU)
    sparse.collect(grad_N, torch.tensor([0, 0]), index_K, value_K, count_1, key=KEY)
    assert index_K.tolist() == list(range(10))
    assert int(count_1) == 10
    assert_same(value_K, grad_N[:10], "value")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [*CUDA_SIZES, LARGE, HUGE])
def test_the_device_selects_what_the_reference_selects(numel: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    for kind in CUDA_KINDS if numel < HUGE else ("normal", "ties"):
        grad_N, residual_N = gradient(kind, numel, device).to(dtype), gradient(kind, numel, device)
        for num_kept in {min(numel, 1), numel // 100, numel // 2}:
            check_topk(grad_N, num_kept)
            check_topk(grad_N, num_kept, residual_N, torch.empty(numel, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [*CUDA_SIZES, LARGE, HUGE])
def test_the_device_finds_the_thresholds_of_the_reference(numel: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    for kind in CUDA_KINDS if numel < HUGE else ("normal", "ties"):
        grad_N = gradient(kind, numel, device).to(dtype)
        float_N, num_kept = grad_N.to(torch.float32), numel // 100
        ratios = (1.5, 1.5, 1.6)
        histogram, fitted_2, bisected_2 = without_waiting(
            lambda grad_N=grad_N, num_kept=num_kept, ratios=ratios: (
                sparse.magnitude_histogram(grad_N),
                sparse.sidco_thresholds(grad_N, ratios, num_kept),
                sparse.bisect_thresholds(grad_N, num_kept, 25),
            ),
            device,
        )
        counts = reference.magnitude_histogram(float_N)
        assert_same(histogram, counts, f"histogram of {kind}")
        fitted = reference.sidco_threshold(counts, ratios, num_kept)
        assert fitted_2.tolist() == [sparse.NEVER, fitted], kind
        bisected = reference.bisect_thresholds(float_N, num_kept, 25)
        assert tuple(bisected_2.tolist()) == bisected, kind
        for thresholds in (bisected, (sparse.NEVER, fitted)):
            check_collect(grad_N, thresholds, num_kept, KEY)
