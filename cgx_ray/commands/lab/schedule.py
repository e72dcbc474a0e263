"""`cgx-ray lab schedule`: the actions and the picture of a schedule."""

from __future__ import annotations

from pathlib import Path

import click

from cgx_ray.commands.lab.link_options import epoch_option, read_schedule, slower_option
from cgx_ray.commands.options import PICTURE


@click.command("schedule")
@click.argument("schedule")
@epoch_option
@slower_option
@click.option("--plot", type=PICTURE, help="Draw the schedule to this file.")
def show_schedule(schedule: str, epoch: str | None, slower: float, plot: Path | None) -> None:
    """Check, print and draw a schedule.

    SCHEDULE is a file, c1 or c2.
    """
    parsed = read_schedule(schedule, epoch, slower)
    for event in parsed.events:
        click.echo(f"{parsed.unit} {event.at:g}: {event}")
    if plot:
        from cgx_ray.report.links import plot_schedule  # noqa: PLC0415 - the extra plots

        plot_schedule(parsed, plot)
        click.echo(f"picture: {plot}")
