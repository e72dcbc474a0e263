"""Extension of griffe: the aligned arguments of our docstrings become lists, which Markdown keeps apart."""

from __future__ import annotations

import re
from typing import Any

import griffe

# "codec, scheme  for all layers", or names alone if the text begins in the next line.
_ENTRY = re.compile(r"(?P<names>\*{0,2}\w+(?:, \w+)*)(?:  +(?P<text>\S.*))?")


class AlignedArguments(griffe.Extension):
    """Turns blocks of names and texts in two columns into Markdown lists."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(docstring: str) -> str:
    """Return `docstring` with a list in place of each block of two aligned columns."""
    blocks = re.split(r"\n\s*\n", docstring)
    return "\n\n".join(_as_list(block) or block for block in blocks)


def _as_list(block: str) -> str | None:
    """Return the list, or None if `block` is not a block of names and texts in columns."""
    items: list[tuple[str, list[str]]] = []
    for line in block.splitlines():
        entry = _ENTRY.fullmatch(line)
        if line.startswith(" ") and items:
            items[-1][1].append(line.strip())
        elif entry is not None and (entry["text"] is not None or "," in entry["names"]):
            items.append((entry["names"], [entry["text"]] if entry["text"] else []))
        else:
            return None
    if not items or not all(text for _, text in items):
        return None
    return "\n".join(f"- `{'`, `'.join(names.split(', '))}`: {' '.join(text)}" for names, text in items)
