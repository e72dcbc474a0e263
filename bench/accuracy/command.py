"""`python -m bench accuracy`: loss after training with each codec, over dense."""

from __future__ import annotations

from pathlib import Path

import click

from bench.accuracy.cases import CODECS, LARGE_WORKLOAD, WORKLOADS, AccuracyOptions, quick_options
from bench.accuracy.measure import (
    TrainingRun,
    accuracies_of,
    accuracy_table,
    beside_static_table,
    measure_accuracy,
    plot_accuracy,
    rows_of,
)
from bench.accuracy.workloads import check_workload
from cgx_ray.commands.options import console_for, json_option, plot_option
from cgx_ray.errors import ConfigError
from cgx_ray.lab.namespaces import Lab
from cgx_ray.report.result import write_result
from cgx_ray.report.show import print_line, progress_bar
from cgx_ray.units import parse_rate


@click.command()
@click.option(
    "--workloads",
    default=",".join(WORKLOADS),
    show_default=True,
    metavar="NAME,...",
    help=f"Trainings; {LARGE_WORKLOAD} has the demo's model.",
)
@click.option(
    "--codecs",
    metavar="TEXT;...",
    help='Compare these with dense, such as "qsgd:bits=2; topk:density=0.01 over artopk_ring"; "adaptive", '
    '"adaptive fast" and "cgx dp" are policies.  [default: 14 codecs]',
)
@click.option("--seeds", default=3, show_default=True, help="Trainings per codec and workload.")
@click.option("--steps", default=300, show_default=True, help="Steps per training.")
@click.option("--ranks", default=4, show_default=True, help="Processes.")
@click.option("--rate", help="Train in a lab whose links have this rate, such as 100mbit.  [default: loopback]")
@json_option()
@plot_option("accuracy.png")
@click.option("--quick", is_flag=True, help="A short check: one seed, 60 steps, two codecs unless others are given.")
def accuracy(
    workloads: str,
    codecs: str | None,
    seeds: int,
    steps: int,
    ranks: int,
    rate: str | None,
    json_path: str | None,
    plot: Path,
    quick: bool,
) -> None:
    """Train small models with each codec and dense, and compare the losses.

    All codecs get the same weights and batches. The default run takes about 45 minutes on two cores.
    """
    options = AccuracyOptions(
        workloads=tuple(workloads.split(",")),
        codecs=CODECS if codecs is None else tuple(codecs.split(";")),
        num_seeds=seeds,
        num_steps=steps,
        num_ranks=ranks,
        rate_bit_per_s=None if rate is None else parse_rate("rate", rate),
    )
    _run(quick_options(options) if quick else options, json_path, plot)


def _run(options: AccuracyOptions, json_path: str | None, plot: Path) -> None:
    console = console_for(json_path)
    for workload in options.workloads:
        check_workload(workload)
    lab_reason = None if options.rate_bit_per_s is None else Lab.available()
    if lab_reason is not None:
        raise ConfigError(f"--rate needs a lab; {lab_reason}; leave it out to train over loopback")
    with progress_bar(console) as on_part:

        def on_run(run: TrainingRun, fraction: float) -> None:
            on_part(f"{run.workload}, seed {run.seed}: {run.option}", fraction)

        accuracies = accuracies_of(measure_accuracy(options, on_run))
    console.print(accuracy_table(options, accuracies))
    beside = beside_static_table(accuracies, is_timed=options.rate_bit_per_s is not None)
    if beside is not None:
        console.print(beside)
    if json_path:
        write_result("accuracy", rows_of(options, accuracies), json_path)
    plot_accuracy(options, accuracies, plot)
    print_line(console, f"picture: {plot}")
