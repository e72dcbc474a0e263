"""`python -m bench kernels`: speed and error of the codecs, without Ray and without a network.

Throughput is bytes of float32 gradient per second, 4 per element, unless `kernel_goals` says otherwise. Every number is
the best of several turns, and a codec and its alternative take turns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from rich.table import Table

from bench.kernels.codec_numbers import (
    DISTRIBUTIONS,
    QUALITY_NUMEL,
    CodecTiming,
    Quality,
    draw_samples,
    measure_quality,
    measure_size,
)
from bench.kernels.goals import (
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
from cgx_ray.report.show import new_table
from cgx_ray.report.style import (
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    VERMILION,
    add_legend,
    add_title,
    clean,
    new_figure,
    plain_numbers,
    save_figure,
)
from cgx_ray.runtime_ext import ops
from cgx_ray.units import format_bytes, format_count

SWEPT_CODECS = ("qsgd", "topk", "ef_signsgd", "bf16")
GOAL_NUMEL = 1 << 26
_SWEPT_BYTES = tuple(1 << exponent for exponent in range(10, 29, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """Options of the bench. `numel`: elements of the large gradients."""

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
        """True if goals apply: for gradients much larger than all caches, and one core."""
        return self.numel == GOAL_NUMEL and self.threads == 1


@dataclass(slots=True)
class KernelNumbers:
    """The measured numbers.

    goals      rows that have a goal on this device or another
    timings    SWEPT_CODECS over message sizes
    large      every codec at `KernelOptions.numel`
    qualities  every codec at QUALITY_NUMEL
    """

    options: KernelOptions
    goals: list[Row] = field(default_factory=list)
    timings: list[CodecTiming] = field(default_factory=list)
    large: list[CodecTiming] = field(default_factory=list)
    qualities: list[Quality] = field(default_factory=list)

    def rows(self) -> list[Row]:
        rows = [
            *self.goals,
            Row(name="numel", value=self.options.numel, unit="elements"),
            Row(name="threads", value=self.options.threads, unit="threads"),
        ]
        for timing in self.timings:
            size = _row_size(timing.message_bytes)
            rows += _throughput_rows(timing, f"_{size}")
            if timing.message_bytes in LATENCY_BYTES:
                latency_us, copy_us = timing.encode_s * 1e6, timing.copy_s * 1e6
                rows.append(limited(f"{timing.codec}_encode_latency_{size}", "us", latency_us, copy_us))
        for timing in self.large:
            rows += _throughput_rows(timing, "")
        for quality in self.qualities:
            name = quality.spec.name
            rows.append(Row(name=f"{name}_bits", value=quality.bits, unit="bits/element"))
            rows += [Row(name=f"{name}_error_{x}", value=error, unit="relative") for x, error in quality.errors.items()]
        return rows


def _row_size(num_bytes: int) -> str:
    """Return "64KB" for 64 KiB. Names of rows must stay the same from run to run, so they keep this form."""
    return f"{num_bytes >> 10}KB" if num_bytes < 1 << 20 else f"{num_bytes >> 20}MB"


def measure_kernels(options: KernelOptions, on_part: Callable[[str, float], None]) -> KernelNumbers:
    """Measure everything, which takes about 2 minutes for 2**26 elements on one core.

    on_part  called before each part with its name and the fraction done
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
    """Return (name, call that adds its numbers to `numbers`) per part, in the order in which parts must run."""
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
        # Interrupts disturb short calls the most, and more rounds of them take little time.
        num_rounds = 15 if 4 * numel in LATENCY_BYTES else 5
        numbers.timings += measure_size(SWEPT_CODECS, all_N[:numel], all_out_N[:numel], key, num_rounds=num_rounds)

    for message_bytes in _SWEPT_BYTES:
        if message_bytes <= 4 * largest:
            parts.append((f"gradients of {format_bytes(message_bytes)}", partial(sweep, message_bytes // 4)))
    parts.append(("fixed cost of a call", lambda: numbers.goals.extend(overhead_goals(numbers.timings, device))))

    samples = draw_samples(QUALITY_NUMEL, options.seed, device)

    def codec(name: str) -> None:
        numbers.large += measure_size([name], grad_N, out_N, key, num_rounds=5)
        numbers.qualities.append(measure_quality(name, samples, key))

    return parts + [(f"codec {name}", partial(codec, name)) for name in CODEC_DEFAULTS]


def _throughput_rows(timing: CodecTiming, suffix: str) -> list[Row]:
    return [
        limited(
            f"{timing.codec}_{what}_gbps{suffix}",
            "GB/s",
            timing.message_bytes / seconds / 1e9,
            timing.message_bytes / timing.copy_s / 1e9,
        )
        for what, seconds in (("encode", timing.encode_s), ("decode_add", timing.decode_add_s))
    ]


def goal_table(numbers: KernelNumbers) -> Table:
    """Return a table of the numbers that have a goal, each beside its alternative."""
    table = new_table("Goals", "", "value", "peer", "ratio", "goal", "met", gap=0)
    for row in numbers.goals:
        peer = row.limit if row.baseline is None else row.baseline
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.name, *(f"{x:.2f} {row.unit}" for x in (row.value, peer)), ratio, row.goal or "", row.verdict)
    return table


def latency_table(numbers: KernelNumbers) -> Table:
    """Return a table of the time of an encode per codec and message size."""
    table = new_table("Latency of an encode, us", "", *(format_bytes(size) for size in LATENCY_BYTES), gap=0)
    seconds = {(timing.codec, timing.message_bytes): timing.encode_s for timing in numbers.timings}
    seconds |= {("copy_", timing.message_bytes): timing.copy_s for timing in numbers.timings}
    for name in (*SWEPT_CODECS, "copy_"):
        table.add_row(name, *(f"{seconds[name, size] * 1e6:.1f}" for size in LATENCY_BYTES))
    return table


def codec_table(numbers: KernelNumbers) -> Table:
    """Return a table of size, error and throughput per codec."""
    title = "Codecs at their defaults: error by distribution, GB/s (decode: and add)"
    table = new_table(title, "", "bits", "ratio", *DISTRIBUTIONS, "encode", "decode", "copy_", gap=0)
    for quality, timing in zip(numbers.qualities, numbers.large, strict=True):
        gbps = (timing.message_bytes / s / 1e9 for s in (timing.encode_s, timing.decode_add_s, timing.copy_s))
        errors = (f"{quality.errors[name]:.4f}" for name in DISTRIBUTIONS)
        bits, ratio = f"{quality.bits:.3f}", f"{32 / quality.bits:.1f}"
        table.add_row(quality.spec.name, bits, ratio, *errors, *(f"{x:.2f}" for x in gbps))
    return table


_COLORS = dict(zip(SWEPT_CODECS, (BLUE, VERMILION, GREEN, PURPLE), strict=True))
_STYLES = {"encode": "o-", "decode-add": "v--"}
_MARKERS: dict[str, dict[str, Any]] = {
    "gaussian": {"marker": "o", "s": 36, "color": BLUE},
    "laplace": {"marker": "s", "s": 14, "color": GREY},
    "student_t3": {"marker": "^", "s": 14, "color": GREY},
}


def plot_kernels(numbers: KernelNumbers, path: Path) -> None:
    """Write the picture with both panels."""
    figure = new_figure(13.5, 5.6)
    speed_axes, error_axes = figure.subplots(1, 2)
    _draw_speed(speed_axes, numbers.timings)
    _draw_errors(error_axes, numbers.qualities)
    options = numbers.options
    device = "CUDA" if options.device == "cuda" else f"CPU, {format_count(options.threads, 'thread')}"
    add_title(figure, f"python -m bench kernels, {device}")
    save_figure(figure, path)


def _draw_speed(axes: Axes, timings: Sequence[CodecTiming]) -> None:
    for what, style in _STYLES.items():
        for name, color in _COLORS.items():
            line = [timing for timing in timings if timing.codec == name]
            sizes = [timing.message_bytes for timing in line]
            seconds = [timing.encode_s if what == "encode" else timing.decode_add_s for timing in line]
            gbps = [size / s / 1e9 for size, s in zip(sizes, seconds, strict=True)]
            axes.plot(sizes, gbps, style, color=color, markersize=4, linewidth=1.6, label=f"{name} {what}")
    copies = {timing.message_bytes: timing.message_bytes / timing.copy_s / 1e9 for timing in timings}
    axes.plot(list(copies), list(copies.values()), ":", color="black", linewidth=2, label="copy_")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(copies), [format_bytes(size) for size in copies], rotation=45, ha="right")
    plain_numbers(axes.yaxis)
    axes.set(xlabel="size of the float32 gradient", ylabel="GB/s of gradient", title="Throughput")
    add_legend(axes, num_columns=2)
    clean(axes)


def _draw_errors(axes: Axes, qualities: Sequence[Quality]) -> None:
    bits = [quality.bits for quality in qualities]
    for distribution, style in _MARKERS.items():
        errors = [quality.errors[distribution] for quality in qualities]
        axes.scatter(bits, errors, label=distribution, **style)
    axes.set_xscale("log", base=2)
    plain_numbers(axes.xaxis)
    axes.set_xlim(min(bits) / 1.3, max(bits) * 2)
    axes.margins(y=0.1)
    _label_points(axes, qualities)
    axes.set(
        xlabel="bits per element on the wire",
        ylabel="|x - decode(encode(x))| / |x|",
        title="Error of one message, codecs at their defaults",
    )
    add_legend(axes)
    clean(axes)


def _label_points(axes: Axes, qualities: Sequence[Quality]) -> None:
    """Write each codec's name to the right of its Gaussian point, as near as points and other names leave room."""
    line_height = 0.033 * (axes.get_ylim()[1] - axes.get_ylim()[0])
    # A letter takes about 1/90 of the panel's width.
    letter = math.log2(axes.get_xlim()[1] / axes.get_xlim()[0]) / 90
    taken = [
        (math.log2(quality.bits) - letter, math.log2(quality.bits) + letter, error)
        for quality in qualities
        for error in quality.errors.values()
    ]
    for quality in sorted(qualities, key=lambda quality: (quality.errors["gaussian"], quality.bits)):
        error = quality.errors["gaussian"]
        left = math.log2(quality.bits) + 3 * letter
        right = left + (len(quality.spec.name) + 1) * letter
        in_the_way = [y for start, end, y in taken if left < end and start < right]
        shifts = (sign * step * line_height / 4 for step in itertools.count() for sign in (1, -1))
        height = next(error + x for x in shifts if all(abs(error + x - y) >= line_height for y in in_the_way))
        taken.append((left, right, height))
        axes.annotate(
            quality.spec.name,
            (quality.bits, error),
            xytext=(2**left, height),
            va="center",
            fontsize=8.5,
            arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2},
        )
