"""`cgx-ray plan`: what a plan would make of a model on a network, as text, picture and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cgx_ray.commands.plan_picture import draw_answer, main_option
from cgx_ray.planner.joint import BestPlan
from cgx_ray.planner.prediction import Prediction
from cgx_ray.planner.question import Question
from cgx_ray.planner.scenario import Price, Scenario, Sweep, verdict

MAX_ROWS = 20


def plan_command(question: Question, console: Console, *, json_path: str | None, plot: Path | None) -> None:
    """Plan, say in one sentence what came out, then how; write picture and JSON where paths are given."""
    scenario, sweep, price = question.scenario, question.sweep, question.price
    answer = scenario.solve()
    points: list[BestPlan] = []
    if sweep is not None:
        hidden = not console.is_terminal  # else it leaves an empty line before the answer
        solving = track(sweep.values, description="sweep", console=console, transient=True, disable=hidden)
        points = [scenario.swept(sweep, value).solve() for value in solving]
    N = scenario.network.num_workers
    console.print(verdict(answer, N), style="bold", highlight=False)
    for line in question.assumptions:
        console.print(f"assumed: {line}", highlight=False, style="dim")
    console.print(_summary(answer, price, N))
    console.print(_groups(answer.best))
    if sweep is not None:
        console.print(_sweep(sweep, points))
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        draw_answer(answer, title=_title(scenario), sweep=sweep, points=points).savefig(plot)
        console.print(f"picture: {plot}", highlight=False, soft_wrap=True)
    if json_path is not None:
        described = {
            **describe_answer(scenario, answer),
            "assumptions": question.assumptions,
            "price": None if price is None else describe_price(price, answer, N),
            "sweep": None if sweep is None else describe_sweep(sweep, points),
        }
        with click.open_file(json_path, "w") as file:
            file.write(json.dumps(described, indent=2) + "\n")


def describe_price(price: Price, answer: BestPlan, num_workers: int) -> dict[str, Any]:
    """US dollars an hour, and an epoch's hours and dollars if its samples are known, as JSON has them."""
    steps = {"dense": answer.dense.step_s, "planned": answer.best.step_s}
    epochs = (
        {}
        if price.samples is None
        else {name: price.epoch(step_s, num_workers)._asdict() for name, step_s in steps.items()}
    )
    return {"usd_per_hour": num_workers * price.usd_per_hour, "epoch": epochs or None}


def describe_answer(scenario: Scenario, answer: BestPlan) -> dict[str, Any]:
    """The answer as JSON has it."""
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
    """Its rows as JSON has them."""
    rows = [{sweep.name: value, **_numbers(point)} for value, point in zip(sweep.values, points, strict=True)]
    return {"name": sweep.name, "unit": sweep.unit, "rows": rows}


def _parts_ms(step: Prediction) -> Mapping[str, float]:
    return {part: 1e3 * seconds for part, seconds in step.timeline.parts_s.items()}


def _summary(answer: BestPlan, price: Price | None, num_workers: int) -> Table:
    table = _table("", "", "dense", "planned")
    table.columns[0].justify = "left"
    dense, best = answer.dense, answer.best
    assert best.efficiency is not None
    table.add_row("step, ms", *(f"{1e3 * step.step_s:.1f}" for step in (dense, best)))
    table.add_row("compute of it, ms", *(f"{1e3 * step.compute_s:.1f}" for step in (dense, best)))
    table.add_row("bound by", *(step.bound_by for step in (dense, best)))
    for part in dense.timeline.parts_s:
        shares = (step.timeline.parts_s[part] / step.step_s if step.step_s else 0.0 for step in (dense, best))
        table.add_row(f"  critical path, {part}", *(f"{share:.0%}" for share in shares))
    num_bytes = (sum(group.wire_bytes for group in step.groups) for step in (dense, best))
    table.add_row("gradient encoded, MB", *(f"{each / 1e6:.2f}" for each in num_bytes))
    table.add_row("gain kept", "100%", f"{best.efficiency:.1%}")
    table.add_row("progress against dense", "1x", f"{answer.speedup:.2f}x")
    table.add_row("a better plan could save", "", f"{answer.gap:.2%} at most")
    if price is not None:
        table.add_row("USD an hour", *[f"{num_workers * price.usd_per_hour:.2f}"] * 2)
        if price.samples is not None:
            epochs = [price.epoch(step.step_s, num_workers) for step in (dense, best)]
            table.add_row("hours an epoch", *(f"{epoch.hours:.3g}" for epoch in epochs))
            table.add_row("USD an epoch", *(f"{epoch.usd:.2f}" for epoch in epochs))
            table.add_row("USD for its progress", f"{epochs[0].usd:.2f}", f"{epochs[1].usd / best.efficiency:.2f}")
    return table


def _table(title: str, *numbers: str) -> Table:
    table = Table(box=SIMPLE, title=title, title_justify="left", pad_edge=False)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _groups(step: Prediction) -> Table:
    """The plan, one row a group; the middle of a long one left out."""
    table = _table(f"plan: {step.describe()}", "group", "layers", "elements", "dense MB", "wire MB")
    table.add_column("option", overflow="fold")
    last = len(step.groups) - 1
    for index, group in enumerate(step.groups):
        if len(step.groups) > MAX_ROWS and MAX_ROWS // 2 <= index <= last - MAX_ROWS // 2:
            if index == MAX_ROWS // 2:
                table.add_row("...")
            continue
        table.add_row(
            str(index),
            str(len(group.layers)),
            f"{group.numel:,}",
            f"{group.dense_bytes / 1e6:.2f}",
            f"{group.wire_bytes / 1e6:.3f}",
            str(group.option),
        )
    return table


def _sweep(sweep: Sweep, points: Sequence[BestPlan]) -> Table:
    """The ends, and where the plan becomes another one or something else bounds it."""
    table = _table(f"sweep over {sweep.name}", sweep.unit, "dense ms", "planned ms", "progress")
    table.add_column("bound by", no_wrap=True)
    table.add_column("most of it by", overflow="fold")
    before = None
    for index, (value, point) in enumerate(zip(sweep.values, points, strict=True)):
        now = (point.best.bound_by, str(main_option(point.best)))
        if now != before or index == len(points) - 1:
            numbers = (f"{1e3 * point.dense.step_s:.1f}", f"{1e3 * point.best.step_s:.1f}", f"{point.speedup:.2f}x")
            table.add_row(f"{value:.0f}" if sweep.name == "workers" else f"{value:.3g}", *numbers, *now)
        before = now
    return table


def _title(scenario: Scenario) -> str:
    network = scenario.network
    link = network.between
    nodes = f" on {network.num_nodes} nodes" if network.ranks_per_node > 1 else ""
    return (
        f"{scenario.model.name} on {network.num_workers} workers{nodes}: "
        f"{link.bandwidth_gbps:.3g} Gbit/s, {1e3 * link.alpha_s:.3g} ms"
    )
