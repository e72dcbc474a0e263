"""CUDA kernels that code several rows in one launch, against the reference bit for bit, in the emulator and on a GPU.

A row is a part of a gradient with its payload.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.bucket_codecs import BucketKernels, QsgdKernels, SignKernels, name
from support.cuda_emulator import Emulator
from support.same_bits import assert_same
from torch import Tensor

from cgx_ray.codecs import Codec, make_codec
from cgx_ray.codecs.codec import PayloadRow
from cgx_ray.plan import CodecSpec
from cgx_ray.runtime_ext import cuda, reference
from cgx_ray.runtime_ext.cuda import KernelRow

CODECS = [
    *(QsgdKernels("max_min", bits) for bits in (1, 3, 4, 8)),
    *(QsgdKernels(grid, 4, 40, stochastic) for grid in ("l2", "linf") for stochastic in (True, False)),
    *(SignKernels(kind) for kind in ("ef_signsgd", "onebit")),
]
# Chunks as those of five ranks, one of them empty.
NUMELS = (1280, 1280, 0, 1285, 3)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
GUARD = 0x5A


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Yield the device of the kernels: a GPU, or the CPU with the emulator."""
    if request.param == "emulated":
        request.getfixturevalue("emulated_cuda")
        yield torch.device("cpu")
    else:
        yield torch.device("cuda", torch.cuda.current_device())


def _random(numel: int, device: torch.device, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(device)


def _payloads(codec: BucketKernels, numels: Sequence[int], device: torch.device) -> list[Tensor]:
    """Return payloads in the same memory, as messages: aligned, with other bytes between them."""
    sizes = [codec.num_bytes(numel) for numel in numels]
    pitch = -(-(max(sizes) + 32) // 64) * 64
    room = torch.full((pitch * len(sizes),), GUARD, dtype=torch.uint8, device=device)
    return [room[index * pitch + 32 :][:size] for index, size in enumerate(sizes)]


def _with_key(codec: BucketKernels, key: int) -> BucketKernels:
    return replace(codec, key=key) if isinstance(codec, QsgdKernels) else codec


def _expected(codec: BucketKernels, fed_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the payload of the reference, and what it decodes to."""
    payload = torch.zeros(codec.num_bytes(fed_N.numel()), dtype=torch.uint8, device=fed_N.device)
    codec.reference_encode(fed_N, payload)
    decoded_N = torch.empty(fed_N.numel(), device=fed_N.device)
    codec.reference_decode(payload, decoded_N)
    return payload, decoded_N


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("has_memory", [True, False])
def test_rows_are_encoded_and_decoded_as_each_by_itself(
    codec: BucketKernels, has_memory: bool, device: torch.device
) -> None:
    total = sum(NUMELS)
    residual_N = _random(total, device, 1) if has_memory else None
    for dtype in DTYPES:
        grad_N, next_N = _random(total, device, 0).to(dtype), torch.zeros(total, device=device)
        cuts = list(itertools.pairwise(itertools.accumulate(NUMELS, initial=0)))
        payloads = _payloads(codec, NUMELS, device)
        rows = [
            KernelRow(
                grad_N[start:stop],
                payload,
                1000 + start,
                residual_N[start:stop] if residual_N is not None else None,
                next_N[start:stop] if has_memory else None,
            )
            for (start, stop), payload in zip(cuts, payloads, strict=True)
        ]
        codec.encode_rows(rows)
        decoded_N = torch.full((total,), math.pi, device=device)
        codec.decode_rows(
            [KernelRow(decoded_N[start:stop], row.payload) for (start, stop), row in zip(cuts, rows, strict=True)]
        )
        for row, (start, stop) in zip(rows, cuts, strict=True):
            fed_N = reference.add_feedback(row.grad_N, row.residual_N).contiguous()
            expected, expected_N = _expected(_with_key(codec, row.key), fed_N)
            assert_same(row.payload, expected, f"payload of [{start}, {stop}) of {dtype}")
            assert_same(decoded_N[start:stop], expected_N, f"decoded [{start}, {stop})")
            if row.next_N is not None:
                assert_same(row.next_N, fed_N - expected_N, f"next_N of [{start}, {stop})")


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_a_sum_is_that_of_decoded_messages_in_their_order(
    codec: BucketKernels, num_ranks: int, device: torch.device
) -> None:
    for numel, has_residual in itertools.product((1285, 256), (None, False, True)):
        grad_N, residual_N = _random(numel, device, 0), _random(numel, device, 1)
        payloads = _payloads(codec, [numel] * (num_ranks - 1), device) if num_ranks > 1 else []
        sum_N = grad_N.clone()
        for seed, payload in enumerate(payloads):
            sent, decoded_N = _expected(codec, _random(numel, device, 10 + seed))
            payload.copy_(sent)
            sum_N += decoded_N
        # On a GPU torch divides by another way.
        fed_N = (sum_N.cpu() / num_ranks).to(device)
        if has_residual:
            fed_N = fed_N.cpu().add_(residual_N.cpu(), alpha=1 / num_ranks).to(device)
        expected, expected_N = _expected(_with_key(codec, 77), fed_N)
        out, next_N = torch.full_like(expected, GUARD), torch.empty(numel, device=device)
        own = KernelRow(
            grad_N.clone(), out, 77, residual_N if has_residual else None, next_N if has_residual is not None else None
        )
        codec.sum(own, payloads, num_ranks)
        assert_same(out, expected, f"payload of {numel}")
        assert_same(own.grad_N, grad_N, "the gradient, which is only read")
        if has_residual is not None:
            assert_same(next_N, (fed_N - expected_N) * num_ranks, f"next_N of {numel}")


@pytest.mark.parametrize("text", ["qsgd", "qsgd:bits=3,rounding=nearest", "terngrad", "ef_signsgd", "onebit"])
def test_a_codec_does_in_three_launches_what_the_loops_over_its_rows_do(text: str, emulated_cuda: Emulator) -> None:
    numel, num_ranks, cpu = 1285, 3, torch.device("cpu")

    def coded(loops: bool) -> list[Tensor]:
        codec = make_codec(CodecSpec.parse(text))
        kind = Codec if loops else type(codec)
        memory = codec.new_memory(numel)
        if memory is not None:
            memory.now["residuals"].copy_(_random(numel, cpu, 1))
        rooms = torch.zeros(num_ranks, codec.payload_bytes(numel) + 64, dtype=torch.uint8)
        own, *others = (room[32 : 32 + codec.payload_bytes(numel)] for room in rooms)
        parts_RN = torch.stack([_random(numel, cpu, seed) for seed in range(num_ranks - 1)])
        kind.encode_rows(codec, [PayloadRow(part_N, out, 5) for part_N, out in zip(parts_RN, others, strict=True)])
        kind.sum_rows(codec, PayloadRow(_random(numel, cpu, 9), own, 7, memory), others, num_ranks)
        decoded_RN = torch.zeros(num_ranks, numel)
        kind.decode_rows(codec, [PayloadRow(*pair) for pair in zip(decoded_RN, (own, *others), strict=True)])
        return [rooms, decoded_RN, *(memory.next.values() if memory is not None else [])]

    before = emulated_cuda.num_launches
    found = coded(loops=False)
    assert emulated_cuda.num_launches - before == 3
    for one, other in zip(found, coded(loops=True), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("codec", [CODECS[2], CODECS[-1]], ids=name)
def test_rows_take_one_launch_unless_they_are_many_or_lie_apart(codec: BucketKernels, emulated_cuda: Emulator) -> None:
    cpu = torch.device("cpu")

    def num_launches(rows: Sequence[KernelRow]) -> int:
        before = emulated_cuda.num_launches
        codec.encode_rows(rows)
        return emulated_cuda.num_launches - before

    numel, most = 128, cuda.MAX_ROWS
    grad_N = _random((most + 1) * numel, cpu, 0)
    parts, payloads = grad_N.split(numel), _payloads(codec, [numel] * (most + 1), cpu)
    rows = [KernelRow(*pair) for pair in zip(parts, payloads, strict=True)]
    assert num_launches([]) == 0
    assert num_launches(rows[:most]) == 1
    assert num_launches(rows) == 2
    assert num_launches([rows[0], KernelRow(_random(numel, cpu, 1), payloads[1])]) == 2
    with_gaps = KernelRow(grad_N[: 2 * numel : 2], payloads[1])
    assert num_launches([rows[0], with_gaps, rows[2]]) == 3
    expected, _ = _expected(_with_key(codec, 0), with_gaps.grad_N.contiguous())
    assert_same(payloads[1], expected, "payload of a row with gaps")


def test_the_struct_of_rows_is_that_of_the_kernels() -> None:
    table = cuda._table([KernelRow(torch.zeros(5), torch.zeros(9), key=2**32 - 1)] * 2, [3, 7], [11, 13])
    assert (table.size, table.nbytes) == (1, cuda.MAX_ROWS * 32 + 8), "see the static_assert in csrc/cuda/bucket.h"
    row = np.dtype([("start", "i8"), ("numel", "i8"), ("payload", "i8"), ("key", "u4")], align=True)
    assert table.view(np.uint8)[: 2 * row.itemsize].view(row).tolist() == [(3, 5, 11, 2**32 - 1), (7, 5, 13, 2**32 - 1)]
    assert table.view(np.int32)[-2] == 2


def test_payloads_of_a_sum_lie_at_equal_distances(emulated_cuda: Emulator) -> None:
    codec, numel = CODECS[2], 128
    payloads = _payloads(codec, [numel] * 4, torch.device("cpu"))
    with pytest.raises(AssertionError, match="equal distances"):
        codec.sum(KernelRow(torch.zeros(numel), payloads[3].clone()), [payloads[0], payloads[1], payloads[3]], 4)
