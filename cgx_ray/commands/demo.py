"""`cgx-ray demo` from options to table, picture and JSON."""

from __future__ import annotations

import time
from pathlib import Path

import click

from cgx_ray.commands.options import check_plots, console_for, json_option
from cgx_ray.commands.report import verdict, write_page
from cgx_ray.demo.engine_overhead import measure_overhead
from cgx_ray.demo.run import DECIDING, DemoOptions, run_demo
from cgx_ray.demo.summary import make_rows, print_summary
from cgx_ray.planner.fidelity import Fidelity
from cgx_ray.report.result import write_result
from cgx_ray.report.show import print_line
from cgx_ray.units import format_rate, parse_rate


@click.command()
@click.option("--workers", default=4, show_default=True, help="Training processes, one per host.")
@click.option("--steps", default=48, show_default=True, help="Steps of each run; the network slows down after half.")
@click.option("--rate", default="1gbit", show_default=True, help="Rate of every link in the first half.")
@click.option("--slow-rate", default="100mbit", show_default=True, help="Rate of every link in the second half.")
@click.option("--seed", default=0, show_default=True, help="Seed of weights, batches and rounding.")
@click.option(
    "--policy",
    type=click.Choice(DECIDING),
    default=DECIDING[0],
    show_default=True,
    help="Policy of the run beside the dense one; cgx and flexible decide as these papers do.",
)
@click.option(
    "--fidelity",
    type=click.Choice([str(level) for level in Fidelity]),
    show_default="strict",
    help="Codecs that the adaptive run may choose; fast allows top-k, which costs accuracy.",
)
@click.option("--dense-only", is_flag=True, help="Do the dense run only.")
@click.option("--simulated-link", is_flag=True, help="Delay messages in software even if namespaces work here.")
@json_option()
@click.option(
    "--bench-rounds",
    type=click.IntRange(min=1),
    default=12,
    show_default=True,
    help="Rounds of the engine's overhead, whose rows --json adds.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the runs.  [default: runs/demo-<time>]")
def demo(
    workers: int,
    steps: int,
    rate: str,
    slow_rate: str,
    seed: int,
    policy: str,
    fidelity: str | None,
    dense_only: bool,
    simulated_link: bool,
    json_path: str | None,
    bench_rounds: int,
    out: Path | None,
) -> None:
    """Train a small GPT, dense and under a policy, on a network that slows down."""
    options = DemoOptions(
        out=out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S"),
        workers=workers,
        steps=steps,
        rate=parse_rate("rate", rate, needs_unit=False),
        slow_rate=parse_rate("slow rate", slow_rate, needs_unit=False),
        seed=seed,
        policy=policy,
        fidelity=fidelity,
        dense_only=dense_only,
        force_simulated=simulated_link,
    )
    _run(options, json_path, num_bench_rounds=bench_rounds)


def _run(options: DemoOptions, json_path: str | None, *, num_bench_rounds: int) -> None:
    """Run the demo, print and draw its numbers, and write the rows if `json_path` is given."""
    check_plots()
    from cgx_ray.report.picture import plot_runs  # noqa: PLC0415 - the extra plots

    console = console_for(json_path)
    result = run_demo(options, console)
    print_summary(console, result.dense, result.decided, result.link)
    print_line(console, "drawing the picture and the report", style="dim")
    picture = options.out / "demo.png"
    records = [result.dense] if result.decided is None else [result.dense, result.decided]
    title = (
        f"{options.workers} workers, {result.link} from {format_rate(options.rate)} to {format_rate(options.slow_rate)}"
    )
    plot_runs(records, picture, title=title)
    write_page(options.out / "report.html", title, records)
    if result.decided is not None:
        print_line(console, f"cgx_ray: {verdict(result.decided, result.dense)}.", style="bold")
    print_line(console, f"picture: {picture}; report: {options.out / 'report.html'}")
    if json_path is None:
        return
    rows = make_rows(result.dense, result.decided) if result.decided is not None else []
    print_line(console, "measuring the cost of the engine with dense gradients")
    write_result("demo", [*rows, *measure_overhead(num_rounds=num_bench_rounds)], json_path)
