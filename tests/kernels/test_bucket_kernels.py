"""The CPU kernels of codecs that send every element: native against the reference bit for bit, on any threads."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.bucket_codecs import QSGD, SIGN, BucketKernels, QsgdKernels, SignKernels, decode, name, roundings
from support.same_bits import assert_same
from torch import Tensor

from cgx_ray.runtime_ext import reference
from cgx_ray.runtime_ext.checks import native

# Those that this processor runs; the widest is in use by default.
INSTRUCTION_SETS: list[str] = native.instruction_sets()
SIZES = (0, 1, 7, 127, 128, 129, 1000)
# The smallest and the largest are for `make test-faults`, as random sizes, below, have them all.
BUCKET_SIZES = (pytest.param(8, marks=pytest.mark.slow), 40, 128, pytest.param(1024, marks=pytest.mark.slow))
# Bits between 4 and 8 are for `make test-faults`. Random sizes, below, have them all.
CODECS = [
    pytest.param(codec, id=name(codec), marks=[pytest.mark.slow] if getattr(codec, "bits", 0) in (5, 6, 7) else [])
    for codec in QSGD + SIGN
]
FEEDBACKS = ("none", "next", "residual", "residual and next", "next is residual")

SPECIAL = {
    "denormal": lambda grad_N: grad_N * 1e-40,
    "denormal scale": lambda grad_N: 1e-3 + grad_N * 1e-38,
    "all equal": lambda grad_N: torch.full_like(grad_N, -0.1),
    "zeros of both signs": lambda grad_N: torch.where(grad_N < 0, -0.0, 0.0),
    "negative zeros": lambda grad_N: torch.full_like(grad_N, -0.0),
    "no negative": lambda grad_N: grad_N.clamp(min=0),
    "no positive": lambda grad_N: -grad_N.abs(),
    "one large": lambda grad_N: _put(grad_N * 1e-30, 1.0),
    "huge": lambda grad_N: grad_N * 1e38,
    "any bits": lambda grad_N: torch.randint(-(1 << 31), 1 << 31, grad_N.shape).int().view(torch.float32),
    "nan": lambda grad_N: _put(grad_N, math.nan),
    "negative nan": lambda grad_N: _put(grad_N, -math.nan),
    "inf": lambda grad_N: _put(grad_N, math.inf),
    "negative inf": lambda grad_N: _put(grad_N, -math.inf),
}


def _put(grad_N: Tensor, value: float) -> Tensor:
    grad_N[[3, 200, 201, 999]] = value
    return grad_N


def _guarded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return a buffer with one more element on either side, and the unaligned copy of `x` in the middle of it."""
    buffer = torch.full((x.numel() + 2,), 77, dtype=x.dtype)
    buffer[1:-1] = x
    return buffer, buffer[1:-1]


def _assert_guards(*buffers: Tensor) -> None:
    for buffer in buffers:
        assert buffer[0] == 77, "wrote before the beginning"
        assert buffer[-1] == 77, "wrote past the end"


def _check_encode(codec: BucketKernels, grad_N: Tensor, feedback: str, instruction_sets: Sequence[str]) -> Tensor:
    numel = grad_N.numel()
    has_residual, has_next = "residual" in feedback, "next" in feedback
    start_N = torch.randn(numel) * torch.nan_to_num(grad_N.float(), 1, 1, 1)
    fed_N = reference.add_feedback(grad_N, start_N if has_residual else None).contiguous()
    expected = torch.full((codec.num_bytes(numel),), 0x5A, dtype=torch.uint8)
    codec.reference_encode(fed_N, expected)
    decoded_N = torch.empty(numel)
    if has_next:
        codec.reference_decode(expected, decoded_N)
    for instruction_set in instruction_sets:
        residual, residual_N = _guarded(start_N)
        next_, next_N = _guarded(torch.full((numel,), 7.0))
        if feedback == "next is residual":
            next_, next_N = residual, residual_N
        out, out_M = _guarded(torch.full_like(expected, 0xA5))
        kept = {"residual_N": residual_N if has_residual else None, "next_N": next_N if has_next else None}
        with _loops_for(instruction_set):
            codec.encode(grad_N, out_M, **kept)
        assert_same(out_M, expected, f"payload, {instruction_set}")
        _assert_guards(out, residual, next_)
        if has_next:
            assert_same(next_N, fed_N - decoded_N, instruction_set)
        if feedback != "next is residual":
            assert torch.equal(residual_N, start_N), "the residual is read only"
    return expected


def _check_decode(codec: BucketKernels, payload: Tensor, numel: int, instruction_sets: Sequence[str]) -> None:
    _, payload = _guarded(payload)
    expected_N = torch.empty(numel)
    codec.reference_decode(payload, expected_N)
    start_N = torch.randn(numel)
    for instruction_set in instruction_sets:
        for add in (False, True):
            out, out_N = _guarded(start_N)
            with _loops_for(instruction_set):
                codec.decode(payload, out_N, add=add)
            assert_same(out_N, start_N + expected_N if add else expected_N, instruction_set)
            _assert_guards(out)


@contextmanager
def _loops_for(instruction_set: str) -> Iterator[None]:
    native.use_instruction_set(instruction_set)
    try:
        yield
    finally:
        native.use_instruction_set(INSTRUCTION_SETS[-1])


def _check(
    codec: BucketKernels,
    grad_N: Tensor,
    feedback: str = "none",
    instruction_sets: Sequence[str] = INSTRUCTION_SETS[-1:],
) -> None:
    """Compare with the reference, which is computed once for all instruction sets."""
    payload = _check_encode(codec, grad_N, feedback, instruction_sets)
    _check_decode(codec, payload, grad_N.numel(), instruction_sets)


@pytest.mark.long
@pytest.mark.parametrize("bucket_size", BUCKET_SIZES)
@pytest.mark.parametrize("codec", CODECS)
def test_native_equals_the_reference_bit_for_bit(codec: BucketKernels, bucket_size: int) -> None:
    for each in roundings(replace(codec, bucket_size=bucket_size)):
        for numel in SIZES:
            for feedback in FEEDBACKS:
                _check(each, torch.randn(numel) * 1e-3, feedback, INSTRUCTION_SETS)


@pytest.mark.long
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("codec", CODECS)
def test_native_equals_the_reference_on_special_numbers(codec: BucketKernels, kind: str) -> None:
    for each in roundings(codec):
        for bucket_size in (8, 128):
            for feedback in ("none", "next is residual"):
                special_N = SPECIAL[kind](torch.randn(1000))
                _check(replace(each, bucket_size=bucket_size), special_N, feedback, INSTRUCTION_SETS)


@settings(max_examples=300, deadline=None)
@given(
    instruction_set=st.sampled_from(INSTRUCTION_SETS),
    codec=st.sampled_from(QSGD + SIGN),
    numel=st.integers(0, 700),
    bucket_size=st.integers(1, 40).map(lambda n: 8 * n),
    exponent=st.integers(-45, 38),
    offset=st.sampled_from([0.0, 1.0, -3.7, 1e30]),
    stochastic=st.booleans(),
    feedback=st.sampled_from(FEEDBACKS),
    seed=st.integers(0, 1 << 32),
)
def test_native_equals_the_reference_at_any_shape_and_magnitude(
    *,
    instruction_set: str,
    codec: BucketKernels,
    numel: int,
    bucket_size: int,
    exponent: int,
    offset: float,
    stochastic: bool,
    feedback: str,
    seed: int,
) -> None:
    codec = roundings(replace(codec, bucket_size=bucket_size))[0 if stochastic else -1]
    grad_N = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent + offset
    _check(codec, grad_N, feedback, [instruction_set])


@pytest.mark.parametrize("codec", [QsgdKernels("max_min", 4), QsgdKernels("l2", 3, 64), *SIGN], ids=name)
def test_any_number_of_threads_gives_the_same_bits(codec: BucketKernels, num_threads: int) -> None:
    _check(codec, torch.randn((1 << 20) + 3) * 1e-3, "next is residual")


@pytest.mark.parametrize("codec", [QsgdKernels("max_min", 4), QsgdKernels("linf", 2), SignKernels("onebit")], ids=name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_native_equals_the_reference_on_half_precision_and_strided_gradients(
    codec: BucketKernels, dtype: torch.dtype
) -> None:
    _check(codec, torch.randn(1000).to(dtype), "residual and next")
    _check(codec, torch.randn(2000)[::2], "residual and next")
    _check(codec, torch.randn(1001)[1:], "residual and next")


@pytest.mark.parametrize("codec", [QsgdKernels("max_min", 3, 64), QsgdKernels("l2", 5, 64), *SIGN], ids=name)
def test_strided_outputs_get_what_contiguous_ones_get(codec: BucketKernels) -> None:
    grad_N, residual_N, next_N = torch.randn(1001), torch.randn(1001), torch.empty(1001)
    payload = torch.empty(codec.num_bytes(1001), dtype=torch.uint8)
    codec.encode(grad_N, payload, residual_N=residual_N, next_N=next_N)
    strided = torch.zeros(2 * payload.numel(), dtype=torch.uint8)[::2]
    strided_next_N, out_N = torch.zeros(2002)[::2], torch.zeros(2002)[::2]
    codec.encode(grad_N, strided, residual_N=residual_N, next_N=strided_next_N)
    assert torch.equal(strided, payload)
    assert_same(strided_next_N.contiguous(), next_N)
    codec.decode(strided, out_N)
    assert_same(out_N.contiguous(), decode(codec, payload, 1001))


@pytest.mark.long
@pytest.mark.parametrize("bucket_size", [128, 72])
@pytest.mark.parametrize("codec", [QsgdKernels("max_min", 4), QsgdKernels("linf", 3), *SIGN], ids=name)
def test_what_is_not_sent_of_a_large_gradient_equals_the_reference(codec: BucketKernels, bucket_size: int) -> None:
    # Aligned and from 2**22 elements on, `next_N` is written past the caches.
    codec = replace(codec, bucket_size=bucket_size)
    numel = (1 << 22) + 37
    grad_N, residual_N = torch.randn(numel), torch.randn(numel)
    fed_N = grad_N + residual_N
    expected, decoded_N = torch.empty(codec.num_bytes(numel), dtype=torch.uint8), torch.empty(numel)
    codec.reference_encode(fed_N, expected)
    codec.reference_decode(expected, decoded_N)
    for instruction_set in INSTRUCTION_SETS:
        with _loops_for(instruction_set):
            payload, next_N = torch.zeros_like(expected), torch.zeros(numel)
            codec.encode(grad_N, payload, residual_N=residual_N, next_N=next_N)
            assert_same(payload, expected, instruction_set)
            assert_same(next_N, fed_N - decoded_N, instruction_set)


def test_loops_exist_for_every_processor_and_others_are_refused() -> None:
    assert ["portable", "avx2", "avx512"][: len(INSTRUCTION_SETS)] == INSTRUCTION_SETS
    with pytest.raises(ValueError, match=f"'sve' does not run here; give {', '.join(INSTRUCTION_SETS)}"):
        native.use_instruction_set("sve")


def test_the_child_of_a_process_with_workers_starts_its_own() -> None:
    code = """
import os, torch
from cgx_ray.runtime_ext import ops
torch.set_num_threads(4)
grad_N = torch.randn(1 << 20)
def encode():
    out = torch.empty(ops.qsgd_bytes(1 << 20, 4, 128, "max_min"), dtype=torch.uint8)
    ops.qsgd_encode(grad_N, out, bits=4, bucket_size=128, key=1)
    return out
before = encode()
child = os.fork()
if child == 0:
    after = encode()
    num_threads = len(os.listdir("/proc/self/task"))  # before torch starts some
    os._exit(num_threads if after.numpy().tobytes() == before.numpy().tobytes() else 100)
_, status = os.waitpid(child, 0)
assert torch.equal(encode(), before)
num_threads = os.waitstatus_to_exitcode(status)
assert num_threads == 4, num_threads
"""
    _run_python(code)


def test_callers_in_several_threads_get_what_one_gets() -> None:
    code = """
import threading, torch
from cgx_ray.runtime_ext import ops
torch.set_num_threads(3)
grad_N = torch.randn(1 << 19)
def encode(key):
    out = torch.empty(ops.qsgd_bytes(1 << 19, 4, 128, "max_min"), dtype=torch.uint8)
    ops.qsgd_encode(grad_N, out, bits=4, bucket_size=128, key=key)
    return out
expected = [encode(key) for key in range(4)]
wrong = []
def run(key):
    wrong.extend(i for i in range(50) if not torch.equal(encode(key), expected[key]))
threads = [threading.Thread(target=run, args=(key,)) for key in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not wrong, wrong
"""
    _run_python(code)


def _run_python(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
