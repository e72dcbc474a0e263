"""Reads a journal of any size, one line in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

# Bytes of the longest line that is read: a decision about 100,000 layers takes 5 MB. A longer line is no journal's.
MAX_LINE_BYTES = 16 << 20
_START = b'{"event": "start"'


class BrokenLines:
    """Lines that were skipped: their number, and the first in words."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""

    def add(self, number: int, reason: str) -> None:
        self.count += 1
        self.first = self.first or f"line {number}: {reason:.200}"


def read_lines(path: Path, broken: BrokenLines, on_byte: Callable[[int], None]) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of a journal of any size, one at a time; those that are none are skipped and added to `broken`.

    In place of a broken `start` line an empty one is yielded: the decisions after it are not of the start before it.

    on_byte  called with the place in the file after each line
    """
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES):
            number += 1
            is_whole = raw.endswith(b"\n")
            if not is_whole and len(raw) == MAX_LINE_BYTES:
                _skip_line(file)
                broken.add(number, f"longer than {MAX_LINE_BYTES >> 20} MiB")
                if raw.startswith(_START):
                    yield {"event": "start"}
                continue
            on_byte(file.tell())
            try:
                entry = json.loads(raw)
                if not isinstance(entry, dict) or not isinstance(entry.get("event"), str):
                    raise ValueError("no JSON object with an event")
            except (ValueError, RecursionError) as error:
                broken.add(number, str(error) if is_whole else "cut in the middle, or still being written")
                if raw.startswith(_START):
                    yield {"event": "start"}
                continue
            yield entry


def _skip_line(file: BinaryIO) -> None:
    while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
        pass
