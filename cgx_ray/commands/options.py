"""Options that commands share: files to write, `--json`, and the console that goes with it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from cgx_ray.errors import ConfigError
from cgx_ray.report.show import STANDARD_OUTPUT

# Columns of a pipe or file, more than any table has: rich takes 80 there, and would break long names in two.
_FILE_COLUMNS = 1000

_FILES_OF_RUNS = ("decisions.jsonl", "steps.jsonl")

_Command = TypeVar("_Command", bound=Callable[..., Any])


class _OutFile(click.Path):
    """A file to write. A command refuses a path that cannot be written before it measures anything."""

    def __init__(self, path_type: type = str) -> None:
        super().__init__(dir_okay=False, writable=True, allow_dash=path_type is str, path_type=path_type)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if path == STANDARD_OUTPUT:
            return path
        folder = Path(os.fsdecode(path)).parent
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            self.fail(f"{value} cannot be written: {folder} is no folder to write to; give another", param, ctx)
        return path


class RunFolder(click.Path):
    """The folder of a run. One of its files, such as the journal, stands for it, also before it is written."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(value))
        is_own = path.name in _FILES_OF_RUNS and not path.is_dir()
        if path.suffix == ".jsonl" and path.is_file() and not is_own:
            self.fail(f"{value} is none of a run's files, {' and '.join(_FILES_OF_RUNS)}; give the run's folder")
        return super().convert(str(path.parent) if is_own else value, param, ctx)


def check_plots() -> None:
    """Raise ConfigError if this installation draws no pictures."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError('pictures need matplotlib; run: pip install "cgx-ray[plots]"')


class _Picture(_OutFile):
    """A picture to write."""

    suffixes = (".png", ".pdf", ".svg")

    def __init__(self) -> None:
        super().__init__(Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if Path(value).suffix not in self.suffixes:
            self.fail(f"{value} is no picture; give a name that ends in {', '.join(self.suffixes)}", param, ctx)
        check_plots()
        return super().convert(value, param, ctx)


FILE = _OutFile(Path)
PICTURE = _Picture()


def json_option(what: str = "the numbers") -> Callable[[_Command], _Command]:
    """Return the option `--json`, which the command gets as `json_path`."""
    return click.option(
        "--json", "json_path", type=_OutFile(), metavar="FILE", help=f"Write {what} as JSON; - is standard output."
    )


def plot_option(default: str | None, shown: str | bool = True) -> Callable[[_Command], _Command]:
    """Return the option `--plot` of a command that always draws. `shown`: the default in words."""
    return click.option("--plot", type=PICTURE, default=default, show_default=shown, help="File of the picture.")


def console_for(json_path: str | None) -> Console:
    """Return the console for text: standard error if JSON goes to standard output.

    In a file or a pipe lines are as long as they need to be, unless COLUMNS says how wide it is.
    """
    console = Console(stderr=json_path == STANDARD_OUTPUT)
    if not console.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        console.width = _FILE_COLUMNS
    return console
