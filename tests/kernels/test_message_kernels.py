"""Whole messages of sparse codecs, and selections by layer: one call against the calls that it stands for."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.same_bits import assert_same
from support.sparse_checks import KINDS, count_of, gradient, hostile_indices, kept_counts, outputs, some_indices
from torch import Tensor

from cgx_ray.runtime_ext import reference, sparse
from cgx_ray.runtime_ext.layer_ends import LayerEnds

NUMELS = (0, 1, 127, 128, 1025, 9001)


def _expected(index_K: Tensor, value_K: Tensor, count: int, numel: int) -> Tensor:
    packed = torch.empty(sparse.index_bytes(numel, index_K.numel()), dtype=torch.uint8)
    reference.pack_indices(index_K, count, numel, packed)
    return torch.cat([count_of(count).view(torch.uint8), packed, value_K.view(torch.uint8)])


@pytest.mark.parametrize("offset", [0, 4])
@pytest.mark.parametrize("numel", NUMELS)
def test_a_message_equals_its_parts_and_adds_what_they_add(numel: int, offset: int) -> None:
    for num_kept in kept_counts(numel):
        index_K, value_K = some_indices(num_kept, numel), torch.randn(num_kept)
        for count in sorted({0, num_kept // 2, num_kept}):
            what = f"{count} of {num_kept} of {numel}"
            expected = _expected(index_K, value_K, count, numel)
            payload = torch.full((offset + expected.numel(),), 0x5A, dtype=torch.uint8)[offset:]
            sparse.pack_message(index_K, value_K, count_of(count), numel, payload)
            assert_same(payload, expected, what)
            for add in (False, True):
                out_N = torch.randn(numel)
                sum_N = out_N.clone() if add else torch.zeros(numel)
                reference.scatter_add(index_K, value_K, count, sum_N)
                unpacked_K = outputs(num_kept)[0]
                sparse.unpack_message(payload, unpacked_K, out_N, add=add)
                assert_same(out_N, sum_N, f"{what}, add {add}")
                assert_same(unpacked_K[:count], index_K[:count], what)


def test_messages_take_tensors_with_gaps() -> None:
    index_K, value_K, count_1 = some_indices(100, 9001), torch.randn(100), count_of(70)
    expected = _expected(index_K, value_K, 70, 9001)
    gaps = [torch.empty(2 * x.numel(), dtype=x.dtype)[::2] for x in (index_K, value_K)]
    gaps[0].copy_(index_K)
    gaps[1].copy_(value_K)
    payload = torch.empty_like(expected)
    sparse.pack_message(gaps[0], gaps[1], count_1, 9001, payload)
    assert_same(payload, expected)
    out_N, sum_N = torch.ones(2 * 9001)[::2], torch.ones(9001)
    sparse.unpack_message(payload, gaps[0], out_N, add=True)
    reference.scatter_add(index_K, value_K, 70, sum_N)
    assert_same(out_N.contiguous(), sum_N)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("count", [-1, 99, 101, 1 << 30])
def test_a_broken_message_is_refused_and_changes_nothing(count: int, add: bool) -> None:
    payload = _expected(some_indices(100, 9001), torch.randn(100), 100, 9001)
    payload[:4].view(torch.int32).fill_(count)
    out_N = torch.ones(9001)
    with pytest.raises(ValueError, match=f"does not hold {count} indices that ascend below 9001"):
        sparse.unpack_message(payload, outputs(100)[0], out_N, add=add)
    assert_same(out_N, torch.ones(9001))


@pytest.mark.parametrize("seed", range(20))
def test_zeros_are_scattered_as_by_the_reference_and_nowhere_else(seed: int) -> None:
    for num_kept, numel in ((0, 0), (1, 1), (50, 100), (100, 9001)):
        index_K = hostile_indices(num_kept, numel, seed)
        for count in (-1, 0, num_kept // 2, num_kept, num_kept + 1):
            out, expected_N = torch.ones(numel + 8), torch.ones(numel)
            sparse.scatter_zero(index_K, count_of(count), out[4:-4])
            reference.scatter_zero(index_K, count, expected_N)
            assert_same(out[4:-4], expected_N, f"{count} of {num_kept} of {numel}")
            assert bool((out[:4] == 1).all() and (out[-4:] == 1).all())
    strided_N = torch.ones(200)[::2]
    sparse.scatter_zero(torch.tensor([3, 7], dtype=torch.int32), count_of(2), strided_N)
    assert strided_N.eq(0).nonzero().view(-1).tolist() == [3, 7]


LAYERS = [(1000, 10), (1, 1), (0, 0), (333, 0), (4096, 4096), (70, 1), (40_000, 777)]
NUMEL, NUM_KEPT = (sum(counts) for counts in zip(*LAYERS, strict=True))


@pytest.mark.parametrize("has_gaps", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_topk_by_layer_equals_topk_of_every_layer(kind: str, has_gaps: bool) -> None:
    ends = LayerEnds(*zip(*LAYERS, strict=True))
    grad_N, residual_N = gradient(kind, NUMEL), gradient("normal", NUMEL)
    expected, expected_next_N = outputs(NUM_KEPT), grad_N + residual_N
    starts, firsts = (itertools.accumulate(counts, initial=0) for counts in zip(*LAYERS, strict=True))
    for start, first, (numel, kept) in zip(starts, firsts, LAYERS, strict=False):
        index, value = (part[first : first + kept] for part in expected)
        reference.topk_select(expected_next_N[start : start + numel].clone(), index, value)
        index += start
        expected_next_N[index.long()] = 0.0
    next_N = torch.empty(2 * NUMEL)[::2] if has_gaps else torch.empty(NUMEL)
    payload = torch.empty_like(_expected(*expected, NUM_KEPT, NUMEL))
    for kernel in ("select", "encode"):
        actual = outputs(NUM_KEPT)
        if kernel == "select":
            sparse.topk_select(grad_N, *actual, ends=ends, residual_N=residual_N, next_N=next_N)
        else:
            sparse.topk_encode(grad_N, payload, *actual, ends=ends, residual_N=residual_N, next_N=next_N)
            assert_same(payload, _expected(*expected, NUM_KEPT, NUMEL))
        for name, left, right in zip(("index", "value"), actual, expected, strict=True):
            assert_same(left, right, f"{name} by {kernel}")
        assert_same(next_N.contiguous(), expected_next_N, f"next by {kernel}")


def test_layers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot keep 3 of a layer of 2 elements; give 0 to 2"):
        LayerEnds([5, 2], [1, 3])
    with pytest.raises(ValueError, match="the layers keep 2 of 9 elements, the call 2 of 10; both must be the same"):
        sparse.topk_select(torch.randn(10), *outputs(2), ends=LayerEnds([4, 5], [1, 1]))
