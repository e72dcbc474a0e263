"""`cgx-ray bench step`: the cost of the engine with dense gradients."""

from __future__ import annotations

import click

from cgx_ray.bench.step import measure_step, step_table
from cgx_ray.commands.options import console_for, json_option
from cgx_ray.report.result import write_result


@click.command()
@json_option()
@click.option("--rounds", default=12, show_default=True, help="Rounds; each times plain DDP and the engine.")
@click.option("--steps", default=4, show_default=True, help="Steps of each per round.")
def step(json_path: str | None, rounds: int, steps: int) -> None:
    """Compare a dense step of the engine with plain DDP."""
    rows = measure_step(num_rounds=rounds, steps_per_round=steps)
    console_for(json_path).print(step_table(rows))
    if json_path:
        write_result("step", rows, json_path)
