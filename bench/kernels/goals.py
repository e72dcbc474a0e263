"""The numbers that have a goal: kernels timed in turns with an alternative on the same bytes, such as `copy_`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from bench.kernels.codec_numbers import CodecTiming, codec_calls
from cgx_ray.plan import CodecSpec
from cgx_ray.planner.profile import fit_line
from cgx_ray.report.result import Row
from cgx_ray.runtime_ext import reference
from cgx_ray.session.calibrate import Call, best_seconds

NUM_ROUNDS = 15
# Keeps memory small: the plain-PyTorch encoder takes some 100 bytes per element.
REFERENCE_NUMEL = 1 << 22
LATENCY_BYTES = tuple(1 << exponent for exponent in range(10, 21, 2))


def dense_goals(grad_N: Tensor, out_N: Tensor, key: int) -> list[Row]:
    """Compare qsgd encode, qsgd decode-add and ef_signsgd encode, which updates a residual, with `copy_`.

    `copy_` goes from `grad_N` to `out_N`. On the CPU, the throughput of each is 4 N bytes over its time. On CUDA it
    counts all bytes read and written, which are 8 N for `copy_`.
    """
    numel = grad_N.numel()
    qsgd, signs = (codec_calls(name, grad_N, out_N, key) for name in ("qsgd", "ef_signsgd"))
    calls: list[Call] = [partial(out_N.copy_, grad_N), qsgd.encode, qsgd.decode_add, signs.encode]
    copy_s, *seconds = best_seconds(calls, grad_N.device, num_rounds=NUM_ROUNDS)
    is_cuda = grad_N.device.type == "cuda"
    names = ("qsgd_encode", "qsgd_decode_add", "ef_signsgd_encode_residual")
    goals = (">= 0.7",) * 3 if is_cuda else (">= 0.6", ">= 1.3", ">= 0.5")
    moved = (4 * numel + qsgd.payload_bytes, 8 * numel + qsgd.payload_bytes, 12 * numel + signs.payload_bytes)
    copied = 8 * numel if is_cuda else 4 * numel
    return [
        limited(name, "GB/s", (num_bytes if is_cuda else copied) / s / 1e9, copied / copy_s / 1e9, goal)
        for name, s, num_bytes, goal in zip(names, seconds, moved, goals, strict=True)
    ]


def topk_goal(grad_N: Tensor, out_N: Tensor, key: int) -> Row:
    """Compare exact top-k encode at 1 %, with packed indices and without feedback, with `torch.topk`.

    `torch.topk` gets the magnitudes ready-made, leaves its result unsorted, and packs nothing.
    """
    spec = CodecSpec(name="topk", density=0.01)
    magnitude_N = grad_N.abs()
    select = partial(torch.topk, magnitude_N, spec.num_kept(grad_N.numel()), sorted=False)
    calls: list[Call] = [codec_calls("topk", grad_N, out_N, key, with_feedback=False).encode, select]
    # Few rounds, because torch.topk takes seconds.
    encode_s, select_s = best_seconds(calls, grad_N.device, num_rounds=3)
    goal = ">= 5" if grad_N.device.type == "cuda" else ">= 15"
    return _based("topk_over_torch_topk", grad_N.numel(), encode_s, select_s, goal)


def bf16_goal(grad_N: Tensor, out_N: Tensor, key: int) -> Row:
    """Compare bf16 with `Tensor.to`, which allocates its result. No goal on CUDA: there both are one kernel."""
    calls: list[Call] = [codec_calls("bf16", grad_N, out_N, key).encode, partial(grad_N.to, torch.bfloat16)]
    encode_s, to_s = best_seconds(calls, grad_N.device, num_rounds=NUM_ROUNDS)
    goal = None if grad_N.device.type == "cuda" else ">= 1"
    return _based("bf16_over_tensor_to", grad_N.numel(), encode_s, to_s, goal)


def reference_goal(grad_N: Tensor, out_N: Tensor, key: int) -> Row:
    """Compare qsgd encode on the CPU with its plain-PyTorch specification, for at most `REFERENCE_NUMEL` elements."""
    grad_N, out_N = grad_N[:REFERENCE_NUMEL], out_N[:REFERENCE_NUMEL]
    spec = CodecSpec(name="qsgd")
    payload = torch.empty(spec.payload_bytes(grad_N.numel()), dtype=torch.uint8)
    assert spec.bits is not None
    assert spec.bucket_size is not None
    specified = partial(
        reference.qsgd_encode,
        grad_N,
        payload,
        bits=spec.bits,
        bucket_size=spec.bucket_size,
        grid=reference.MAX_MIN,
        key=key,
        stochastic=True,
    )
    calls: list[Call] = [codec_calls("qsgd", grad_N, out_N, key).encode, specified]
    encode_s, reference_s = best_seconds(calls, grad_N.device, num_rounds=3)
    return _based("qsgd_over_reference", grad_N.numel(), encode_s, reference_s, ">= 20")


def overhead_goals(timings: Sequence[CodecTiming], device: torch.device) -> list[Row]:
    """Return the fixed cost of an encode: a of the line a + b x through the times at the sizes LATENCY_BYTES."""
    rows = []
    for name in dict.fromkeys(timing.codec for timing in timings):
        small = [timing for timing in timings if timing.codec == name and timing.message_bytes in LATENCY_BYTES]
        sizes = [timing.message_bytes for timing in small]
        fixed_s, _ = fit_line(sizes, [timing.encode_s for timing in small])
        copy_s, _ = fit_line(sizes, [timing.copy_s for timing in small])
        goal = "<= 20" if device.type == "cpu" else None
        rows.append(Row(name=f"{name}_call_overhead", value=fixed_s * 1e6, unit="us", limit=copy_s * 1e6, goal=goal))
    return rows


def limited(name: str, unit: str, value: float, limit: float, goal: str | None = None) -> Row:
    """Return a row whose ratio is value over limit."""
    return Row(name=name, value=value, unit=unit, limit=limit, ratio=value / limit, goal=goal)


def _based(name: str, numel: int, seconds: float, baseline_s: float, goal: str | None) -> Row:
    gbps, baseline_gbps = 4 * numel / seconds / 1e9, 4 * numel / baseline_s / 1e9
    return Row(name=name, value=gbps, unit="GB/s", baseline=baseline_gbps, ratio=gbps / baseline_gbps, goal=goal)
