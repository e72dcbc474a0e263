"""The CPU kernels that find thresholds and collect elements: native against the reference, and what they promise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.same_bits import assert_same
from support.sparse_checks import KEY, KINDS, SIZES, check_collect, gradient, kept_counts, outputs
from torch import Tensor

from cgx_ray.runtime_ext import reference, sparse


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_histogram_equals_the_reference_and_counts_every_element(kind: str, numel: int) -> None:
    grad_N = gradient(kind, numel)
    counts = sparse.magnitude_histogram(grad_N)
    assert_same(counts, reference.magnitude_histogram(grad_N))
    assert counts.sum() == numel


def test_histogram_takes_strided_unaligned_and_half_precision_gradients() -> None:
    for grad_N in (torch.randn(1000)[::2], torch.randn(501)[1:], torch.randn(500).bfloat16(), torch.randn(500).half()):
        expected = reference.magnitude_histogram(grad_N.float().contiguous())
        assert_same(sparse.magnitude_histogram(grad_N), expected)


@pytest.mark.parametrize("num_rounds", range(1, 32))
@pytest.mark.parametrize("kind", KINDS)
def test_bisection_equals_the_reference_at_every_number_of_rounds(kind: str, num_rounds: int) -> None:
    for numel in (0, 1, 129, 5003):
        grad_N = gradient(kind, numel)
        for num_kept in kept_counts(numel):
            actual = tuple(sparse.bisect_thresholds(grad_N, num_kept, num_rounds).tolist())
            expected = reference.bisect_thresholds(grad_N, num_kept, num_rounds)
            assert actual == expected, f"{num_kept} of {numel}: {actual} != {expected}"


def test_bisection_brackets_the_kth_largest_magnitude_and_31_rounds_find_it() -> None:
    grad_N = torch.randn(10_000)
    ordered_N = reference.magnitudes(grad_N).sort(descending=True).values.tolist()
    for num_kept in (1, 10, 100, 5000):
        for num_rounds in (5, 12, 25, 31):
            sure, maybe = sparse.bisect_thresholds(grad_N, num_kept, num_rounds).tolist()
            assert sure - maybe == 1 << 31 - num_rounds
            # At most the K largest reach `sure`; the next one does not.
            assert maybe <= ordered_N[num_kept] < sure
            assert sum(magnitude >= sure for magnitude in ordered_N) <= num_kept
            assert sum(magnitude >= maybe for magnitude in ordered_N) > num_kept
        assert maybe == ordered_N[num_kept]


def test_sample_threshold_of_every_element_is_the_kth_largest_and_of_a_tenth_is_near_it() -> None:
    grad_N = torch.randn(100_000)
    magnitude_N = reference.magnitudes(grad_N)
    for num_kept in (1, 1000, 50_000):
        sure, maybe = sparse.sample_thresholds(grad_N, num_kept, 1, KEY).tolist()
        assert sure == sparse.NEVER
        assert maybe == magnitude_N.sort(descending=True).values[num_kept - 1]
        counts = []
        for key in range(20):
            maybe = int(sparse.sample_thresholds(grad_N, num_kept, 10, key)[1])
            counts.append(int((magnitude_N >= maybe).sum()))
        # The share of all elements above the k-th largest of s samples has variance k (s - k) / s^3. Six sigma.
        num_sampled, k = 10_000, max(num_kept // 10, 1)
        sigma = math.sqrt(k * (num_sampled - k) / num_sampled**3) * 100_000
        limit = 6 * sigma + 10
        assert max(abs(count - num_kept) for count in counts) < limit, f"{counts} for {num_kept}, limit {limit}"


def test_zeros_never_reach_the_threshold_of_a_sample() -> None:
    for stride in (1, 7):
        assert sparse.sample_thresholds(torch.zeros(1000), 10, stride, KEY).tolist() == [sparse.NEVER, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_sidco_threshold_equals_the_reference(kind: str) -> None:
    for numel in (0, 1, 5003):
        grad_N = gradient(kind, numel)
        counts = reference.magnitude_histogram(grad_N)
        for shares in ((), (0.1,), (0.25, 0.04), (0.25, 0.25, 0.16), (1.0,), (1e-30, 1e-30, 0.5)):
            ratios = [math.log(1 / share) for share in shares]
            for num_kept in {0, min(1, numel), numel // 100, numel}:
                thresholds = sparse.sidco_thresholds(grad_N, ratios, num_kept).tolist()
                expected = [sparse.NEVER, reference.sidco_threshold(counts, ratios, num_kept)]
                assert thresholds == expected, f"{num_kept} of {numel} in shares of {shares}"


@pytest.mark.parametrize("kind", ["all equal", "mostly zero", "ties", "inf", "zeros of both signs"])
def test_half_of_k_at_least_reach_a_sidco_threshold_and_zeros_never_do(kind: str) -> None:
    grad_N = gradient(kind, 9001)
    magnitude_N = reference.magnitudes(grad_N)
    for num_kept in (1, 9, 90, 900):
        for ratio in (0.01, -math.log(num_kept / 9001), 50.0):
            maybe = int(sparse.sidco_thresholds(grad_N, [ratio], num_kept)[1])
            num_reaching, what = int((magnitude_N >= maybe).sum()), f"{num_kept} of 9001, ratio {ratio}"
            assert 2 * num_reaching >= min(num_kept, int((magnitude_N > 0).sum())), f"{what}: {num_reaching}"
            # Without the threshold's own bin, which spans a sixteenth of a power of two.
            assert int((magnitude_N >> 19 > maybe >> 19).sum()) <= 2 * num_kept, what
            assert maybe > 0


@pytest.mark.parametrize("shares", [(0.1,), (0.25, 0.04), (0.25, 0.25, 0.016)])
@pytest.mark.parametrize("scale", [1e-6, 1.0])
def test_sidco_keeps_within_a_tenth_of_the_wanted_share_of_exponential_gradients(
    shares: tuple[float, ...], scale: float
) -> None:
    numel = 1 << 20
    laplace_N = torch.distributions.Laplace(0.0, scale).sample((numel,))
    for grad_N in (laplace_N, torch.empty(numel).exponential_(1 / scale)):
        wanted = math.prod(shares)
        maybe = int(sparse.sidco_thresholds(grad_N, [math.log(1 / share) for share in shares], int(wanted * numel))[1])
        kept = int((reference.magnitudes(grad_N) >= maybe).sum()) / numel
        assert abs(kept / wanted - 1) < 0.1, f"kept {kept}, wanted {wanted}"


def _collect(grad_N: Tensor, thresholds: tuple[int, int], num_kept: int, key: int) -> tuple[Tensor, Tensor, int]:
    index_K, value_K = outputs(num_kept)
    count_1 = torch.full((1,), -77, dtype=torch.int32)
    sparse.collect(grad_N, torch.tensor(thresholds), index_K, value_K, count_1, key=key)
    return index_K, value_K, int(count_1)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_collect_equals_the_reference(kind: str, numel: int) -> None:
    grad_N = gradient(kind, numel)
    some = int(reference.magnitudes(grad_N)[numel // 2]) if numel else 0
    for num_kept in kept_counts(numel):
        sure, _ = reference.bisect_thresholds(grad_N, num_kept, 31)
        for maybe in (0, some, sure, sparse.NEVER):
            check_collect(grad_N, (sure, maybe), num_kept, KEY)
            check_collect(grad_N, (sparse.NEVER, maybe), num_kept, KEY + 1)


@settings(max_examples=100, deadline=None)
@given(
    numel=st.integers(0, 300),
    num_rounds=st.integers(1, 31),
    share=st.floats(0, 1),
    key=st.integers(0, (1 << 32) - 1),
    num_levels=st.integers(1, 1000),
)
def test_collect_equals_the_reference_for_any_key(
    numel: int, num_rounds: int, share: float, key: int, num_levels: int
) -> None:
    grad_N = (torch.randn(numel, generator=torch.Generator().manual_seed(key)) * num_levels).round()
    num_kept = math.floor(share * numel)
    check_collect(grad_N, reference.bisect_thresholds(grad_N, num_kept, num_rounds), num_kept, key)


def test_collect_takes_strided_outputs_and_half_precision_gradients() -> None:
    grad_N = torch.randn(1000).bfloat16()
    thresholds = reference.bisect_thresholds(grad_N.float(), 100, 9)
    check_collect(grad_N, thresholds, 100, KEY)
    index_K, value_K, count = _collect(grad_N, thresholds, 100, KEY)
    strided = [torch.zeros(200, dtype=x.dtype)[::2] for x in (index_K, value_K)]
    count_1 = torch.zeros(1, dtype=torch.int32)
    sparse.collect(grad_N, torch.tensor(thresholds), strided[0], strided[1], count_1, key=KEY)
    assert int(count_1) == count
    assert_same(strided[0].contiguous(), index_K)
    assert_same(strided[1].contiguous(), value_K)


def test_collect_writes_all_sure_ones_and_fills_up_with_a_run_that_wraps_around() -> None:
    grad_N = torch.ones(100)
    grad_N[[5, 50, 95]] = 4.0
    sure, maybe = (int(x) for x in torch.tensor([2.0, 1.0]).view(torch.int32))
    others = [i for i in range(100) if i not in (5, 50, 95)]
    starts = set()
    for key in range(200):
        index_K, value_K, count = _collect(grad_N, (sure, maybe), 20, key)
        assert count == 20
        assert {5, 50, 95} <= set(index_K.tolist())
        ranks = {others.index(i) for i in index_K.tolist() if i not in (5, 50, 95)}
        start = reference.random_below(key, 97)
        assert ranks == {(start + i) % 97 for i in range(17)}
        assert_same(value_K, grad_N[index_K.long()])
        starts.add(start)
    # 200 random starts leave 12 of 97 places unused on average.
    assert len(starts) > 60, f"only {len(starts)} starts"


def test_collect_writes_no_more_than_pass_and_zeros_behind_them() -> None:
    grad_N = torch.tensor([1.0, 3.0, -4.0, 1.0, 0.0])
    two = int(torch.tensor([2.0]).view(torch.int32))
    index_K, value_K, count = _collect(grad_N, (sparse.NEVER, two), 4, KEY)
    assert (count, index_K.tolist(), value_K.tolist()) == (2, [1, 2, 0, 0], [3.0, -4.0, 0.0, 0.0])


def test_collect_leaves_no_place_out_more_often_than_others() -> None:
    numel, num_kept, num_keys = 60, 15, 4000
    one = int(torch.ones(1).view(torch.int32))
    times_N = torch.zeros(numel)
    for key in range(num_keys):
        index_K, _, count = _collect(torch.ones(numel), (sparse.NEVER, one), num_kept, key)
        assert count == num_kept
        times_N[index_K.long()] += 1
    # Each count is binomial with probability 1/4. Six sigma, for the worst of 60.
    limit = 6 * math.sqrt(num_keys * 0.25 * 0.75)
    worst = (times_N - num_keys * 0.25).abs().max().item()
    assert worst < limit, f"worst place is {worst} off, limit {limit}"
