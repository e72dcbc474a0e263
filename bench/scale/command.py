"""`python -m bench scale`: whether one controller serves thousands of ranks."""

from __future__ import annotations

from dataclasses import replace

import click

from bench.network.monitor_cost import local_ray
from bench.scale.measure import QUICK, ScaleOptions, measure_scale
from cgx_ray.commands.options import console_for, json_option
from cgx_ray.report.result import result_table, write_result
from cgx_ray.report.show import print_line, progress_bar


@click.command()
@click.option("--minutes", default=1.0, show_default=True, type=click.FloatRange(0.5, 60), help="Time of the reports.")
@click.option("--nodes", default=512, show_default=True, type=click.IntRange(2), help="Nodes; the goals are for 512.")
@click.option("--ranks-per-node", default=8, show_default=True, type=click.IntRange(1), help="The goals are for 8.")
@click.option("--agreeing", default=256, show_default=True, type=click.IntRange(2), help="Processes that agree.")
@json_option()
@click.option("--quick", is_flag=True, help="A short check: 20 nodes of 2 ranks, 20 processes, no goals.")
def scale(minutes: float, nodes: int, ranks_per_node: int, agreeing: int, json_path: str | None, quick: bool) -> None:
    """Load one controller with the reports of thousands of ranks.

    The controller is real, and so are its Ray and the processes that agree; the nodes that report are simulated, one
    report per second each. Half-way their links become ten times slower. Memory is judged from two minutes on.
    """
    options = ScaleOptions(num_nodes=nodes, ranks_per_node=ranks_per_node, seconds=60 * minutes, num_agreeing=agreeing)
    whole = ScaleOptions()
    is_whole = replace(options, seconds=whole.seconds) == whole
    options = QUICK if quick else replace(options, has_goals=is_whole)
    console = console_for(json_path)
    with local_ray(), progress_bar(console) as on_turn:
        numbers = measure_scale(options, on_turn)
    rows = numbers.rows(options)
    num_ranks = options.num_nodes * options.ranks_per_node
    console.print(result_table(f"{num_ranks:,} ranks on {options.num_nodes:,} nodes", rows))
    print_line(console, f"agreement: {options.num_agreeing} processes on this machine; baseline: each sends to all")
    if json_path:
        write_result("scale", rows, json_path)
