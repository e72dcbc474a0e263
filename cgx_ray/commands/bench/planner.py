"""`cgx-ray bench planner`: how good plans are, and how long they take to make."""

from __future__ import annotations

from pathlib import Path

import click

from cgx_ray.bench.show_planner import planner_command
from cgx_ray.commands.options import console_for, json_option, plot_option


@click.command()
@json_option()
@click.option("--quick", is_flag=True, help="A short check: few cases, small models, no goals.")
@plot_option("planner.png")
def planner(json_path: str | None, quick: bool, plot: Path) -> None:
    """Check that plans are optimal, and time the planner.

    Compares with brute force and with strategies of the literature, for up to 16,384 workers.
    """
    planner_command(quick, console_for(json_path), json_path, plot)
