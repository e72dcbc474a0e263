"""`python -m bench kernels`: speed and error of the codecs."""

from __future__ import annotations

from pathlib import Path

import click

from bench.kernels.measure import (
    GOAL_NUMEL,
    KernelOptions,
    codec_table,
    goal_table,
    latency_table,
    measure_kernels,
    plot_kernels,
)
from cgx_ray.commands.options import console_for, json_option, plot_option
from cgx_ray.report.result import write_result
from cgx_ray.report.show import print_line, progress_bar
from cgx_ray.units import format_count


@click.command()
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--numel", default=1 << 26, show_default=True, help="Elements of the large gradients.")
@click.option("--threads", default=1, show_default=True, help="Threads of the CPU; the goals are for one.")
@click.option("--seed", default=0, show_default=True, help="Seed of gradients and rounding.")
@json_option()
@plot_option("kernels.png")
def kernels(device: str, numel: int, threads: int, seed: int, json_path: str | None, plot: Path) -> None:
    """Measure throughput, latency and error of codecs."""
    options = KernelOptions(device=device, numel=numel, threads=threads, seed=seed)
    console = console_for(json_path)
    on_threads = f", {format_count(threads, 'thread')}" if device == "cpu" else ""
    print_line(console, f"{numel:,} elements on {device}{on_threads}")
    with progress_bar(console) as on_part:
        numbers = measure_kernels(options, on_part)
    console.print(goal_table(numbers))
    if not options.is_judged:
        print_line(console, f"no goals: they are for {GOAL_NUMEL:,} elements and one thread")
    console.print(latency_table(numbers))
    console.print(codec_table(numbers))
    if json_path:
        write_result("kernels", numbers.rows(), json_path)
    plot_kernels(numbers, plot)
    print_line(console, f"picture: {plot}")
