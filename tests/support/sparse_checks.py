"""Gradients for tests of the sparse kernels, and comparisons of these kernels with the reference, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

from cgx_ray.runtime_ext import ops, reference, sparse
from support.cuda.waits import no_waits
from support.same_bits import assert_same

T = TypeVar("T")
SIZES = (0, 1, 7, 127, 128, 129, 1025, 9001)
CUDA_SIZES = (0, 1, 7, 127, 128, 129, 1000, 4099)
LARGE = (1 << 20) + 3
HUGE = 1 << 26
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
KEY = ops.message_key(1, 2, 3, 4, 5)
CPU = torch.device("cpu")
MAX_NUMEL = (1 << 31) - 1
# A block takes 8192 elements at a time.
SEVERAL_BLOCKS = 3 * 8192 + 77

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
    "special": lambda grad_N: _put(grad_N * 1e-40, math.nan, math.inf, -math.inf, -math.nan, 65504.0, -0.0, 1e-7),
}
# Fewer for the CUDA kernels, because the emulator is slow.
CUDA_KINDS = ("normal", "ties", "all equal", "zeros of both signs", "special")

emulated = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def _put(grad_N: Tensor, *values: float) -> Tensor:
    for i, value in enumerate(values):
        grad_N[i::23] = value
    return grad_N


def gradient(kind: str, numel: int, device: torch.device = CPU) -> Tensor:
    return KINDS[kind](torch.randn(numel, device=device))


def kept_counts(numel: int) -> list[int]:
    """Return numbers of elements to keep, from none to all."""
    return sorted({0, min(1, numel), numel // 100, numel // 10, numel // 2, max(numel - 1, 0), numel})


def outputs(num_kept: int, device: torch.device = CPU) -> tuple[Tensor, Tensor]:
    """Return outputs for indices and values, filled with numbers that no kernel writes."""
    index_K = torch.full((num_kept,), -77, dtype=torch.int32, device=device)
    return index_K, torch.full((num_kept,), -77.0, device=device)


def count_of(count: int, device: torch.device = CPU) -> Tensor:
    return torch.tensor([count], dtype=torch.int32, device=device)


def check_topk(grad_N: Tensor, num_kept: int, residual_N: Tensor | None = None, next_N: Tensor | None = None) -> None:
    what = f"{num_kept} of {grad_N.numel()} {grad_N.dtype}"
    fed_N = reference.add_feedback(grad_N, residual_N).clone(memory_format=torch.contiguous_format)
    expected = outputs(num_kept, grad_N.device)
    reference.topk_select(fed_N, *expected)
    index_K, value_K = outputs(num_kept, grad_N.device)
    without_waiting(
        lambda: sparse.topk_select(grad_N, index_K, value_K, residual_N=residual_N, next_N=next_N), grad_N.device
    )
    assert_same(index_K, expected[0], f"index of {what}")
    assert_same(value_K, expected[1], f"value of {what}")
    if next_N is not None:
        fed_N[expected[0].long()] = 0.0
        assert_same(next_N, fed_N, f"next of {what}")


def check_encode(grad_N: Tensor, num_kept: int, residual_N: Tensor | None = None, next_N: Tensor | None = None) -> None:
    """Compare `topk_encode` with a selection, a packing and a copy of the values, one after the other."""
    what = f"{num_kept} of {grad_N.numel()} {grad_N.dtype}"
    numel, device = grad_N.numel(), grad_N.device
    index_K, value_K = outputs(num_kept, device)
    reference.topk_select(reference.add_feedback(grad_N, residual_N).contiguous(), index_K, value_K)
    packed = torch.empty(sparse.index_bytes(numel, num_kept), dtype=torch.uint8, device=device)
    reference.pack_indices(index_K, num_kept, numel, packed)
    expected = torch.cat([count_of(num_kept, device).view(torch.uint8), packed, value_K.view(torch.uint8)])
    payload = torch.full_like(expected, 0x5A)
    room = outputs(num_kept, device)
    expected_next_N = None if next_N is None else reference.add_feedback(grad_N, residual_N).clone()
    without_waiting(lambda: sparse.topk_encode(grad_N, payload, *room, residual_N=residual_N, next_N=next_N), device)
    assert_same(payload, expected, f"message with {what}")
    if next_N is not None and expected_next_N is not None:
        expected_next_N[index_K.long()] = 0.0
        assert_same(next_N, expected_next_N, f"next of {what}")


def check_collect(grad_N: Tensor, thresholds: tuple[int, int], num_kept: int, key: int) -> None:
    what = f"{num_kept} of {grad_N.numel()} {grad_N.dtype}, thresholds {thresholds}, key {key}"
    device = grad_N.device
    expected = outputs(num_kept, device)
    count = reference.collect(grad_N.to(torch.float32), thresholds, key, *expected)
    thresholds_2 = torch.tensor(thresholds, device=device)
    count_1 = count_of(-1, device)
    index_K, value_K = outputs(num_kept, device)
    without_waiting(lambda: sparse.collect(grad_N, thresholds_2, index_K, value_K, count_1, key=key), device)
    assert int(count_1) == count, f"{what}: {int(count_1)} written, not {count}"
    assert_same(index_K, expected[0], f"index of {what}")
    assert_same(value_K, expected[1], f"value of {what}")


def check_packing(index_K: Tensor, count: int, numel: int, offset: int = 0) -> None:
    """Pack and unpack `index_K`, in a message that starts `offset` bytes after an aligned address."""
    device, num_kept = index_K.device, index_K.numel()
    num_bytes = sparse.index_bytes(numel, num_kept)
    what = f"{count} of {num_kept} of {numel}, {reference.index_layout(numel, num_kept)}, offset {offset}"
    expected = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    reference.pack_indices(index_K, count, numel, expected)
    message = torch.full((offset + num_bytes + 5,), 0x5A, dtype=torch.uint8, device=device)
    packed = message[offset : offset + num_bytes]
    count_1 = count_of(count, device)
    without_waiting(lambda: sparse.pack_indices(index_K, count_1, numel, packed), device)
    assert_same(packed, expected, f"message with {what}")
    around = torch.cat([message[:offset], message[offset + num_bytes :]])
    assert (around == 0x5A).all(), f"{what}: wrote outside of the message: {around.tolist()}"
    unpacked_K = outputs(num_kept, device)[0]
    without_waiting(lambda: sparse.unpack_indices(packed, count_1, numel, unpacked_K), device)
    assert_same(unpacked_K[:count], index_K[:count], f"indices of {what}")
    assert not unpacked_K[count:].any(), f"{what}: {unpacked_K[count:].tolist()} after the last"


def without_waiting(call: Callable[[], T], device: torch.device) -> T:
    """Run `call`; on a CUDA device, fail if it waits for the device."""
    if device.type != "cuda":
        return call()
    with no_waits():
        return call()


def hostile_indices(num_kept: int, numel: int, seed: int) -> Tensor:
    """Return ascending indices, some of them outside of [0, numel): by little, or as far as an int32 goes."""
    generator = torch.Generator().manual_seed(seed)
    near_K = torch.randperm(numel + 6, generator=generator)[:num_kept] - 3
    far_K = torch.randint(-(1 << 31), MAX_NUMEL, (num_kept,), generator=generator)
    is_far_K = torch.rand(num_kept, generator=generator) < 0.1
    return torch.where(is_far_K, far_K, near_K).sort().values.to(torch.int32)


def check_hostile_indices(index_K: Tensor, count: int, numel: int) -> None:
    """Check that the kernels pack and add `index_K` as the reference does, and change nothing outside their outputs."""
    num_kept = index_K.numel()
    what = f"{count} of {num_kept} of {numel}, {reference.index_layout(numel, num_kept)}: {index_K[:9].tolist()}"
    expected = torch.zeros(sparse.index_bytes(numel, num_kept), dtype=torch.uint8)
    reference.pack_indices(index_K, count, numel, expected)
    message = torch.full((expected.numel() + 8,), 0x5A, dtype=torch.uint8)
    sparse.pack_indices(index_K, count_of(count), numel, message[4:-4])
    assert_same(message[4:-4], expected, f"message with {what}")
    assert (message[:4] == 0x5A).all(), what
    assert (message[-4:] == 0x5A).all(), what
    value_K, out = torch.randn(num_kept), torch.zeros(numel + 8)
    sparse.scatter_add(index_K, value_K, count_of(count), out[4:-4])
    expected_N = torch.zeros(numel)
    reference.scatter_add(index_K, value_K, count, expected_N)
    assert_same(out[4:-4], expected_N, f"sum of {what}")
    assert not out[:4].any(), what
    assert not out[-4:].any(), what


def some_indices(num_kept: int, numel: int, device: torch.device = CPU) -> Tensor:
    index_K = torch.empty(num_kept, dtype=torch.int32, device=device)
    reference.random_indices(numel, KEY, index_K)
    return index_K
