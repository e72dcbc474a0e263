"""The CPU kernels of indices: random ones, packing, and adding of values at indices."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.same_bits import assert_same
from support.sparse_checks import KEY, MAX_NUMEL, check_hostile_indices, count_of, hostile_indices, outputs
from torch import Tensor

from cgx_ray.runtime_ext import reference, sparse


@pytest.mark.parametrize(("numel", "num_kept"), [(0, 0), (1, 1), (7, 3), (1000, 10), (1000, 1000), (5003, 4999)])
def test_random_indices_equal_the_reference_and_are_one_a_run(numel: int, num_kept: int) -> None:
    for key in (0, 1, KEY, (1 << 32) - 1):
        index_K, expected_K = outputs(num_kept)[0], outputs(num_kept)[0]
        sparse.random_indices(numel, index_K, key=key)
        reference.random_indices(numel, key, expected_K)
        assert_same(index_K, expected_K, f"{num_kept} of {numel}, key {key}")
        for i, index in enumerate(index_K.tolist()):
            assert i * numel // num_kept <= index < (i + 1) * numel // num_kept


@settings(max_examples=100, deadline=None)
@given(numel=st.integers(0, MAX_NUMEL), num_kept=st.integers(0, 300), key=st.integers(0, (1 << 32) - 1))
def test_random_indices_equal_the_reference_at_any_size(numel: int, num_kept: int, key: int) -> None:
    num_kept = min(numel, num_kept)
    index_K, expected_K = outputs(num_kept)[0], outputs(num_kept)[0]
    sparse.random_indices(numel, index_K, key=key)
    reference.random_indices(numel, key, expected_K)
    assert_same(index_K, expected_K)
    assert index_K.unique().numel() == num_kept, "not distinct"


def test_random_indices_choose_every_element_equally_often() -> None:
    num_keys, num_runs, run = 4000, 5, 7
    times_N = torch.zeros(num_runs * run)
    index_K = outputs(num_runs)[0]
    for key in range(num_keys):
        sparse.random_indices(num_runs * run, index_K, key=key)
        times_N[index_K.long()] += 1
    expected = num_keys / run
    # Chi-square with num_runs * (run - 1) degrees of freedom: mean df, variance 2 df. Six sigma.
    freedom = num_runs * (run - 1)
    chi_square = ((times_N - expected) ** 2 / expected).sum().item()
    assert chi_square < freedom + 6 * math.sqrt(2 * freedom), f"chi-square {chi_square} of {freedom} degrees"


def _ascending(numel: int, count: int, num_kept: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return room for `num_kept` indices, the first `count` random below `numel`, and `count` as a tensor.

    No tensor of `numel` elements is made if `numel` is large.
    """
    generator = torch.Generator().manual_seed(seed)
    index_K = outputs(num_kept)[0]
    if numel <= 1 << 20:
        index_K[:count] = torch.randperm(numel, generator=generator)[:count].sort().values
    else:
        drawn = torch.randint(numel, (2 * count + 9,), generator=generator).unique()
        index_K[:count] = drawn[torch.randperm(drawn.numel(), generator=generator)[:count]].sort().values
    return index_K, count_of(count)


def _pack(index_K: Tensor, count_1: Tensor, numel: int) -> Tensor:
    out = torch.full((sparse.index_bytes(numel, index_K.numel()),), 0xA5, dtype=torch.uint8)
    sparse.pack_indices(index_K, count_1, numel, out)
    return out


def _check_round_trip(index_K: Tensor, count_1: Tensor, numel: int) -> None:
    packed = _pack(index_K, count_1, numel)
    count, what = int(count_1), f"{int(count_1)} of {index_K.numel()} of {numel}"
    expected = torch.full_like(packed, 0x5A)
    reference.pack_indices(index_K, count, numel, expected)
    assert_same(packed, expected, what)
    actual_K, expected_K = torch.full_like(index_K, -77), torch.full_like(index_K, -77)
    sparse.unpack_indices(packed, count_1, numel, actual_K)
    reference.unpack_indices(packed, count, numel, expected_K)
    assert_same(actual_K, expected_K, what)
    assert_same(actual_K[:count], index_K[:count], what)
    assert not actual_K[count:].any()


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.001, 0.01, 0.03, 0.1, 0.2, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("numel", [1, 7, 31, 32, 33, 127, 128, 129, 5003, (1 << 16) + 3])
def test_indices_survive_the_round_trip_at_every_density(numel: int, share: float) -> None:
    for num_kept in {math.floor(share * numel), math.ceil(share * numel)}:
        for count in {0, num_kept // 2, max(num_kept - 1, 0), num_kept}:
            _check_round_trip(*_ascending(numel, count, num_kept), numel)
        edges = torch.arange(num_kept, dtype=torch.int32)
        for index_K in (edges, edges + numel - num_kept):
            _check_round_trip(index_K, count_of(num_kept), numel)


@settings(max_examples=200, deadline=None)
@given(
    numel=st.integers(1, MAX_NUMEL),
    num_kept=st.integers(0, 400),
    missing=st.integers(0, 400),
    seed=st.integers(0, 1 << 30),
)
def test_indices_survive_the_round_trip_at_any_size(numel: int, num_kept: int, missing: int, seed: int) -> None:
    num_kept = min(num_kept, numel)
    _check_round_trip(*_ascending(numel, max(num_kept - missing, 0), num_kept, seed), numel)


@pytest.mark.parametrize("num_kept", [1, 2, 3, 100, 5000])
def test_few_indices_of_a_huge_gradient_take_few_bytes(num_kept: int) -> None:
    index_K, count_1 = _ascending(MAX_NUMEL, num_kept, num_kept)
    index_K[-1] = MAX_NUMEL - 1
    assert sparse.index_bytes(MAX_NUMEL, num_kept) <= 4 * num_kept
    _check_round_trip(index_K, count_1, MAX_NUMEL)


def test_indices_are_packed_and_unpacked_at_odd_addresses_and_into_strided_tensors() -> None:
    for numel, num_kept in ((5003, 50), (5003, 4000), (5003, 1)):
        index_K, count_1 = _ascending(numel, num_kept, num_kept)
        expected = _pack(index_K, count_1, numel)
        buffer = torch.zeros(expected.numel() + 2, dtype=torch.uint8)
        sparse.pack_indices(index_K, count_1, numel, buffer[1:-1])
        assert_same(buffer[1:-1], expected)
        assert buffer[0] == 0
        assert buffer[-1] == 0, "wrote past the end"
        out = torch.full((num_kept + 2,), -7, dtype=torch.int32)
        sparse.unpack_indices(buffer[1:-1], count_1, numel, out[1:-1])
        assert_same(out[1:-1], index_K)
        assert out[0] == out[-1] == -7, "wrote past the end"
        strided = torch.zeros(2 * num_kept, dtype=torch.int32)[::2]
        sparse.unpack_indices(expected, count_1, numel, strided)
        assert_same(strided.contiguous(), index_K)


@pytest.mark.parametrize("density", [0.001, 0.003, 0.01, 0.03, 0.1])
def test_packed_indices_take_at_most_0_6_bits_more_than_any_code_must(density: float) -> None:
    for numel in (1_000_000, 1 << 20, 13_000_000):
        num_kept = round(density * numel)
        log_ways = math.lgamma(numel + 1) - math.lgamma(num_kept + 1) - math.lgamma(numel - num_kept + 1)
        least = log_ways / math.log(2) / num_kept
        bits = 8 * sparse.index_bytes(numel, num_kept) / num_kept
        assert least <= bits <= least + 0.6, f"{bits} bits an index, least {least}"


def test_offsets_are_low_bits_then_unary_counts_of_the_blocks() -> None:
    # 32 blocks of 32 elements: 80 bits of offsets take 3 words; 16 ones and 32 zeros take 2.
    index_K, count_1 = _ascending(1000, 16, 16)
    assert reference.index_layout(1000, 16) == ("offsets", 5, 20)
    packed = int.from_bytes(bytes(_pack(index_K, count_1, 1000).tolist()), "little")
    index = index_K.tolist()
    assert [packed >> 5 * i & 31 for i in range(16)] == [i & 31 for i in index]
    unary = "".join("1" * sum(i >> 5 == block for i in index) + "0" for block in range(32))
    assert f"{packed >> 96:064b}"[::-1] == unary.ljust(64, "0")


def _unpack_or_refuse(packed: Tensor, count: int, numel: int, num_kept: int) -> list[int] | None:
    buffer = torch.full((num_kept + 2,), -7, dtype=torch.int32)
    try:
        sparse.unpack_indices(packed, count_of(count), numel, buffer[1:-1])
    except ValueError as error:
        assert "ascend below" in str(error)  # noqa: PT017 - a refusal is one of two right answers
        return None
    finally:
        assert buffer[0] == buffer[-1] == -7, "wrote past the end"
    return buffer[1 : 1 + count].tolist()


def _check_unpacks_or_refuses_as_the_reference(packed: Tensor, count: int, numel: int, num_kept: int) -> None:
    index = _unpack_or_refuse(packed, count, numel, num_kept)
    expected_K = torch.zeros(num_kept, dtype=torch.int32)
    try:
        reference.unpack_indices(packed, count, numel, expected_K)
    except ValueError:
        assert index is None, f"the reference refuses {index}"
        return
    assert index == expected_K[:count].tolist()
    assert all(0 <= i < numel for i in index)
    assert all(low < high for low, high in pairwise(index))


COUNTS = st.integers(-(1 << 31), MAX_NUMEL) | st.integers(-2, 62)
SHAPES = st.tuples(st.integers(1, 3000) | st.integers(1, MAX_NUMEL), st.integers(1, 60) | st.integers(1, 3000)).filter(
    lambda shape: shape[1] <= shape[0]
)


@settings(max_examples=300, deadline=None)
@given(shape=SHAPES, missing=st.integers(0, 5), flips=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=4))
def test_messages_with_flipped_bits_are_refused_or_hold_ascending_indices(
    shape: tuple[int, int], missing: int, flips: list[int]
) -> None:
    numel, num_kept = shape
    count = max(num_kept - missing, 0)
    packed = _pack(*_ascending(numel, count, num_kept), numel)
    for flip in flips:
        packed[flip // 8 % packed.numel()] ^= 1 << flip % 8
    _check_unpacks_or_refuses_as_the_reference(packed, count, numel, num_kept)


@settings(max_examples=200, deadline=None)
@given(shape=SHAPES, count=COUNTS, data=st.data())
def test_any_bytes_and_any_count_are_refused_or_hold_ascending_indices(
    shape: tuple[int, int], count: int, data: st.DataObject
) -> None:
    numel, num_kept = shape
    size = sparse.index_bytes(numel, num_kept)
    some = data.draw(st.binary(min_size=0, max_size=min(size, 200)))
    packed = torch.tensor(list((some * size + bytes(size))[:size]), dtype=torch.uint8)
    _check_unpacks_or_refuses_as_the_reference(packed, count, numel, num_kept)


@settings(max_examples=200, deadline=None)
@given(shape=SHAPES.filter(lambda shape: shape[0] <= 3000), count=COUNTS, seed=st.integers(0, 1 << 30))
def test_no_index_and_no_count_make_a_kernel_leave_its_buffers(shape: tuple[int, int], count: int, seed: int) -> None:
    numel, num_kept = shape
    check_hostile_indices(hostile_indices(num_kept, numel, seed), count, numel)


@pytest.mark.parametrize("num_kept", [1, 30, 900])  # raw, offsets, bitmap
@pytest.mark.parametrize("index", [-1, 1000, MAX_NUMEL])
def test_a_message_with_an_index_that_cannot_be_is_refused(index: int, num_kept: int) -> None:
    index_K, count_1 = _ascending(1000, num_kept, num_kept)
    index_K[0 if index < 0 else -1] = index
    packed = _pack(index_K, count_1, 1000)
    with pytest.raises(ValueError, match=f"does not hold {num_kept} indices that ascend below 1000"):
        sparse.unpack_indices(packed, count_1, 1000, index_K)


@pytest.mark.parametrize("count", [-1, 11])
def test_an_impossible_count_is_refused(count: int) -> None:
    packed = _pack(*_ascending(1000, 10, 10), 1000)
    with pytest.raises(ValueError, match=f"does not hold {count} indices that ascend below 1000"):
        sparse.unpack_indices(packed, count_of(count), 1000, outputs(10)[0])


@pytest.mark.parametrize(("numel", "num_kept", "count"), [(1000, 10, 10), (1000, 500, 500), (1000, 1, 1), (5003, 9, 4)])
def test_scatter_add_equals_the_reference_and_leaves_the_rest(numel: int, num_kept: int, count: int) -> None:
    index_K, count_1 = _ascending(numel, count, num_kept)
    value_K = torch.randn(num_kept)
    start_N = torch.randn(numel)
    out_N, expected_N, strided_N = start_N.clone(), start_N.clone(), torch.zeros(2 * numel)[::2].copy_(start_N)
    sparse.scatter_add(index_K, value_K, count_1, out_N)
    sparse.scatter_add(index_K, value_K, count_1, strided_N)
    reference.scatter_add(index_K, value_K, count, expected_N)
    assert_same(out_N, expected_N)
    assert_same(strided_N.contiguous(), expected_N)
    assert int((out_N != start_N).sum()) == count
