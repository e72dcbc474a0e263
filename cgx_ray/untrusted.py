"""Reads files that others wrote, and shows their text.

Bytes, number of values and depth are checked before a value is built, so that a small file cannot take all memory: an
alias of YAML, or a table with more columns than cells. Readers of JSON and YAML return JSON's types alone: objects with
texts as keys, arrays, texts, finite numbers below 2^63, true, false and null.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgx_ray.errors import ConfigError

# Largest file and line. A decision about 100,000 layers takes 5 MB.
MAX_BYTES = 16 << 20
# Commas and brackets, or cells: in Python a value takes up to 100 bytes. The start of a run of 100,000 layers has
# 700,000.
MAX_VALUES = 1_000_000
MAX_DEPTH = 32
# 600 clusters with all their fields have 15,000 nodes. A number in base 60 takes time by the square of its length.
MAX_YAML_NODES, MAX_YAML_SCALAR = 20_000, 1000
_MAX_INTEGER = 2**63
# Memory of a row without its cells, in cells.
_ROW_CELLS = 4
_CUT = "cut in the middle, or still being written"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenLine:
    """A line that was skipped. `start`: its first bytes."""

    number: int
    reason: str
    start: bytes


def printable(text: str) -> str:
    """Return `text` with escapes for all that would steer a terminal or a page: control characters, other directions.

    A line feed is one of them, as it would make a line that looks like one of ours.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text
    )


def printable_lines(text: str) -> str:
    """Return `text` as `printable` does, but with its line feeds."""
    return "\n".join(map(printable, text.split("\n")))


def read_bytes(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a file. Raises ConfigError if it has more than `max_bytes`."""
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ConfigError(f"{path} has more than {max_bytes:,} bytes, which no file of this kind has; give another")
    return content


def parse_json(raw: bytes | str) -> Any:
    """Return a value of JSON. Raises ValueError if it is none, or exceeds a limit of this module."""
    data = raw if isinstance(raw, bytes) else raw.encode(errors="surrogatepass")
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES:,} values")
    try:
        value = json.loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH}") from None
    _check_values(value)
    return value


def parse_yaml(text: str) -> Any:
    """Return a value of YAML, without tags, anchors and aliases. A date is a text.

    Raises ValueError if it is none, or exceeds a limit of this module.
    """
    import yaml  # noqa: PLC0415  commands that read JSON alone start faster

    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    # Dates would be a type that JSON lacks, and "<<" merges what a key has.
    left_out = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:merge")
    resolvers = {
        first: [one for one in known if one[0] not in left_out] for first, known in base.yaml_implicit_resolvers.items()
    }
    loader = type("_JsonLoader", (base,), {"yaml_implicit_resolvers": resolvers})
    try:
        depth = 0
        for number, event in enumerate(yaml.parse(text, Loader=loader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if getattr(event, "anchor", None) is not None or getattr(event, "tag", None) is not None:
                raise ValueError(f"line {event.start_mark.line + 1}: anchors, aliases and tags are not allowed")
            if depth > MAX_DEPTH or number > MAX_YAML_NODES:
                raise ValueError(f"more than {MAX_YAML_NODES:,} nodes, or nested deeper than {MAX_DEPTH}")
            if len(getattr(event, "value", None) or "") > MAX_YAML_SCALAR:
                raise ValueError(f"line {event.start_mark.line + 1}: longer than {MAX_YAML_SCALAR} characters")
        value = yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ArithmeticError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    _check_values(value)
    return value


def read_table(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a CSV file by heading; cells beyond the headings are a list under "(no heading)".

    Raises ConfigError if it is no table, or exceeds a limit of this module.
    """
    try:
        with io.TextIOWrapper(io.BytesIO(read_bytes(path)), newline="") as file:
            return list(_rows(csv.reader(file)))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} is no CSV table ({error})") from error


def _rows(lines: Iterator[list[str]]) -> Iterator[dict[str, Any]]:
    """Yield rows as `csv.DictReader` does. Raises csv.Error if they have more than `MAX_VALUES` cells."""
    headings = next(lines, [])
    num_cells = 0
    for line in filter(None, lines):
        num_cells += max(len(line), len(headings)) + _ROW_CELLS
        if num_cells > MAX_VALUES:
            raise csv.Error(f"more than {MAX_VALUES:,} cells")
        row: dict[str, Any] = dict(itertools.zip_longest(headings, line[: len(headings)]))
        yield row | ({"(no heading)": line[len(headings) :]} if len(line) > len(headings) else {})


class JsonLines:
    """A file of JSON lines that may grow, or not exist yet.

    num_bytes  read so far
    is_cut     it ends in half a line, which is being written, or whose writer was killed
    """

    def __init__(self, path: Path, problem_of: Callable[[Any], str]) -> None:
        """`problem_of`: says why a value is not what the file should hold, "" if it is."""
        self.path = path
        self._problem_of = problem_of
        self.num_bytes = 0
        self.is_cut = False
        self._num_lines = 0
        self._is_skipping = False

    def new(self, *, is_finished: bool = False) -> Iterator[tuple[int, Any] | BrokenLine]:
        """Yield the lines added since the last call, with their numbers. An unfinished one is left for the next call.

        A line longer than `MAX_BYTES` is not kept in memory.

        is_finished  there is no next call
        """
        self.is_cut = False
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.num_bytes)
            while raw := file.readline(MAX_BYTES):
                is_whole = raw.endswith(b"\n")
                if not (is_whole or is_finished or self._is_skipping) and len(raw) < MAX_BYTES:
                    self.is_cut = True
                    return
                self.num_bytes += len(raw)
                was_skipping, self._is_skipping = self._is_skipping, not is_whole
                if not was_skipping:
                    self._num_lines += 1
                    yield self._read(raw, is_whole)

    def _read(self, raw: bytes, is_whole: bool) -> tuple[int, Any] | BrokenLine:
        problem = f"longer than {MAX_BYTES >> 20} MiB" if len(raw) == MAX_BYTES else _CUT
        if is_whole:
            try:
                value = parse_json(raw)
                problem = self._problem_of(value)
            except ValueError as error:
                problem = str(error)
            if not problem:
                return self._num_lines, value
        return BrokenLine(number=self._num_lines, reason=problem, start=raw[:100])


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _check_values(value: Any) -> None:
    """Raise ValueError if `value` is nested too deeply, or has a key that is no text or a number that is not finite."""
    level: list[Any] = [[value]]
    for _ in range(MAX_DEPTH):
        if any(isinstance(one, dict) and not all(isinstance(key, str) for key in one) for one in level):
            raise ValueError("a key that is no text")
        values = itertools.chain.from_iterable(one.values() if isinstance(one, dict) else one for one in level)
        level = []
        for one in values:
            if isinstance(one, dict | list):
                level.append(one)
            elif isinstance(one, float) and not math.isfinite(one):
                raise ValueError(f"{one} is no finite number")
            elif isinstance(one, int) and abs(one) >= _MAX_INTEGER:
                raise ValueError("a whole number of 2^63 or more")
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_DEPTH}")
