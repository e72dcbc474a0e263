"""`python -m bench step`: seconds of a training step by the way gradients are averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from bench.step.cases import StepNetwork, StepOptions, networks_of, quick_options
from bench.step.measure import StepTiming, measure_step, rows_of, step_table
from cgx_ray.commands.options import FILE, console_for, json_option
from cgx_ray.engine.chrome_trace import PhaseSpan, chrome_trace
from cgx_ray.lab.namespaces import Lab
from cgx_ray.report.result import write_result
from cgx_ray.report.show import print_line, progress_bar, write_json
from cgx_ray.units import parse_rate, parse_seconds


@click.command()
@click.option("--model", default="resnet50", show_default=True, metavar="NAME|FILE", help="As for `cgx-ray plan`.")
@click.option("--backward", default="250ms", show_default=True, help="Backward of a step, which the layers share.")
@click.option("--rate", default="1gbit", show_default=True, help="Rate of every link, such as 100mbit.")
@click.option("--latency", default="0.5ms", show_default=True, help="Latency one way, such as 10ms.")
@click.option("--ranks", default=4, show_default=True, help="Processes, one per host of the lab; the goals are for 4.")
@click.option("--rounds", default=4, show_default=True, help="Rounds; each times two steps of every way.")
@click.option("--ways", metavar="NAME,...", help="Time these only, such as noop,ddp,joint.  [default: all]")
@click.option("--trace", type=FILE, help="Write one step's timeline per way of the engine, for ui.perfetto.dev.")
@json_option()
@click.option("--quick", is_flag=True, help="A short check: ResNet18, two ranks, one round, few ways, no goals.")
def step(
    model: str,
    backward: str,
    rate: str,
    latency: str,
    ranks: int,
    rounds: int,
    ways: str | None,
    trace: Path | None,
    json_path: str | None,
    quick: bool,
) -> None:
    """Time a step with DDP, torch's hooks and the engine.

    The engine runs with several codecs and with the planner's plan, on loopback and on an emulated network. Layers and
    sizes are those of a model; backward only sleeps.
    """
    options = StepOptions(
        model=model,
        backward_s=parse_seconds("backward", backward),
        network=StepNetwork(rate_bit_per_s=parse_rate("rate", rate), latency_s=parse_seconds("latency", latency)),
        num_ranks=ranks,
        num_rounds=rounds,
        ways=tuple(ways.split(",")) if ways else (),
    )
    _run(quick_options(options) if quick else options, json_path, trace)


def _run(options: StepOptions, json_path: str | None, trace: Path | None) -> None:
    console = console_for(json_path)
    lab_reason = Lab.available(rates_only=not options.network.latency_s)
    timings: list[StepTiming] = []
    spans: Mapping[str, Sequence[PhaseSpan]] = {}
    for network in networks_of(options, lab_reason):
        with progress_bar(console) as on_turn:
            found, spans = measure_step(options, network, on_turn)
        timings += found
        console.print(step_table(options, network, found))
    rows = rows_of(options, timings)
    if options.is_whole:
        from cgx_ray.demo.engine_overhead import measure_overhead  # noqa: PLC0415 - it imports torch: 2 s

        print_line(console, "measuring the cost of the engine behind the demo's model")
        rows += measure_overhead()
    for row in rows:
        if row.goal is not None:
            judged = row.value if row.ratio is None else row.ratio
            print_line(console, f"{row.name}: {judged:.3f}, goal {row.goal}: {row.verdict}")
    if lab_reason is not None:
        print_line(console, f"Left out: the network of {options.network.title}; {lab_reason}.")
    if trace is not None:
        write_json(trace, chrome_trace(spans))
        print_line(console, f"timeline: {trace}")
    if json_path:
        write_result("step", rows, json_path)
