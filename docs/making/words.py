"""Hook of MkDocs: the page of words, and their meanings as tooltips on every page, from the table in docs/design.md."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_DESIGN = Path(__file__).resolve().parents[1] / "design.md"
_TABLE = re.compile(r"\| word \| meaning \|\n\|---\|---\|\n((?:\|.*\|\n)+)")
# Words that pages use so often, or in another sense too, that a tooltip would disturb.
_PLAIN = {
    "layer", "group", "bucket", "codec", "scheme", "intra", "option", "plan", "bus", "round", "decision", "policy",
    "node", "run", "share",
}  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    files.append(File.generated(config, "words.md", content=f"# Words\n\n{_table()[0]}"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Add the meanings, which the extension `abbr` shows where the words stand."""
    return f"{markdown}\n\n{abbreviations()}" if page.file.src_uri not in ("words.md", "design.md") else markdown


def abbreviations() -> str:
    """Return a line per word that has a tooltip."""
    meanings = dict(re.findall(r"^\| ([\w ]+) \| (.*) \|$", _table()[1], re.MULTILINE))
    texts = {word: re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", meaning) for word, meaning in meanings.items()}
    return "\n".join(f"*[{word}]: {text}" for word, text in texts.items() if word not in _PLAIN)


def _table() -> tuple[str, str]:
    """Return the table, and its rows alone."""
    found = _TABLE.search(_DESIGN.read_text())
    assert found is not None, "docs/design.md has no table of words"
    return found[0], found[1]
