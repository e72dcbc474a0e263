"""Output of commands and benches: lines, tables, progress bars, JSON."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cgx_ray.errors import ConfigError
from cgx_ray.untrusted import printable_lines

STANDARD_OUTPUT = "-"


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print `text` as it is: no markup, no escape sequences, and long lines wrapped by the terminal only."""
    console.print(printable_lines(text), style=style, highlight=False, markup=False, soft_wrap=True)


class _Table(Table):
    """Shows texts as they are, since names come from users."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(printable_lines(cell) if isinstance(cell, str) else cell for cell in cells), **options)


def new_table(title: str | None, *headings: str, num_left: int = 1, gap: int = 1, wrap: bool = False) -> Table:
    """Return an empty table.

    num_left  number of columns aligned to the left, from the first one on; the others hold numbers
    gap       spaces on either side of a column; 0 for wide tables
    wrap      wrap long cells; else a cell too long for the terminal ends in "..."
    """
    table = _Table(title=title, title_justify="left", box=SIMPLE, padding=(0, gap))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < num_left else "right", no_wrap=not wrap)
    return table


@contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[str, float], None]]:
    """Show a bar while the body runs. The body calls what this yields with the current part and the fraction done."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    # Without a terminal, rich would leave an empty line.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda part, fraction: progress.update(task, description=part, completed=fraction)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to, whose file takes the place of `path` at the end, unless the body raises.

    So a command that is ended leaves no half file, and an old one stays. Raises ConfigError if it cannot be written.
    """
    place = path.resolve()
    if place.exists() and not place.is_file():
        yield path  # such as /dev/stdout
        return
    new = place.with_name(f".{os.getpid()}.new{place.suffix}")
    try:
        yield new
        os.replace(new, place)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}; give another file") from error
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)


def write_json(path: str | Path, data: Any) -> None:
    """Write `data` as JSON to the file `path`, or to standard output for "-". JSON has no NaN or Inf: null."""
    text = json.dumps(_finite(data), indent=2, allow_nan=False) + "\n"
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text)
    else:
        with whole_file(Path(path)) as new:
            new.write_text(text)


def _finite(data: Any) -> Any:
    """Return `data` with None in place of numbers that are not finite."""
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
