"""The report as one HTML file: it loads nothing, follows the reader's light or dark setting, and fits a phone.

Every text that is not of this module goes through `escape`: names of runs and files come from users.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from cgx_ray.report.run_pictures import Picture
from cgx_ray.report.svg import inline_svg
from cgx_ray.untrusted import printable

_CSS = """
:root { --paper: #ffffff; --ink: #1c1e21; --dim: #5d636b; --line: #d9dce0; --soft: #f4f5f7; --mark: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14161a; --ink: #e6e8eb; --dim: #a2a8b0; --line: #363b43; --soft: #1e2126; --mark: #56b4e9; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 16px; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5em 0 0; }
h2 { font-size: 1.25rem; margin: 2em 0 .4em; border-bottom: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.4em 0 .3em; }
p { max-width: 70ch; margin: .5em 0; }
.dim, figcaption { color: var(--dim); font-size: .9rem; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 150px), 1fr)); gap: 10px;
  margin: 14px 0; padding: 0; }
.numbers div { background: var(--soft); border-radius: 8px; padding: 10px 12px; }
.numbers dt { color: var(--dim); font-size: .85rem; }
.numbers dd { margin: 0; font-size: 1.3rem; font-weight: 600; }
.verdict { font-size: 1.15rem; font-weight: 600; }
.next { border-left: 4px solid var(--mark); background: var(--soft); padding: 10px 14px; border-radius: 0 8px 8px 0; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)); gap: 18px; }
figure { margin: 0; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; color: var(--ink); }
.table { overflow-x: auto; margin-bottom: 16px; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); }
th { color: var(--dim); font-weight: 600; white-space: nowrap; }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
@media (max-width: 600px) {
  thead { display: none; }
  tr { display: block; padding: 8px 0; border-bottom: 1px solid var(--line); }
  td, td.number { display: block; text-align: left; border: 0; padding: 1px 0; white-space: normal; }
  td::before { content: attr(data-name) ": "; color: var(--dim); }
  td:first-child { font-weight: 600; }
}
"""


def escape(text: object) -> str:
    """Return `text` as HTML shows it literally, also inside attributes."""
    return html.escape(printable(str(text)), quote=True)


def page(title: str, body: Sequence[str]) -> str:
    """Return the whole file. `body`: HTML, from the functions below."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        # Whatever a name of a run smuggles in: nothing is loaded and nothing runs.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def heading(level: int, text: str) -> str:
    return f"<h{level}><bdi>{escape(text)}</bdi></h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of class `kind`: "dim", "next", "verdict" or none. Text between backticks is code."""
    shown = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return f'<p class="{kind}">{shown}</p>' if kind else f"<p>{shown}</p>"


def numbers(pairs: Sequence[tuple[str, str]]) -> str:
    """Return large numbers, each with its name."""
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="numbers">{cells}</dl>'


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int = 1) -> str:
    """Return a table, on a phone a list. The first `num_left` columns are text, the others are numbers."""
    kinds = ["" if index < num_left else ' class="number"' for index in range(len(headings))]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, headings, strict=True))
    lines = [
        "".join(
            f'<td{kind} data-name="{escape(name)}">{escape(cell)}</td>'
            for kind, name, cell in zip(kinds, headings, row, strict=True)
        )
        for row in rows
    ]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def pictures(drawn: Sequence[Picture], prefix: str) -> str:
    """Return the pictures, side by side where there is room. `prefix`: of their ids, unique in the page."""
    figures = [
        f'<figure><div role="img" aria-label="{escape(one.alt)}">{inline_svg(one.figure, f"{prefix}{index}")}</div>'
        f"<figcaption>{escape(one.caption)}</figcaption></figure>"
        for index, one in enumerate(drawn)
    ]
    return f'<div class="pictures">{"".join(figures)}</div>'
