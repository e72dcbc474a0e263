"""The CUDA kernels of indices, in the emulator and on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.same_bits import assert_same
from support.sparse_checks import (
    CPU,
    HUGE,
    KEY,
    LARGE,
    MAX_NUMEL,
    SEVERAL_BLOCKS,
    check_hostile_indices,
    check_packing,
    count_of,
    emulated,
    hostile_indices,
    outputs,
    some_indices,
    without_waiting,
)

from cgx_ray.runtime_ext import cuda_launch, reference, sparse


@pytest.mark.usefixtures("emulated_cuda")
@pytest.mark.parametrize(
    ("numel", "num_kept"), [(0, 0), (1, 1), (1000, 7), (1000, 999), (4099, 4099), (MAX_NUMEL, 700)]
)
def test_random_indices_are_those_of_the_reference(numel: int, num_kept: int) -> None:
    for key in (0, KEY, (1 << 32) - 1):
        index_K = outputs(num_kept, CPU)[0]
        sparse.random_indices(numel, index_K, key=key)
        expected_K = torch.empty_like(index_K)
        reference.random_indices(numel, key, expected_K)
        assert_same(index_K, expected_K, f"key {key}")


SHAPES = [
    (0, 0),
    (5, 0),
    (1, 1),
    (1000, 1),
    (1000, 10),
    (1000, 333),
    (1000, 900),
    (1000, 1000),
    (4099, 41),
    (4099, 300),
]
SHAPES += [(MAX_NUMEL, 1), (MAX_NUMEL, 700), (1 << 20, 3000)]


@pytest.mark.usefixtures("emulated_cuda")
@pytest.mark.parametrize(("numel", "num_kept"), SHAPES)
def test_indices_are_packed_as_the_reference_does_and_come_back(numel: int, num_kept: int) -> None:
    for count in {0, num_kept // 2, num_kept}:
        for offset in (0, 1, 4):
            check_packing(some_indices(num_kept, numel), count, numel, offset)


@pytest.mark.usefixtures("emulated_cuda")
@emulated
@given(st.integers(1, 3000), st.data())
def test_any_ascending_indices_come_back(numel: int, data: st.DataObject) -> None:
    num_kept = data.draw(st.integers(0, numel))
    count = data.draw(st.integers(0, num_kept))
    start = data.draw(st.integers(0, numel - count))
    # All at one place, or spread evenly over the rest of the gradient.
    step = max((numel - start) // max(count, 1), 1) if data.draw(st.booleans()) else 1
    index_K = torch.zeros(num_kept, dtype=torch.int32)
    index_K[:count] = start + step * torch.arange(count)
    check_packing(index_K, count, numel, data.draw(st.integers(0, 3)))


@pytest.mark.usefixtures("emulated_cuda")
@emulated
@given(st.integers(1, 2000), st.floats(0, 1), st.integers(-5, 1 << 31), st.data())
def test_no_message_makes_a_kernel_leave_its_buffers(
    numel: int, density: float, count: int, data: st.DataObject
) -> None:
    # The emulator fails the test at any access outside of a buffer.
    num_kept = round(density * numel)
    count_1 = count_of(min(count, MAX_NUMEL))
    num_bytes = sparse.index_bytes(numel, num_kept)
    fill = data.draw(st.sampled_from([None, 0, 0xFF]))
    packed = torch.randint(256, (num_bytes,), dtype=torch.uint8)
    if fill is not None:
        packed.fill_(fill)
    index_K, value_K = outputs(num_kept, CPU)
    sparse.unpack_indices(packed, count_1, numel, index_K)
    sent = min(max(count, 0), num_kept)
    assert not index_K[sent:].any(), f"{index_K[sent:].tolist()} after the first {sent}"
    out_N = torch.zeros(numel)
    sparse.scatter_add(index_K, value_K.fill_(1.0), count_1, out_N)
    inside = index_K[:sent][(index_K[:sent] >= 0) & (index_K[:sent] < numel)].long()
    assert out_N[inside].all(), "an index inside of the gradient was left out"
    assert int((out_N != 0).sum()) == inside.unique().numel(), "an element was changed that no index names"


@pytest.mark.usefixtures("emulated_cuda")
@pytest.mark.parametrize(("numel", "num_kept"), [(1, 1), (1000, 2), (1000, 30), (4099, 300), (1000, 900)])
def test_no_index_and_no_count_make_a_kernel_leave_its_buffers(numel: int, num_kept: int) -> None:
    for seed, count in enumerate((-5, 0, num_kept // 2, num_kept, num_kept + 1, MAX_NUMEL)):
        check_hostile_indices(hostile_indices(num_kept, numel, seed), count, numel)


@pytest.mark.usefixtures("emulated_cuda")
@pytest.mark.parametrize(("numel", "num_kept"), [(0, 0), (1, 1), (1000, 10), (4099, 2000), (4099, 4099)])
def test_scatter_add_adds_the_first_values(numel: int, num_kept: int) -> None:
    for count in {0, num_kept // 2, num_kept}:
        index_K, value_K = some_indices(num_kept, numel), torch.randn(num_kept)
        out_2N = torch.randn(2 * numel)
        expected_2N = out_2N.clone()
        reference.scatter_add(index_K, value_K, count, expected_2N[::2])
        sparse.scatter_add(index_K, value_K, count_of(count), out_2N[::2])
        assert_same(out_2N, expected_2N, f"{count} of {num_kept}")


@pytest.mark.usefixtures("emulated_cuda")
@pytest.mark.parametrize("max_blocks", [1, 3])
def test_the_number_of_blocks_changes_no_message(max_blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_launch, "max_blocks", lambda *_: max_blocks)
    for num_kept in (500, 20_000, SEVERAL_BLOCKS):
        check_packing(some_indices(num_kept, SEVERAL_BLOCKS), num_kept, SEVERAL_BLOCKS)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("numel", "num_kept"), [*SHAPES, *((n, int(c * n)) for n in (LARGE, HUGE) for c in (0.01, 0.5, 1))]
)
def test_the_device_packs_as_the_reference_does(numel: int, num_kept: int) -> None:
    device = torch.device("cuda")
    index_K = some_indices(num_kept, numel, device)
    assert_same(index_K.cpu(), some_indices(num_kept, numel), "random indices")
    for count in {num_kept // 2, num_kept}:
        for offset in (0, 1):
            check_packing(index_K, count, numel, offset)
    if numel < MAX_NUMEL:
        value_K, out_N = torch.randn(num_kept, device=device), torch.randn(numel, device=device)
        expected_N, count_1 = out_N.clone(), count_of(num_kept // 2, device)
        reference.scatter_add(index_K, value_K, num_kept // 2, expected_N)
        without_waiting(lambda: sparse.scatter_add(index_K, value_K, count_1, out_N), device)
        assert_same(out_N, expected_N, "sum")
