"""`python -m bench network`: what the monitors estimate while a training job runs."""

from __future__ import annotations

import click

from bench.network.measure import NetworkOptions, network_command
from cgx_ray.commands.options import console_for, json_option


@click.command()
@click.option("--minutes", default=1.0, show_default=True, help="Time beside a bursty neighbour; the goals are for 10.")
@json_option()
@click.option("--quick", is_flag=True, help="A short check on one link.")
def network(minutes: float, json_path: str | None, quick: bool) -> None:
    """Compare the monitors' estimates with the lab's links.

    A training job runs meanwhile. Also measures the processor time and memory of the monitors.
    """
    network_command(NetworkOptions(minutes=minutes, quick=quick), console_for(json_path), json_path)
