"""`cgx-ray collective`: which collective is the fastest for a top-k gradient, and the cost of each."""

from __future__ import annotations

import click

from cgx_ray.commands.options import console_for, json_option
from cgx_ray.planner.what_if import compare_schemes, parse_link
from cgx_ray.report.show import new_table, write_json


@click.command()
@click.option("--numel", type=int, required=True, help="Elements of the gradient, float32.")
@click.option("--density", type=float, required=True, help="Fraction of elements that is sent, in (0, 1].")
@click.option("--workers", type=int, required=True)
@click.option("--latency", required=True, help="Latency one way, such as 4ms or 50us.")
@click.option("--bandwidth", required=True, help="Bandwidth of each worker's link, such as 10gbps or 100mbit.")
@json_option()
def collective(numel: int, density: float, workers: int, latency: str, bandwidth: str, json_path: str | None) -> None:
    """Compare collectives for a top-k gradient on a link.

    Prints the predicted milliseconds of each: for the algorithms of the literature, and as cgx_ray implements them.
    """
    link = parse_link(latency, bandwidth)
    result = compare_schemes(numel=numel, density=density, num_workers=workers, link=link)
    table = new_table(f"fastest: {result.scheme}", "scheme", "literature, ms", "here, ms")
    for scheme, cost_ms in sorted(result.costs_ms.items(), key=lambda item: item[1]):
        table.add_row(scheme, f"{cost_ms:.2f}", f"{result.ours_ms[scheme]:.2f}")
    console_for(json_path).print(table)
    if json_path:
        write_json(json_path, {"scheme": result.scheme, "costs_ms": result.costs_ms, "ours_ms": result.ours_ms})
