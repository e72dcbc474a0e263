"""Style of all pictures: colours, figures, axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from cgx_ray.report.show import whole_file
from cgx_ray.untrusted import printable

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
ORANGE, SKY, YELLOW = "#E69F00", "#56B4E9", "#F0E442"
GREY, INK = "#999999", "#333333"
# Dense gradients have the same colour in every picture.
DENSE_COLOR = VERMILION
# Each codec has one colour in every picture. Codecs of packages share one.
_CODEC_COLORS = {
    **dict.fromkeys(("none", "dense"), DENSE_COLOR),
    "qsgd": BLUE,
    **dict.fromkeys(("bf16", "fp16"), GREEN),
    **dict.fromkeys(("topk", "lwtopk", "mstopk", "dgc", "sidco", "randomk"), ORANGE),
    **dict.fromkeys(("terngrad", "ef_signsgd", "onebit"), PURPLE),
    "powersgd": YELLOW,
    "prefix": GREY,
}
# Rows of a legend that a figure has room for, and inches that each further one takes.
_LEGEND_ROWS, _LEGEND_ROW = 3, 0.2
# Parts of white by which further options of a codec are lighter.
_TINTS = (0.0, 0.4, 0.65, 0.2)


def codec_color(name: str, place: int = 0) -> str:
    """Return the colour of a codec. `place`: of the option among those of its codec in a picture."""
    red, green, blue = to_rgb(_CODEC_COLORS.get(name, SKY))
    tint = _TINTS[place % len(_TINTS)]
    return to_hex([part + (1 - part) * tint for part in (red, green, blue)])


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of `width` x `height` inches."""
    return Figure(figsize=(width, height), dpi=130, layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write `figure` in the format that the name ends in, and make the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as new:
        figure.savefig(new)


def add_title(figure: Figure, text: str) -> None:
    figure.suptitle(label(text, longest=120), fontsize=12, fontweight="bold", wrap=True)


def label(text: str, longest: int = 48) -> str:
    """Return `text` as matplotlib shows it literally: names come from users.

    Characters that the font lacks become "?", dollars start no formula, and a leading underscore hides no legend entry.
    """
    known = _characters()
    shown = "".join(char if ord(char) in known else "?" for char in printable(text))
    shown = shown if len(shown) <= longest else f"{shown[: longest - 3]}..."
    shown = shown.replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown


@cache
def _characters() -> frozenset[int]:
    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())


def add_legend(axes: Axes) -> None:
    axes.legend(frameon=False, fontsize=9)


def add_bottom_legend(figure: Figure, entries: Mapping[str, Any], *, num_columns: int, **style: Any) -> None:
    """Draw one legend of labels and their handles below all panels. With many the figure grows: panels keep their size.

    style  further arguments of `Figure.legend`
    """
    num_rows = math.ceil(len(entries) / num_columns)
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * max(0, num_rows - _LEGEND_ROWS))
    place = "outside lower center"
    figure.legend(entries.values(), entries.keys(), loc=place, ncols=num_columns, frameon=False, **style)


def clean(axes: Axes, hidden_spines: Sequence[str] = ("top", "right")) -> None:
    """Remove the frame that holds no scale, and draw a faint grid."""
    axes.spines[list(hidden_spines)].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def plain_numbers(axis: Axis, *, minor: str | None = None) -> None:
    """Write ticks as 0.1 or 20, not as powers. `minor`: first digits of the minor ticks that get a number too."""
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    if minor is not None:
        axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in minor else "")


def fit_values(axes: Axes) -> None:
    """Fit the y axis to the values drawn so far: logarithmic with numbers on it, linear if a value is 0."""
    drawn = np.concatenate([np.empty(0), *(np.asarray(line.get_ydata(), float) for line in axes.lines)])
    values = drawn[np.isfinite(drawn)]
    if len(values) and values.min() > 0:
        low, high = float(values.min()) / 2, float(values.max()) * 2
        # Before the scale, so that no limits are made up for it, which fails for tiny numbers.
        axes.set_ylim(low, high)
        axes.set_yscale("log")
        # Up to two decades, numbers that begin with 2 and 5 are labelled too, so that at least one label is visible.
        plain_numbers(axes.yaxis, minor="25" if high <= 100 * low else "")
