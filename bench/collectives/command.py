"""`python -m bench collectives`: times of schemes between real processes."""

from __future__ import annotations

import click

from bench.collectives.cases import CollectiveOptions, settings_of
from bench.collectives.measure import measure_collectives, notes, rows_of, timing_table
from cgx_ray.commands.options import console_for, json_option
from cgx_ray.lab.namespaces import Lab
from cgx_ray.report.result import write_result
from cgx_ray.report.show import print_line, progress_bar


@click.command()
@click.option("--ranks", default=4, show_default=True, help="Processes, one per host of the lab; the goals are for 4.")
@json_option()
@click.option("--quick", is_flag=True, help="A short check: 4 MB, two rounds, not 100 Mbit/s, no goals.")
def collectives(ranks: int, json_path: str | None, quick: bool) -> None:
    """Time schemes against Gloo and the bound.

    The schemes run over TCP connections of cgx_ray and over Gloo. Gloo's own all-reduce is the alternative.
    """
    options, console = CollectiveOptions(num_ranks=ranks, quick=quick), console_for(json_path)
    lab_reason, latency_reason = Lab.available(), Lab.available(rates_only=False)
    settings = settings_of(options, lab_reason, latency_reason)
    with progress_bar(console) as on_turn:
        timings = measure_collectives(options, settings, on_turn)
    rows = rows_of(options, timings)
    console.print(timing_table(options, timings))
    for row in rows:
        if row.goal is not None:
            judged = row.value if row.ratio is None else row.ratio
            print_line(console, f"{row.name}: {judged:.2f}, goal {row.goal}: {row.verdict}")
    for note in notes(lab_reason, latency_reason):
        print_line(console, note)
    if json_path:
        write_result("collectives", rows, json_path)
