"""`python -m bench lab`: how faithful the lab is on this machine."""

from __future__ import annotations

import click

from bench.lab.measure import LATENCIES_S, RATES, lab_table, measure_lab
from cgx_ray.commands.options import console_for, json_option
from cgx_ray.report.result import write_result
from cgx_ray.report.show import print_line


@click.command()
@json_option()
def lab(json_path: str | None) -> None:
    """Compare the lab with the alpha-beta model.

    Times Gloo's all-reduce on 4 hosts over 16 links. Takes about a minute.
    """
    console = console_for(json_path)
    points = measure_lab(RATES, LATENCIES_S, lambda point: print_line(console, point.name))
    console.print(lab_table(points))
    if json_path:
        write_result("lab", [row for point in points for row in point.rows()], json_path)
