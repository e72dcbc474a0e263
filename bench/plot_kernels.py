"""The picture of `cgx-ray bench kernels`: throughput over message size, and error over bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from cgx_ray.bench.codec_numbers import CodecTiming, Quality
from cgx_ray.bench.kernels import SWEPT_CODECS, KernelNumbers
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
from cgx_ray.units import format_bytes, format_count

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
    add_title(figure, f"cgx-ray bench kernels, {device}")
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
