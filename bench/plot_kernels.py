"""The picture of `cgx-ray bench kernels`: throughput over message size, and error over bits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cgx_ray.bench.codec_numbers import Point, Quality
from cgx_ray.bench.kernels import SWEPT_CODECS, KernelNumbers, format_bytes

# Colour-blind safe (Okabe and Ito).
_COLORS = dict(zip(SWEPT_CODECS, ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), strict=True))
_STYLES = {"encode": "o-", "decode-add": "v--"}
_POINTS: dict[str, dict[str, Any]] = {
    "gaussian": {"marker": "o", "s": 36, "color": "#0072B2"},
    "laplace": {"marker": "s", "s": 14, "color": "#999999"},
    "student_t3": {"marker": "^", "s": 14, "color": "#999999"},
}


def plot_kernels(numbers: KernelNumbers, path: Path) -> None:
    """Write a PNG with both panels."""
    figure = Figure(figsize=(13.5, 5.6), dpi=130, layout="constrained")
    speed_axes, error_axes = figure.subplots(1, 2)
    _draw_speed(speed_axes, numbers.points)
    _draw_errors(error_axes, numbers.qualities)
    options = numbers.options
    where = "CUDA" if options.device == "cuda" else f"CPU, {options.threads} thread{'s' if options.threads > 1 else ''}"
    figure.suptitle(f"cgx-ray bench kernels, {where}", fontsize=12, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_speed(axes: Axes, points: Sequence[Point]) -> None:
    for what, style in _STYLES.items():
        for name, color in _COLORS.items():
            line = [point for point in points if point.codec == name]
            sizes = [point.message_bytes for point in line]
            seconds = [point.encode_s if what == "encode" else point.decode_add_s for point in line]
            gbps = [size / s / 1e9 for size, s in zip(sizes, seconds, strict=True)]
            axes.plot(sizes, gbps, style, color=color, markersize=4, linewidth=1.6, label=f"{name} {what}")
    copies = {point.message_bytes: point.message_bytes / point.copy_s / 1e9 for point in points}
    axes.plot(list(copies), list(copies.values()), ":", color="black", linewidth=2, label="copy_")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(list(copies), [format_bytes(size) for size in copies], rotation=45, ha="right")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(xlabel="size of the float32 gradient", ylabel="GB/s of gradient", title="Throughput")
    axes.legend(frameon=False, ncols=2, fontsize=9)
    _clean(axes)


def _draw_errors(axes: Axes, qualities: Sequence[Quality]) -> None:
    bits = [quality.bits for quality in qualities]
    for distribution, style in _POINTS.items():
        errors = [quality.errors[distribution] for quality in qualities]
        axes.scatter(bits, errors, label=distribution, **style)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(min(bits) / 1.3, max(bits) * 2)
    axes.margins(y=0.1)
    _label_points(axes, qualities)
    axes.set(
        xlabel="bits an element on the wire",
        ylabel="|x - decode(encode(x))| / |x|",
        title="Error of one message, codecs at their defaults",
    )
    axes.legend(frameon=False, fontsize=9)
    _clean(axes)


def _label_points(axes: Axes, qualities: Sequence[Quality]) -> None:
    """Write each codec's name right of its Gaussian point, or as near as points and other names leave room."""
    line_height = 0.033 * (axes.get_ylim()[1] - axes.get_ylim()[0])
    # A letter takes about a hundredth of the panel's width.
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
            arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2},
        )


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
