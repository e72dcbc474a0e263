"""`python -m bench adapt`: how well the control loop follows networks and machines that change."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from bench.adapt.cases import CASES
from bench.adapt.measure import adapt_table, measure_adapt, papers_table, plot_paces
from cgx_ray.commands.options import console_for, json_option, plot_option
from cgx_ray.errors import ConfigError
from cgx_ray.lab.namespaces import Lab
from cgx_ray.report.result import write_result
from cgx_ray.report.show import print_line, progress_bar


@click.command()
@click.argument("cases", nargs=-1, type=click.Choice([case.name for case in CASES]), metavar="[CASE]...")
@click.option(
    "--lab",
    "is_in_lab",
    is_flag=True,
    help="Real ranks on emulated networks: two schedules, and 16 networks beside plain DDP. Takes 12 minutes.",
)
@json_option()
@click.option("--quick", is_flag=True, help="One seed per case; with --lab, a check of half a minute without goals.")
@plot_option("adapt.png")
def adapt(cases: tuple[str, ...], is_in_lab: bool, json_path: str | None, quick: bool, plot: Path) -> None:
    """Drive the control loop in a simulated cluster, or in a lab.

    Runs all cases in six minutes, or those named. Regret is over the best plan of each moment. A number that misses
    its goal has an exclamation mark.
    """
    if is_in_lab:
        if cases:
            raise ConfigError(f"case {cases[0]} is simulated; leave it out with --lab")
        _run_in_lab(json_path, quick, plot)
        return
    console = console_for(json_path)
    with progress_bar(console) as on_part:
        numbers = measure_adapt(quick, cases, on_part)
    console.print(adapt_table(numbers))
    if numbers.papers:
        console.print(papers_table(numbers))
    if json_path:
        write_result("adapt", numbers.rows, json_path)
    plot_paces({case: runs[0].scores for case, runs in numbers.runs.items()}, plot)
    print_line(console, f"picture: {plot}")


def _run_in_lab(json_path: str | None, quick: bool, plot: Path) -> None:
    # These import torch: 2 s.
    from bench.adapt.lab import (  # noqa: PLC0415
        grid_table,
        lab_rows,
        measure_adapt_lab,
        scale_line,
        scores_table,
        times_table,
    )
    from bench.adapt.lab_cases import QUICK, AdaptLabOptions  # noqa: PLC0415

    reason = Lab.available(rates_only=False)
    if reason is not None:
        raise ConfigError(f"--lab: {reason}")
    console, options = console_for(json_path), QUICK if quick else AdaptLabOptions()
    print_line(console, scale_line(options))
    with progress_bar(console) as on_part, tempfile.TemporaryDirectory() as folder:
        numbers = measure_adapt_lab(options, Path(folder), on_part)
    rows = {row.name: row for row in lab_rows(numbers, has_goals=options.has_goals)}
    for table in (times_table(numbers, rows), scores_table(numbers, rows), grid_table(numbers, rows)):
        console.print(table)
    print_line(console, f"took {numbers.seconds / 60:.1f} minutes")
    if json_path:
        write_result("adapt", list(rows.values()), json_path)
    plot_paces({name: score.paces for name, score in numbers.scores.items()}, plot)
    print_line(console, f"picture: {plot}")
