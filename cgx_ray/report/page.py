"""The report as one HTML file: it loads nothing, follows the reader's light or dark setting, and fits a phone.

Jinja2 escapes every text that is not of `page.html`: names of runs and files come from users.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from cgx_ray.report.run_pictures import Picture
from cgx_ray.report.svg import inline_svg
from cgx_ray.untrusted import printable


def _shown(value: Any) -> Any:
    return value if isinstance(value, Markup) else printable(str(value))


def _code(text: str) -> Markup:
    """Return `text` with what is between backticks as code."""
    # As str: Markup would escape the tags.
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(_shown(text)))))


_ENVIRONMENT = Environment(
    autoescape=True,
    finalize=_shown,
    keep_trailing_newline=True,
    loader=FileSystemLoader(Path(__file__).parent),
    undefined=StrictUndefined,
)
_ENVIRONMENT.filters["code"] = _code
_PARTS: Any = _ENVIRONMENT.get_template("page.html").module


def page(title: str, body: Sequence[str]) -> str:
    """Return the whole file. `body`: from the functions below; other text is escaped."""
    return str(_PARTS.page(title, body))


def heading(level: int, text: str) -> Markup:
    return Markup(_PARTS.heading(level, text))


def paragraph(text: str, kind: str = "") -> Markup:
    """Return a paragraph of class `kind`: "dim", "next", "verdict" or none. Text between backticks is code."""
    return Markup(_PARTS.paragraph(text, kind))


def numbers(pairs: Sequence[tuple[str, str]]) -> Markup:
    """Return large numbers, each with its name."""
    return Markup(_PARTS.numbers(pairs))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 1) -> Markup:
    """Return a table, on a phone a list. The first `num_left` columns are text, the others are numbers."""
    return Markup(_PARTS.table(headings, rows, num_left))


def pictures(drawn: Sequence[Picture], prefix: str) -> Markup:
    """Return the pictures, side by side where there is room. `prefix`: of their ids, unique in the page."""
    svgs = [Markup(inline_svg(one.figure, f"{prefix}{index}")) for index, one in enumerate(drawn)]
    return Markup(_PARTS.pictures([(one.alt, svg, one.caption) for one, svg in zip(drawn, svgs, strict=True)]))
