"""`python -m bench planner`: how good plans are, and how long they take to make."""

from __future__ import annotations

from pathlib import Path

import click

from bench.planner.measure import MODEL_GBPS, measure_planner, plot_planner, row_table, strategy_table
from cgx_ray.commands.options import console_for, json_option, plot_option
from cgx_ray.report.result import write_result
from cgx_ray.report.show import print_line, progress_bar


@click.command()
@json_option()
@click.option("--quick", is_flag=True, help="A short check: few cases, small models, no goals.")
@plot_option("planner.png")
def planner(json_path: str | None, quick: bool, plot: Path) -> None:
    """Check that plans are optimal, and time the planner.

    Compares with brute force and with strategies of the literature, for up to 16,384 workers.
    """
    console = console_for(json_path)
    with progress_bar(console) as on_part:
        numbers = measure_planner(quick, on_part)
    for gbps in MODEL_GBPS:
        console.print(strategy_table(numbers, gbps))
    console.print(row_table(numbers))
    if json_path:
        write_result("planner", numbers.rows, json_path)
    plot_planner(numbers, plot)
    print_line(console, f"picture: {plot}")
