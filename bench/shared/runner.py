"""Frame of every bench: `--json`, `--quick` and `--plot`, a progress bar, one table of rows, one picture.

A bench is a function with its own options that returns rows:

    @bench_command(quick="A short check: ...", picture="kernels.png")
    @click.option("--device", default="cpu")
    def kernels(run: BenchRun, device: str) -> Iterable[Row]:
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from bench.shared.picture import Plot, draw_panels
from cgx_ray.commands.options import console_for, json_option, plot_option
from cgx_ray.report.result import Row, result_table, write_result
from cgx_ray.report.show import print_line, progress_bar

# Gets what runs, and the share of everything that is done.
OnPart = Callable[[str, float], None]


@dataclass(slots=True, kw_only=True)
class BenchRun:
    """One call of a bench.

    quick    a short check is asked for
    on_part  to be called before each part
    title    of table and picture
    panels   of the picture; the bench adds them
    """

    console: Console
    quick: bool
    on_part: OnPart
    title: str
    panels: list[Plot] = field(default_factory=list)

    def print_text(self, text: str) -> None:
        """Print a line beside the table, which is printed at the end."""
        print_line(self.console, text)


def bench_command(*, quick: str = "", picture: str = "") -> Callable[[Callable[..., Iterable[Row]]], click.Command]:
    """Make a command of the function that measures.

    quick    help of `--quick`; without it there is no such option
    picture  default of `--plot`; without it there is no picture
    """

    def decorate(measure: Callable[..., Iterable[Row]]) -> click.Command:
        name = measure.__name__

        @wraps(measure)
        def command(json_path: str | None, quick: bool = False, plot: Path | None = None, **given: Any) -> None:
            console = console_for(json_path)
            with progress_bar(console) as on_part:
                run = BenchRun(console=console, quick=quick, on_part=on_part, title=f"python -m bench {name}")
                rows = list(measure(run, **given))
            console.print(result_table(run.title, rows))
            if json_path:
                write_result(name, rows, json_path)
            if plot is not None:
                draw_panels(run.title, run.panels, plot)
                run.print_text(f"picture: {plot}")

        if picture:
            command = plot_option(picture)(command)
        if quick:
            command = click.option("--quick", is_flag=True, help=quick)(command)
        return click.command()(json_option()(command))

    return decorate
