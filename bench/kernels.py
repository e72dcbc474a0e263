"""`cgx-ray bench kernels`: what the codecs cost and what they lose, without Ray and without a network.

Throughput is in bytes of float32 gradient a second, 4 for each element, unless `kernel_goals` says otherwise. Every
number is the best of several turns; `copy_` and other peers take turns with what they are compared with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from cgx_ray.bench.codec_numbers import QUALITY_NUMEL, Point, Quality, draw_samples, measure_quality, measure_size
from cgx_ray.bench.kernel_goals import (
    LATENCY_BYTES,
    bf16_goal,
    dense_goals,
    limited,
    overhead_goals,
    reference_goal,
    topk_goal,
)
from cgx_ray.errors import ConfigError
from cgx_ray.plan import CODEC_DEFAULTS
from cgx_ray.report.result import Row
from cgx_ray.runtime_ext import ops

SWEPT_CODECS = ("qsgd", "topk", "ef_signsgd", "bf16")
GOAL_NUMEL = 1 << 26
_SWEPT_BYTES = tuple(1 << exponent for exponent in range(10, 29, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """What to measure: `numel` elements of the large gradients, on `device`, with `threads` threads on the CPU."""

    device: str = "cpu"
    numel: int = GOAL_NUMEL
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device {self.device!r} is not allowed; give cpu or cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device cuda: PyTorch sees no CUDA device here; give --device cpu")
        if not 1 << 10 <= self.numel < 1 << 31:
            raise ConfigError(f"numel {self.numel} is not allowed; give 1024 to 2**31 - 1")
        if self.threads < 1:
            raise ConfigError(f"threads {self.threads} is not allowed; give 1 or more")

    @property
    def is_judged(self) -> bool:
        """Goals are for gradients far beyond all caches, and for one core."""
        return self.numel == GOAL_NUMEL and self.threads == 1


@dataclass(slots=True)
class KernelNumbers:
    """What was measured.

    options   what was asked for
    goals     rows that have a goal, or would have one on the other device
    points    SWEPT_CODECS over message sizes
    large     every codec at `KernelOptions.numel`
    qualities every codec at QUALITY_NUMEL
    """

    options: KernelOptions
    goals: list[Row] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    large: list[Point] = field(default_factory=list)
    qualities: list[Quality] = field(default_factory=list)

    def rows(self) -> list[Row]:
        rows = [
            *self.goals,
            Row(name="numel", value=self.options.numel, unit="elements"),
            Row(name="threads", value=self.options.threads, unit="threads"),
        ]
        for point in self.points:
            size = format_bytes(point.message_bytes)
            rows += _throughput_rows(point, f"_{size}")
            if point.message_bytes in LATENCY_BYTES:
                latency_us, copy_us = point.encode_s * 1e6, point.copy_s * 1e6
                rows.append(limited(f"{point.codec}_encode_latency_{size}", "us", latency_us, copy_us))
        for point in self.large:
            rows += _throughput_rows(point, "")
        for quality in self.qualities:
            name = quality.spec.name
            rows.append(Row(name=f"{name}_bits", value=quality.bits, unit="bits/element"))
            rows += [Row(name=f"{name}_error_{x}", value=error, unit="relative") for x, error in quality.errors.items()]
        return rows


def measure_kernels(options: KernelOptions, on_part: Callable[[str, float], None]) -> KernelNumbers:
    """Measure everything, about 2 minutes for 2**26 elements on one core.

    on_part  gets, before each part, what it measures and the share of the parts that are done
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        numbers = KernelNumbers(options=options)
        parts = _parts(numbers)
        for index, (what, measure) in enumerate(parts):
            on_part(what, index / len(parts))
            measure()
        if not options.is_judged:
            numbers.goals = [replace(row, goal=None, met=None) for row in numbers.goals]
        return numbers
    finally:
        torch.set_num_threads(threads_before)


def _parts(numbers: KernelNumbers) -> list[tuple[str, Callable[[], None]]]:
    """(what it measures, call that adds it to `numbers`), in the order in which they must run."""
    options = numbers.options
    device = torch.device(options.device)
    key = ops.message_key(options.seed, 0, 0, 0, 0)
    largest = max(options.numel, LATENCY_BYTES[-1] // 4)
    all_N = torch.randn(largest, generator=torch.Generator().manual_seed(options.seed)).to(device)
    all_out_N = torch.zeros_like(all_N)
    grad_N, out_N = all_N[: options.numel], all_out_N[: options.numel]

    parts: list[tuple[str, Callable[[], None]]] = [
        ("dense kernels and copy_", lambda: numbers.goals.extend(dense_goals(grad_N, out_N, key))),
        ("top-k and torch.topk", lambda: numbers.goals.append(topk_goal(grad_N, out_N, key))),
        ("bf16 and Tensor.to", lambda: numbers.goals.append(bf16_goal(grad_N, out_N, key))),
    ]
    if device.type == "cpu":
        parts.append(("qsgd and plain PyTorch", lambda: numbers.goals.append(reference_goal(grad_N, out_N, key))))

    def sweep(numel: int) -> None:
        # Short calls can be had often, and are the ones that an interrupt spoils.
        num_rounds = 15 if 4 * numel in LATENCY_BYTES else 5
        numbers.points += measure_size(SWEPT_CODECS, all_N[:numel], all_out_N[:numel], key, num_rounds=num_rounds)

    for message_bytes in _SWEPT_BYTES:
        if message_bytes <= 4 * largest:
            parts.append((f"gradients of {format_bytes(message_bytes)}", partial(sweep, message_bytes // 4)))
    parts.append(("fixed cost of a call", lambda: numbers.goals.extend(overhead_goals(numbers.points, device))))

    samples = draw_samples(QUALITY_NUMEL, options.seed, device)

    def codec(name: str) -> None:
        numbers.large += measure_size([name], grad_N, out_N, key, num_rounds=5)
        numbers.qualities.append(measure_quality(name, samples, key))

    return parts + [(f"codec {name}", partial(codec, name)) for name in CODEC_DEFAULTS]


def format_bytes(num_bytes: int) -> str:
    """`"64KB"`, of 1,024 bytes, `"256MB"`."""
    return f"{num_bytes >> 10}KB" if num_bytes < 1 << 20 else f"{num_bytes >> 20}MB"


def _throughput_rows(point: Point, suffix: str) -> list[Row]:
    return [
        limited(
            f"{point.codec}_{what}_gbps{suffix}",
            "GB/s",
            point.message_bytes / seconds / 1e9,
            point.message_bytes / point.copy_s / 1e9,
        )
        for what, seconds in (("encode", point.encode_s), ("decode_add", point.decode_add_s))
    ]
