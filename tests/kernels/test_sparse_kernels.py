"""The kernels of codecs that send some elements: native against the reference bit for bit, and what they promise."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sparse_checks import assert_same, check_encode, outputs
from torch import Tensor

from cgx_ray.runtime_ext import ops, reference, sparse

SIZES = (0, 1, 7, 127, 128, 129, 1025, 9001)
KEY = ops.message_key(1, 2, 3, 4, 5)
MAX_NUMEL = (1 << 31) - 1


def _put(grad_N: Tensor, value: float) -> Tensor:
    grad_N[::37] = value
    return grad_N


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda grad_N: grad_N,
    "ties": lambda grad_N: (grad_N * 3).round(),
    "mostly zero": lambda grad_N: torch.where(grad_N > 2, grad_N, 0.0),
    "all equal": lambda grad_N: torch.full_like(grad_N, -0.1),
    "zeros of both signs": lambda grad_N: torch.where(grad_N < 0, -0.0, 0.0),
    "denormal": lambda grad_N: grad_N * 1e-40,
    "any bits": lambda grad_N: torch.randint(-(1 << 31), 1 << 31, grad_N.shape).int().view(torch.float32),
    "nan": lambda grad_N: _put(grad_N, math.nan),
    "negative nan": lambda grad_N: _put(grad_N, -math.nan),
    "inf": lambda grad_N: _put(grad_N, math.inf),
    "sorted": lambda grad_N: grad_N.abs().sort().values,
}


def _gradient(kind: str, numel: int) -> Tensor:
    return KINDS[kind](torch.randn(numel))


def _num_kepts(numel: int) -> list[int]:
    return sorted({0, min(1, numel), numel // 100, numel // 10, numel // 2, max(numel - 1, 0), numel})


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _topk(grad_N: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
    index_K, value_K = outputs(num_kept)
    sparse.topk_select(grad_N, index_K, value_K)
    return index_K, value_K


def _reference_topk(grad_N: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
    index_K, value_K = outputs(num_kept)
    reference.topk_select(grad_N.float().contiguous(), index_K, value_K)
    return index_K, value_K


def _check_topk(grad_N: Tensor, num_kept: int) -> None:
    for actual, expected in zip(_topk(grad_N, num_kept), _reference_topk(grad_N, num_kept), strict=True):
        assert_same(actual, expected, f"top {num_kept} of {grad_N.numel()}")


def _brute_force_topk(grad_N: Tensor, num_kept: int) -> list[int]:
    def order(index: int) -> tuple[bool, float, int]:
        x = grad_N[index].item()
        return (not math.isnan(x), 0.0 if math.isnan(x) else -abs(x), index)

    return sorted(sorted(range(grad_N.numel()), key=order)[:num_kept])


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_topk_equals_the_reference(kind: str, numel: int) -> None:
    for num_kept in _num_kepts(numel):
        _check_topk(_gradient(kind, numel), num_kept)


@pytest.mark.parametrize("kind", KINDS)
def test_topk_and_its_reference_equal_a_brute_force_sort(kind: str) -> None:
    grad_N = _gradient(kind, 1000)
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
    _check_topk(torch.randn(10_000)[::2], 50)
    _check_topk(torch.randn(5001)[1:], 50)
    _check_topk(torch.randn(5000).bfloat16(), 50)
    _check_topk(torch.randn(5000).half(), 50)


@pytest.mark.parametrize("num_kept", [1, 100, 1000, 4000])
def test_topk_is_exact_where_a_sample_misleads(num_kept: int) -> None:
    numel = 1 << 17
    small_N = torch.randn(numel) * 1e-6
    for begin, end in ((0, 4000), (numel - 4000, numel), (50_000, 50_001), (60_000, 60_900)):
        grad_N = small_N.clone()
        grad_N[begin:end] += 1.0
        _check_topk(grad_N, num_kept)
        _check_topk(1.0 - grad_N, num_kept)


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
    _check_topk(grad_N, math.floor(share * numel))


def test_topk_of_a_million_elements_equals_the_reference() -> None:
    grad_N = torch.randn((1 << 20) + 3)
    for num_kept in (1, 1 << 10, 10_486, 1 << 18, 1 << 20):
        _check_topk(grad_N, num_kept)


def _fed(grad_N: Tensor, residual_N: Tensor | None, next_N: Tensor | None, num_kept: int) -> tuple[Tensor, Tensor]:
    index_K, value_K = outputs(num_kept)
    sparse.topk_select(grad_N, index_K, value_K, residual_N=residual_N, next_N=next_N)
    return index_K, value_K


@pytest.mark.parametrize("kind", ["normal", "ties", "mostly zero", "nan", "any bits"])
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("num_threads", [1, 3], indirect=True)
def test_topk_adds_the_residual_and_leaves_in_next_what_was_not_selected(
    kind: str, numel: int, num_threads: int
) -> None:
    grad_N, residual_N = _gradient(kind, numel), torch.randn(numel) * 0.5
    sum_N = grad_N + residual_N
    for num_kept in _num_kepts(numel):
        index_K, value_K = _reference_topk(sum_N, num_kept)
        left_N = sum_N.clone()
        left_N[index_K.long()] = 0.0
        in_place_N, next_N, before_N = residual_N.clone(), torch.full((numel,), 7.0), residual_N.clone()
        for owed_N, written_N in ((residual_N, next_N), (in_place_N, in_place_N), (residual_N, None)):
            what = f"top {num_kept} of {numel} with {num_threads} threads"
            for actual, expected in zip(_fed(grad_N, owed_N, written_N, num_kept), (index_K, value_K), strict=True):
                assert_same(actual, expected, what)
            if written_N is not None:
                assert_same(written_N, left_N, what)
        assert_same(residual_N, before_N, "the residual was changed")


@pytest.mark.parametrize("numel", SIZES)
def test_topk_without_a_residual_leaves_the_rest_of_the_gradient_in_next(numel: int) -> None:
    grad_N = torch.where(torch.arange(numel) % 5 == 0, -0.0, torch.randn(numel))
    for num_kept in _num_kepts(numel):
        next_N = torch.full((numel,), 7.0)
        index_K, _ = _fed(grad_N, None, next_N, num_kept)
        expected_N = grad_N.clone()
        expected_N[index_K.long()] = 0.0
        assert_same(next_N, expected_N, f"top {num_kept} of {numel}")


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
def test_next_of_a_gradient_larger_than_caches_is_the_same_at_any_alignment(num_threads: int) -> None:
    numel, num_kept = (1 << 22) + 5, 41_943
    grad_N, residual_N = torch.randn(numel), torch.randn(numel) * 0.5
    for owed_N in (residual_N, None):
        left_N = grad_N + residual_N if owed_N is not None else grad_N.clone()
        expected = _reference_topk(left_N, num_kept)
        left_N[expected[0].long()] = 0.0
        for offset in (0, 1, 4):
            buffer = torch.full((numel + 8,), 7.0)
            next_N = buffer[offset : offset + numel]
            fed = _fed(grad_N, owed_N, next_N, num_kept)
            for actual, wanted in zip((*fed, next_N), (*expected, left_N), strict=True):
                assert_same(actual, wanted, f"offset {offset} with {num_threads} threads")
            assert (buffer[:offset] == 7).all()
            assert (buffer[offset + numel :] == 7).all(), "wrote past the end"


def test_topk_with_strided_residual_next_and_outputs_gives_what_contiguous_ones_get() -> None:
    grad_N, residual_N, next_N = torch.randn(1000), torch.randn(1000), torch.zeros(1000)
    expected = _fed(grad_N, residual_N, next_N, 50)
    strided = [torch.zeros(2 * x.numel(), dtype=x.dtype)[::2].copy_(x) for x in (residual_N, next_N, *expected)]
    sparse.topk_select(grad_N, strided[2], strided[3], residual_N=strided[0], next_N=strided[1])
    for actual, wanted in zip(strided[1:], (next_N, *expected), strict=True):
        assert_same(actual.contiguous(), wanted)


# Enough for five threads with parts of more than one block, and all that is large in one part.
def _uneven_gradient() -> Tensor:
    grad_N = torch.randn(300_007)
    grad_N[100_000:110_000] *= 100
    grad_N[150_000:200_000] = 2.5
    return grad_N


@pytest.mark.parametrize("num_threads", [2, 3, 5], indirect=True)
def test_results_do_not_depend_on_the_number_of_threads(num_threads: int) -> None:
    grad_N, residual_N = _uneven_gradient(), torch.randn(300_007)
    assert_same(sparse.magnitude_histogram(grad_N), reference.magnitude_histogram(grad_N))
    for num_kept in (0, 1, 3000, 30_000, 200_000, 300_007):
        _check_topk(grad_N, num_kept)
        next_N = torch.zeros(300_007)
        fed = _fed(grad_N, residual_N, next_N, num_kept)
        for actual, expected in zip(fed, _reference_topk(grad_N + residual_N, num_kept), strict=True):
            assert_same(actual, expected, f"top {num_kept}")
        for num_rounds in (3, 12, 25, 31):
            sure, maybe = sparse.bisect_thresholds(grad_N, num_kept, num_rounds).tolist()
            assert (sure, maybe) == reference.bisect_thresholds(grad_N, num_kept, num_rounds)
            for key in (0, 1, KEY):
                _check_collect(grad_N, (sure, maybe), num_kept, key)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_histogram_equals_the_reference_and_counts_every_element(kind: str, numel: int) -> None:
    grad_N = _gradient(kind, numel)
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
        grad_N = _gradient(kind, numel)
        for num_kept in _num_kepts(numel):
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
            # The K largest reach `sure` at most, the one after them does not.
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
        # The k-th of a sample of s: its share of all has variance k (s - k) / s^3 about. Six sigma.
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
        grad_N = _gradient(kind, numel)
        counts = reference.magnitude_histogram(grad_N)
        for shares in ((), (0.1,), (0.25, 0.04), (0.25, 0.25, 0.16), (1.0,), (1e-30, 1e-30, 0.5)):
            ratios = [math.log(1 / share) for share in shares]
            for num_kept in {0, min(1, numel), numel // 100, numel}:
                thresholds = sparse.sidco_thresholds(grad_N, ratios, num_kept).tolist()
                expected = [sparse.NEVER, reference.sidco_threshold(counts, ratios, num_kept)]
                assert thresholds == expected, f"{num_kept} of {numel} in shares of {shares}"


@pytest.mark.parametrize("kind", ["all equal", "mostly zero", "ties", "inf", "zeros of both signs"])
def test_half_of_k_at_least_reach_a_sidco_threshold_and_zeros_never_do(kind: str) -> None:
    grad_N = _gradient(kind, 9001)
    magnitude_N = reference.magnitudes(grad_N)
    for num_kept in (1, 9, 90, 900):
        for ratio in (0.01, -math.log(num_kept / 9001), 50.0):
            maybe = int(sparse.sidco_thresholds(grad_N, [ratio], num_kept)[1])
            num_reaching, what = int((magnitude_N >= maybe).sum()), f"{num_kept} of 9001, ratio {ratio}"
            assert 2 * num_reaching >= min(num_kept, int((magnitude_N > 0).sum())), f"{what}: {num_reaching}"
            # Beside the threshold's own bin, which spans a sixteenth of a power of two.
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


def _check_collect(grad_N: Tensor, thresholds: tuple[int, int], num_kept: int, key: int) -> None:
    index_K, value_K, count = _collect(grad_N, thresholds, num_kept, key)
    expected_index_K, expected_value_K = outputs(num_kept)
    grad_N = grad_N.float().contiguous()
    expected = reference.collect(grad_N, thresholds, key, expected_index_K, expected_value_K)
    assert count == expected
    assert_same(index_K, expected_index_K, f"{thresholds}, K {num_kept}, key {key}")
    assert_same(value_K, expected_value_K, f"{thresholds}, K {num_kept}, key {key}")


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_collect_equals_the_reference(kind: str, numel: int) -> None:
    grad_N = _gradient(kind, numel)
    some = int(reference.magnitudes(grad_N)[numel // 2]) if numel else 0
    for num_kept in _num_kepts(numel):
        sure, _ = reference.bisect_thresholds(grad_N, num_kept, 31)
        for maybe in (0, some, sure, sparse.NEVER):
            _check_collect(grad_N, (sure, maybe), num_kept, KEY)
            _check_collect(grad_N, (sparse.NEVER, maybe), num_kept, KEY + 1)


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
    _check_collect(grad_N, reference.bisect_thresholds(grad_N, num_kept, num_rounds), num_kept, key)


def test_collect_takes_strided_outputs_and_half_precision_gradients() -> None:
    grad_N = torch.randn(1000).bfloat16()
    thresholds = reference.bisect_thresholds(grad_N.float(), 100, 9)
    _check_collect(grad_N, thresholds, 100, KEY)
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
    # 200 throws at 97 places leave 12 empty on average.
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
    # Each place is a binomial with chance 1/4. Six sigma for the worst of 60.
    limit = 6 * math.sqrt(num_keys * 0.25 * 0.75)
    worst = (times_N - num_keys * 0.25).abs().max().item()
    assert worst < limit, f"worst place is {worst} off, limit {limit}"


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
