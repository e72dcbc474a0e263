"""`cgx-ray plan`: the best plan of a model on a network, as text, picture and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from cgx_ray.commands.options import PICTURE, console_for, json_option
from cgx_ray.commands.plan.plan_clusters import answer_for_clusters
from cgx_ray.commands.plan.plan_tables import group_table, step_table, sweep_table
from cgx_ray.commands.plan.question import INSIDE_BANDWIDTH, INSIDE_LATENCY, read_question
from cgx_ray.errors import ConfigError
from cgx_ray.planner.fidelity import USUAL_MIN_GAIN, Fidelity
from cgx_ray.planner.joint import BestPlan
from cgx_ray.planner.models import load_model
from cgx_ray.planner.prediction import Prediction
from cgx_ray.planner.scenario import Price, Scenario, Sweep, verdict
from cgx_ray.report.show import print_line, progress_bar, write_json

# Options that describe one network. With --clusters the file describes several.
_OF_ONE_NETWORK = (
    "workers", "latency", "bandwidth", "ranks_per_node", "inside_latency", "inside_bandwidth", "price", "sweep",
)  # fmt: skip


@click.command()
@click.option("--model", required=True, metavar="NAME|FILE", help="resnet50, gpt2, ..., or a file of `profile-model`.")
@click.option("--workers", type=int, help="Number of workers; needed without --clusters.")
@click.option("--latency", help="Latency one way between nodes, such as 4ms or 50us.  [default: from --profile]")
@click.option("--bandwidth", help="Bandwidth of a node's link, such as 10gbps.  [default: from --profile]")
@click.option("--ranks-per-node", default=1, show_default=True, help="Workers that share a node and its link.")
@click.option("--inside-latency", default=INSIDE_LATENCY, show_default=True, help="Latency between ranks of a node.")
@click.option(
    "--inside-bandwidth", default=INSIDE_BANDWIDTH, show_default=True, help="Bandwidth between ranks of a node."
)
@click.option(
    "--step-time", help="Forward and backward of a step, such as 120ms; not needed if the model's was measured."
)
@click.option("--throughput", type=float, help="Instead of --step-time: samples per second of one worker alone.")
@click.option("--gpu", help="Instead of --step-time: v100, a100, ..., at 30 % of its data sheet's peak.")
@click.option("--batch", default=32, show_default=True, help="Samples per worker and step.")
@click.option("--profile", type=click.Path(path_type=Path), help="Codec times, a file of `cgx-ray profile`.")
@click.option(
    "--fidelity",
    type=click.Choice([str(level) for level in Fidelity]),
    default=str(Fidelity.STRICT),
    show_default=True,
    help="Codecs to choose from, as in CGXConfig.",
)
@click.option(
    "--gain",
    "gains",
    multiple=True,
    metavar="CODEC=SHARE",
    help="Share of a gradient that a codec keeps; adds the codec. May be repeated.",
)
@click.option("--min-gain", default=USUAL_MIN_GAIN, show_default=True, help="Leave out codecs that keep less.")
@click.option(
    "--period",
    default="1",
    show_default=True,
    metavar="STEPS|auto",
    help="Steps between exchanges, or the best number.",
)
@click.option("--price", type=float, help="US dollars per hour and worker.")
@click.option("--samples-per-epoch", type=int, help="With --price or --clusters: print the cost of an epoch.")
@click.option("--sweep", metavar="NAME=LOW..HIGH", help="bandwidth=0.1..25gbps, latency=50us..20ms or workers=2..1024.")
@click.option(
    "--clusters",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Compare the priced clusters of a YAML or CSV file, as in examples/clusters.yaml.",
)
@json_option("everything")
@click.option("--plot", type=PICTURE, help="Draw the dense step, the planned one and the sweep; or the clusters.")
@click.pass_context
def plan(
    context: click.Context, /, clusters: Path | None, json_path: str | None, plot: Path | None, **given: Any
) -> None:
    """Predict the best plan of a model on a network, and its step time.

    Also prints what bounds the step, the groups of the plan, and its cost with --price. With --clusters FILE, what
    1 to N nodes of each cluster train per second and per US dollar, dense and with the best plan.
    """
    if clusters is not None:
        _check_no_network(context)
        answer_for_clusters(clusters, given, json_path, plot)
        return
    model = load_model(given["model"])
    _check_network(given)
    question, console = read_question(**{**given, "model": model}), console_for(json_path)
    scenario, sweep, price = question.scenario, question.sweep, question.price
    answer = scenario.solve()
    points = [] if sweep is None else _solve_sweep(scenario, sweep, console)
    num_workers = scenario.network.num_workers
    print_line(console, verdict(answer, num_workers), style="bold")
    for line in question.assumptions:
        print_line(console, f"assumed: {line}", style="dim")
    console.print(step_table(answer, price, num_workers))
    console.print(group_table(answer.best))
    if sweep is not None:
        console.print(sweep_table(sweep, points))
    if plot is not None:
        from cgx_ray.commands.plan.plan_picture import draw_answer  # noqa: PLC0415 - the extra plots
        from cgx_ray.report.style import save_figure  # noqa: PLC0415

        save_figure(draw_answer(answer, title=_title(scenario), sweep=sweep, points=points), plot)
        print_line(console, f"picture: {plot}")
    if json_path is not None:
        described = {
            **describe_answer(scenario, answer),
            "assumptions": question.assumptions,
            "price": None if price is None else describe_price(price, answer, num_workers),
            "sweep": None if sweep is None else describe_sweep(sweep, points),
        }
        write_json(json_path, described)


def _check_network(given: Mapping[str, Any]) -> None:
    """Raise ConfigError if the network is not described, naming what is missing."""
    needed = ("workers",) if given["profile"] is not None else ("workers", "latency", "bandwidth")
    missing = [f"--{name}" for name in needed if given[name] is None]
    if missing:
        remedy = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
        raise ConfigError(f"the network is unknown; give {remedy}, or --clusters FILE for several")


def _check_no_network(context: click.Context) -> None:
    """Raise ConfigError if --clusters was given together with options of one network."""
    given = [name for name in _OF_ONE_NETWORK if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{names} and --clusters both describe a network; leave {names} out, as the file has them")


def _solve_sweep(scenario: Scenario, sweep: Sweep, console: Console) -> list[BestPlan]:
    """Return the best plan per value of the sweep."""
    points: list[BestPlan] = []
    with progress_bar(console) as on_part:
        for value in sweep.values:
            on_part("sweep", len(points) / len(sweep.values))
            points.append(scenario.swept(sweep, value).solve())
    return points


def describe_price(price: Price, answer: BestPlan, num_workers: int) -> dict[str, Any]:
    """Return for JSON: US dollars per hour, and hours and dollars per epoch if its samples are known."""
    steps = {"dense": answer.dense.step_s, "planned": answer.best.step_s}
    epochs = (
        {}
        if price.samples is None
        else {name: price.epoch(step_s, num_workers)._asdict() for name, step_s in steps.items()}
    )
    return {"usd_per_hour": num_workers * price.usd_per_hour, "epoch": epochs or None}


def describe_answer(scenario: Scenario, answer: BestPlan) -> dict[str, Any]:
    """Return the answer for JSON."""
    dense, best, network = answer.dense, answer.best, scenario.network
    links = {"between": network.between, "inside": network.inside}
    return {
        "model": scenario.model.name,
        "num_layers": len(scenario.model.layers),
        "numel": scenario.model.numel,
        "num_workers": network.num_workers,
        "ranks_per_node": network.ranks_per_node,
        "links": {
            name: {"latency_ms": 1e3 * link.alpha_s, "bandwidth_gbps": link.bandwidth_gbps}
            for name, link in links.items()
            if link is not None
        },
        "verdict": verdict(answer, network.num_workers),
        **_numbers(answer),
        "dense_parts_ms": _parts_ms(dense),
        "planned_parts_ms": _parts_ms(best),
        "groups": [
            {
                "layers": list(group.layers),
                "numel": group.numel,
                "option": str(group.option),
                "dense_bytes": group.dense_bytes,
                "wire_bytes": group.wire_bytes,
            }
            for group in best.groups
        ],
        "plan": json.loads(best.plan(version=0, world_size=network.num_workers).to_json()),
    }


def _numbers(answer: BestPlan) -> dict[str, Any]:
    dense, best = answer.dense, answer.best
    return {
        "compute_ms": 1e3 * dense.compute_s,
        "dense_ms": 1e3 * dense.step_s,
        "planned_ms": 1e3 * best.step_s,
        "bound_by": best.bound_by,
        "dense_bound_by": dense.bound_by,
        "efficiency": best.efficiency,
        "speedup": answer.speedup,
        "gap": answer.gap,
        "options": best.describe(),
    }


def describe_sweep(sweep: Sweep, points: Sequence[BestPlan]) -> dict[str, Any]:
    """Return the rows of a sweep for JSON."""
    rows = [{sweep.name: value, **_numbers(point)} for value, point in zip(sweep.values, points, strict=True)]
    return {"name": sweep.name, "unit": sweep.unit, "rows": rows}


def _parts_ms(step: Prediction) -> Mapping[str, float]:
    return {part: 1e3 * seconds for part, seconds in step.timeline.parts_s.items()}


def _title(scenario: Scenario) -> str:
    network = scenario.network
    link = network.between
    nodes = f" on {network.num_nodes} nodes" if network.ranks_per_node > 1 else ""
    return (
        f"{scenario.model.name} on {network.num_workers} workers{nodes}: "
        f"{link.bandwidth_gbps:.3g} Gbit/s, {1e3 * link.alpha_s:.3g} ms"
    )
