"""`cgx-ray bench adapt`: how well the control loop follows networks and machines that change."""

from __future__ import annotations

from pathlib import Path

import click

from cgx_ray.bench.adapt import measure_adapt
from cgx_ray.bench.adapt_cases import CASES
from cgx_ray.bench.show_adapt import adapt_table, papers_table, plot_adapt
from cgx_ray.commands.options import console_for, json_option, plot_option
from cgx_ray.report.result import write_result
from cgx_ray.report.show import print_line, progress_bar


@click.command()
@click.argument("cases", nargs=-1, type=click.Choice([case.name for case in CASES]), metavar="[CASE]...")
@json_option()
@click.option("--quick", is_flag=True, help="One seed per case.")
@plot_option("adapt.png")
def adapt(cases: tuple[str, ...], json_path: str | None, quick: bool, plot: Path) -> None:
    """Drive the control loop in a cluster that is simulated.

    Runs all cases in two minutes, or those named. Regret is over the best plan of each moment. A number that misses its
    goal has an exclamation mark.
    """
    console = console_for(json_path)
    with progress_bar(console) as on_part:
        numbers = measure_adapt(quick, cases, on_part)
    console.print(adapt_table(numbers))
    if numbers.papers:
        console.print(papers_table(numbers))
    if json_path:
        write_result("adapt", numbers.rows, json_path)
    plot_adapt(numbers, plot)
    print_line(console, f"picture: {plot}")
