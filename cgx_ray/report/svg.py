"""Pictures for a web page: inline SVG that takes ink and paper from the page, so that it is light or dark with it."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib
from matplotlib.figure import Figure

from cgx_ray.report.style import INK

# Inches. A picture of this width is readable on a phone of 390 px, and two lie side by side on a desk.
WIDTH = 4.6
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "cgx_ray",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "font.size": 9,
    "axes.titlesize": 10,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


@contextmanager
def page_style() -> Iterator[None]:
    """Draw figures of the body for a page."""
    with matplotlib.rc_context(_STYLE):
        yield


def inline_svg(figure: Figure, name: str) -> str:
    """Return `figure` as an <svg> element. `name`: prefix of all ids in it, unique in the page."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'\b(id="|url\(#|href="#)', rf"\1{name}-", text)
    # Matplotlib writes sizes in points; the page decides how wide a picture is.
    text = re.sub(r'^<svg([^>]*?) width="[^"]*"', r"<svg\1", text, count=1)
    text = re.sub(r'^<svg([^>]*?) height="[^"]*"', r"<svg\1", text, count=1)
    text = text.replace(INK.lower(), "currentColor").replace("#ffffff", "var(--paper)")
    return text.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1)
