"""`cgx-ray bench planner` from numbers to tables, JSON and a picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cgx_ray.bench.planner import MODEL_GBPS, SCALING_GBPS, PlannerNumbers, measure_planner
from cgx_ray.bench.planner_cases import RANKS_PER_NODE
from cgx_ray.report.result import write_result

_MET = {None: "", True: "yes", False: "no"}
_HEADINGS = {
    "whole model": "whole",
    "layer-wise": "layers",
    "DDP buckets of 25 MB": "DDP",
    "best of buckets": "buckets",
    "best of even splits": "even",
    "Cupcake": "Cupcake",
    "ByteComp": "Byte-C.",
}
# Colour-blind safe (Okabe and Ito).
_BLUE, _ORANGE, _GREEN, _PURPLE, _GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#999999"


def planner_command(quick: bool, console: Console, json_path: str | None, plot: Path) -> None:
    """Measure, print tables, draw a picture to `plot`, and write the rows if `json_path` is given."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        numbers = measure_planner(quick, lambda what, share: progress.update(task, description=what, completed=share))
    for gbps in MODEL_GBPS:
        console.print(strategy_table(numbers, gbps))
    console.print(row_table(numbers))
    plot_planner(numbers, plot)
    console.print(f"picture: {plot}", highlight=False, soft_wrap=True)
    if json_path:
        write_result("planner", numbers.rows, json_path)


def strategy_table(numbers: PlannerNumbers, gbps: float) -> Table:
    """Return the joint plan of each model, its proven gap, and how many % longer a step takes under each strategy."""
    table = Table(
        title=f"8 workers at {gbps:g} Gbit/s: ms per step, gap, % longer", title_justify="left", box=SIMPLE, padding=0
    )
    table.add_column("", no_wrap=True)
    names = list(numbers.models[0].strategies_s)
    for heading in ("joint", "gap", *(_HEADINGS[name] for name in names)):
        table.add_column(heading, justify="right", no_wrap=True)
    for found in numbers.models:
        if found.gbps == gbps:
            longer = (100 * (found.strategies_s[name] / found.joint_s - 1) for name in names)
            # Adding 0 turns -0 into 0.
            cells = (f"{round(share, 2) + 0:.2f}" for share in longer)
            table.add_row(found.model, f"{1e3 * found.joint_s:.1f}", f"{found.gap:.2%}", *cells)
    return table


def row_table(numbers: PlannerNumbers) -> Table:
    """Return a table of the rows that are neither in `strategy_table` nor in the picture."""
    models = tuple(f"{found.model}_" for found in numbers.models)
    table = Table(box=SIMPLE, padding=0)
    table.add_column("", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("")
    for heading in ("baseline", "goal", "met"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in numbers.rows:
        if not row.name.startswith(models) and "_layers_" not in row.name:
            value, baseline = ("" if x is None else f"{x:.4g}" for x in (row.value, row.baseline))
            table.add_row(row.name, value, row.unit, baseline, (row.goal or "")[:9], _MET[row.met])
    return table


def plot_planner(numbers: PlannerNumbers, path: Path) -> None:
    """Write a PNG of four panels."""
    figure = Figure(figsize=(13.5, 9.5), dpi=130, layout="constrained")
    (table_axes, strategy_axes), (time_axes, scale_axes) = figure.subplots(2, 2)
    _draw_table(table_axes, numbers)
    _draw_strategies(strategy_axes, numbers)
    _draw_times(time_axes, numbers)
    _draw_scaling(scale_axes, numbers)
    for axes in (table_axes, strategy_axes, time_axes, scale_axes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    figure.suptitle("cgx-ray bench planner", fontsize=12, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_table(axes: Axes, numbers: PlannerNumbers) -> None:
    styles = {"allgather": (_BLUE, "o"), "artopk_ring": (_ORANGE, "s"), "artopk_tree": (_GREEN, "^")}
    for scheme, (color, marker) in styles.items():
        cells = [(measured, predicted) for name, predicted, measured in numbers.table6 if name == scheme]
        measured_ms, predicted_ms = zip(*cells, strict=True)
        axes.scatter(measured_ms, predicted_ms, color=color, marker=marker, s=28, label=scheme, zorder=2)
    ends = [min(cell[2] for cell in numbers.table6) / 1.3, max(cell[2] for cell in numbers.table6) * 1.3]
    axes.plot(ends, ends, color=_GREY, linewidth=1, zorder=1)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms", xlim=ends, ylim=ends)
    axes.set_title("Cost model and Flexible Communication, table 6")
    _plain_ticks(axes)
    axes.legend(frameon=False, fontsize=9)


def _draw_strategies(axes: Axes, numbers: PlannerNumbers) -> None:
    """Draw how much longer a step takes than under the joint plan, on the slower network."""
    found = [plan for plan in numbers.models if plan.gbps == MODEL_GBPS[0]]
    colors = {"layer-wise": _GREY, "best of buckets": _PURPLE, "Cupcake": _ORANGE, "ByteComp": _BLUE}
    width = 0.8 / len(colors)
    for index, (name, color) in enumerate(colors.items()):
        heights = [100 * (plan.strategies_s[name] / plan.joint_s - 1) for plan in found]
        places = [place + (index - (len(colors) - 1) / 2) * width for place in range(len(found))]
        axes.bar(places, heights, width, color=color, label=name, zorder=2)
    axes.set_xticks(range(len(found)), [plan.model for plan in found], rotation=30, ha="right", fontsize=9)
    axes.set(ylabel="% longer than the joint plan", title=f"A step of 8 workers at {MODEL_GBPS[0]:g} Gbit/s")
    axes.legend(frameon=False, fontsize=9)


def _draw_times(axes: Axes, numbers: PlannerNumbers) -> None:
    layers = [time.num_layers for time in numbers.times]
    axes.plot(layers, [time.joint_ms for time in numbers.times], "o-", color=_BLUE, label="joint search, 6 options")
    axes.plot(layers, [time.fusion_ms for time in numbers.times], "s-", color=_GREEN, label="fusion, 1 option")
    axes.plot([314], [numbers.cupcake_ms], "D", color=_ORANGE, label="Cupcake's search, ResNet-101")
    axes.set(xscale="log", yscale="log", xlabel="layers", ylabel="ms", title="Time to plan")
    _plain_ticks(axes)
    axes.legend(frameon=False, fontsize=9)


def _draw_scaling(axes: Axes, numbers: PlannerNumbers) -> None:
    for ranks_per_node, style in ((RANKS_PER_NODE, "o-"), (1, "s--")):
        found = [scaling for scaling in numbers.scaling if scaling.ranks_per_node == ranks_per_node]
        workers, place = [scaling.num_workers for scaling in found], f"{ranks_per_node} a node"
        planned, dense = (
            [100 * share for share in shares]
            for shares in zip(*((scaling.efficiency, scaling.dense_efficiency) for scaling in found), strict=True)
        )
        axes.plot(workers, planned, style, color=_BLUE, label=f"planned, {place}")
        axes.plot(workers, dense, style, color=_GREY, label=f"dense, {place}")
    axes.set(xlabel="workers", ylabel="% of the progress without communication", ylim=(0, 105))
    axes.set_xscale("log", base=2)
    axes.set_xticks(workers, [f"{count:,}" for count in workers], rotation=45, ha="right")
    axes.set_title(f"Predicted scaling, ResNet-101, {SCALING_GBPS:g} Gbit/s between nodes")
    axes.legend(frameon=False, fontsize=9)


def _plain_ticks(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
