"""`python -m bench planner`: checks against brute force and tables of papers, planning times, and predicted scaling."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from matplotlib.axes import Axes
from rich.table import Table

from bench.planner.bits import measure_bits, measure_gain, record_gradients
from bench.planner.cases import (
    COMPRESSING,
    CPU,
    DENSE_INDEX,
    GPU,
    OFFLOADED,
    QSGD_INDEX,
    RANKS_PER_NODE,
    cluster,
    earliest_finish_s,
    longer,
    model_pipeline,
    random_pipeline,
    read_table,
    repeated,
    resnet101,
    with_bits,
    with_hosts,
)
from bench.planner.fusion import fuse
from bench.planner.numbers import ModelPlan, PlannerNumbers, Scaling, SearchTime
from bench.planner.strategies import named_strategies
from cgx_ray.commands.collective import compare_schemes
from cgx_ray.plan import CodecSpec, Option
from cgx_ray.planner.cost import Link
from cgx_ray.planner.fidelity import Fidelity, codecs_of
from cgx_ray.planner.joint import MAX_GAP, BestPlan, best_plan
from cgx_ray.planner.models import MODEL_NAMES
from cgx_ray.planner.options import candidate_options, codec_options, offloaded
from cgx_ray.planner.papers.bytecomp import CodecDevice, TreePath, bytecomp, option_of, path_cost, paths
from cgx_ray.planner.papers.cupcake import cupcake
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES
from cgx_ray.planner.pipeline import GroupCost, Pipeline, cheapest, group_cost, undominated
from cgx_ray.planner.prediction import Measured, forget_work, predict
from cgx_ray.planner.search import search
from cgx_ray.report.show import new_table
from cgx_ray.report.style import (
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    VERMILION,
    add_legend,
    add_title,
    clean,
    new_figure,
    plain_numbers,
    save_figure,
)
from cgx_ray.session.calibrate import Call, best_seconds

MODEL_GBPS = (1.0, 25.0)
JOINT_GBPS = (0.1, 1.0, 10.0, 100.0)
SWEPT_GBPS = 10.0
SWEPT_LAYERS = (10, 20, 50, 100, 200, 314, 500, 1000, 2000)
SWEPT_WORKERS = tuple(1 << exponent for exponent in range(3, 15))
SCALING_GBPS = 3.0
TREE_GBPS = 1.0
# Partial groupings, about 5 s. Cupcake's search of 314 tensors does not end by itself.
CUPCAKE_NODES = 20_000
ROUNDING = 1e-12


def measure_planner(quick: bool, on_part: Callable[[str, float], None]) -> PlannerNumbers:
    """Measure everything in about a minute; `quick` leaves out most parts and all goals.

    on_part  called before each part with its name and the share of the parts that are done
    """
    numbers = PlannerNumbers(quick=quick)
    record = cache(lambda: list(record_gradients()))
    parts: list[tuple[str, Callable[[PlannerNumbers], None]]] = [
        ("tables of Flexible Communication", _tables),
        ("fusion and brute force", _fusion_is_exact),
        ("joint search and brute force", _joint_is_exact),
        *((f"strategies for {model}", partial(_model, model=model)) for model in MODEL_NAMES[: 1 if quick else None]),
        ("planning times", _times),
        ("numbers of layers", _sweep_layers),
        ("numbers of workers", _sweep_workers),
        ("the decision tree", _tree),
    ]
    if not quick:
        parts += [
            ("bits per layer", lambda numbers: numbers.rows.extend(measure_bits(record()))),
            ("gain from a histogram", lambda numbers: numbers.rows.extend(measure_gain(record()))),
        ]
    for index, (what, measure) in enumerate(parts):
        on_part(what, index / len(parts))
        measure(numbers)
    return numbers


def _tables(numbers: PlannerNumbers) -> None:
    columns = {"allgather": "ag_ms", "artopk_ring": "art_ring_ms", "artopk_tree": "art_tree_ms"}
    winners, errors = 0, []
    for row in read_table("flexible_table6"):
        found = compare_schemes(
            numel=int(row["params"]), density=float(row["cr"]), num_workers=int(row["workers"]), link=_link_of(row)
        )
        cells = [(scheme, found.costs_ms[scheme], float(row[column])) for scheme, column in columns.items()]
        winners += found.scheme == min(cells, key=lambda cell: cell[2])[0]
        errors += [abs(math.log(predicted / measured)) for _, predicted, measured in cells]
        numbers.table6 += cells
    numbers.add("table6_winners", winners, "rows", "== 18")
    numbers.add("table6_mean_log_error", statistics.mean(errors), "|log|", "<= 0.03")
    errors = []
    for row in read_table("flexible_table2"):
        found = compare_schemes(
            numel=int(row["params"]), density=0.1, num_workers=int(row["workers"]), link=_link_of(row)
        )
        errors.append(abs(found.costs_ms["dense"] / float(row["dense_ring_ms"]) - 1))
    numbers.add("table2_dense_ring_error", max(errors), "share", "<= 0.05")


def _link_of(row: dict[str, str]) -> Link:
    return Link.from_rates(bandwidth_gbps=float(row["bandwidth_gbps"]), latency_ms=float(row["latency_ms"]))


def _fusion_is_exact(numbers: PlannerNumbers) -> None:
    """Compare fusion with brute force on problems of up to 14 layers."""
    rng, num_cases = random.Random(0), 20 if numbers.quick else 1000
    problems = [random_pipeline(rng, rng.randint(1, 14), 1) for _ in range(num_cases)]
    same = sum(_same(fuse(problem)[1], earliest_finish_s(problem)) for problem in problems)
    numbers.add("fusion_equals_brute_force", same, "cases", "== 1000")


def _joint_is_exact(numbers: PlannerNumbers) -> None:
    """Compare the joint search with brute force on problems of up to 8 layers and 6 options."""
    rng, num_cases = random.Random(0), 10 if numbers.quick else 300
    problems = [random_pipeline(rng, rng.randint(1, 8), 6) for _ in range(num_cases)]
    same = sum(_same(search(problem).finish_s, earliest_finish_s(problem)) for problem in problems)
    numbers.add("joint_equals_brute_force", same, "cases", "== 300")


def _same(found_s: float, expected_s: float) -> bool:
    return math.isclose(found_s, expected_s, rel_tol=ROUNDING)


def _over(seconds: float, best_s: float) -> float:
    """Return the ratio to `best_s`, rounded so that sums of doubles in another order make no difference."""
    return round(seconds / best_s, 9)


def _model(numbers: PlannerNumbers, *, model: str) -> None:
    for gbps in MODEL_GBPS:
        pipeline = model_pipeline(model, gbps)
        joint = search(pipeline)
        strategies = named_strategies(pipeline, dense=DENSE_INDEX, compressing=COMPRESSING, offloaded=OFFLOADED)
        found = ModelPlan(
            model=model,
            gbps=gbps,
            joint_s=joint.finish_s,
            gap=joint.gap,
            strategies_s={name: pipeline.finish_s(groups) for name, groups in strategies.items()},
        )
        numbers.models.append(found)
        best_s = found.strategies_s[found.best_strategy]
        name = f"{model}_{gbps:g}gbps"
        numbers.add(f"{name}_best_strategy_over_joint", _over(best_s, joint.finish_s), "x", ">= 1")
        numbers.add(f"{name}_gap", joint.gap, "share", "<= 0.01")


def _milliseconds(call: Call, num_rounds: int = 5) -> float:
    """Return the time of the fastest of some calls."""
    return 1e3 * best_seconds([call], torch.device("cpu"), num_rounds=num_rounds, turn_s=0)[0]


def _first_plan(measured: Measured, options: Sequence[Option]) -> BestPlan:
    """Return the best plan, as searched for by a planner that knows nothing yet."""
    forget_work()
    return best_plan(measured, options)


def _times(numbers: PlannerNumbers) -> None:
    pipeline = model_pipeline("resnet101", SWEPT_GBPS)
    start = time.perf_counter()
    groups = cupcake(pipeline, QSGD_INDEX, max_nodes=CUPCAKE_NODES)
    numbers.cupcake_ms = 1e3 * (time.perf_counter() - start)
    fusion_ms = _milliseconds(partial(fuse, pipeline, QSGD_INDEX))
    numbers.add("fusion_314_ms", fusion_ms, "ms", "<= 100", baseline=numbers.cupcake_ms)
    found_s = fuse(pipeline, QSGD_INDEX)[1]
    numbers.add("cupcake_314_over_fusion", _over(pipeline.finish_s(groups), found_s), "x", ">= 1")
    options = candidate_options(CANDIDATE_DENSITIES)
    numbers.add("options", len(options), "options")
    for gbps in JOINT_GBPS:
        for ranks_per_node in (1, RANKS_PER_NODE):
            measured = resnet101(cluster(64, gbps=gbps, ranks_per_node=ranks_per_node))
            name = f"joint_314_{gbps:g}gbps_{64 // ranks_per_node}x{ranks_per_node}"
            numbers.add(
                f"{name}_ms", _milliseconds(partial(_first_plan, measured, options), num_rounds=3), "ms", "<= 200"
            )
            numbers.add(f"{name}_gap", best_plan(measured, options).gap, "share", "<= 0.01")
    on_gpus = with_hosts(resnet101(cluster(64, gbps=10, ranks_per_node=1)))
    offload_ms = _milliseconds(partial(_first_plan, on_gpus, (*options, *offloaded(options))), num_rounds=3)
    numbers.add("joint_314_offload_ms", offload_ms, "ms", "<= 200")
    _times_with_bits(numbers)
    network = cluster(64, gbps=10)
    costs = [group_cost(option, network=network, codec_cost=GPU) for option in options]
    calls: list[Call] = [partial(cheapest, costs, 1 << 20)]
    (choice_s,) = best_seconds(calls, torch.device("cpu"), num_rounds=5)
    numbers.add("scheme_choice_us", 1e6 * choice_s, "us", "<= 50")


def _times_with_bits(numbers: PlannerNumbers) -> None:
    """Measure planning with errors by layer and the codecs of fidelity "balanced": qsgd with 2, 3 and 4 bits, bf16."""
    options = codec_options(codecs_of(Fidelity.BALANCED))
    numbers.add("bits_options", len(options), "options")
    for num_layers, most_ms in ((314, 200), (2000, 1000)):
        for gbps in JOINT_GBPS:
            measured = with_bits(longer(resnet101(cluster(64, gbps=gbps)), num_layers))
            name = f"bits_{num_layers}_{gbps:g}gbps"
            planning_ms = _milliseconds(partial(_first_plan, measured, options), num_rounds=3)
            numbers.add(f"{name}_ms", planning_ms, "ms", f"<= {most_ms}")
            found = best_plan(measured, options)
            numbers.add(f"{name}_gap", found.gap, "share", "<= 0.01")
            by_elements = best_plan(replace(measured, squared_errors={}), options).best.groups
            numbers.add(f"{name}_score", found.best.score / predict(measured, by_elements).score, "x by elements")


def _sweep_layers(numbers: PlannerNumbers) -> None:
    """Measure planning times for the layers of ResNet-101, repeated until there are enough."""
    for num_layers in SWEPT_LAYERS[: 3 if numbers.quick else None]:
        pipeline = repeated(model_pipeline("resnet101", SWEPT_GBPS), num_layers)
        rounds = []
        for _ in range(3 if num_layers <= 500 else 1):
            start = time.perf_counter()
            fuse(pipeline, QSGD_INDEX)
            fused = time.perf_counter()
            gap = search(pipeline, max_gap=MAX_GAP).gap
            rounds.append((1e3 * (fused - start), 1e3 * (time.perf_counter() - fused)))
        fusion_ms, joint_ms = (min(column) for column in zip(*rounds, strict=True))
        found = SearchTime(num_layers=num_layers, fusion_ms=fusion_ms, joint_ms=joint_ms, gap=gap)
        numbers.times.append(found)
        numbers.add(f"fusion_{num_layers}_layers_ms", found.fusion_ms, "ms")
        numbers.add(f"joint_{num_layers}_layers_ms", found.joint_ms, "ms")
        numbers.add(f"joint_{num_layers}_layers_gap", found.gap, "share")


def _sweep_workers(numbers: PlannerNumbers) -> None:
    options = candidate_options(CANDIDATE_DENSITIES)
    for ranks_per_node, num_workers in itertools.product(
        (1, RANKS_PER_NODE), SWEPT_WORKERS[: 2 if numbers.quick else None]
    ):
        measured = resnet101(cluster(num_workers, gbps=SCALING_GBPS, ranks_per_node=ranks_per_node))
        start = time.perf_counter()
        plan = _first_plan(measured, options)
        seconds = time.perf_counter() - start
        found = Scaling(num_workers=num_workers, ranks_per_node=ranks_per_node, plan=plan)
        numbers.scaling.append(found)
        name = f"plan_{num_workers // ranks_per_node}x{ranks_per_node}"
        numbers.add(f"{name}_s", seconds, "s", "<= 1")
        numbers.add(f"{name}_efficiency", found.efficiency, "share", baseline=found.dense_efficiency)


def _tree(numbers: PlannerNumbers) -> None:
    """Compare all paths of ByteComp's tree, the engine's paths, and ByteComp's greedy choice, for ResNet-101.

    Quick: for AlexNet, because the greedy choice tries all paths for every tensor.
    """
    network, qsgd = cluster(64, gbps=TREE_GBPS), CodecSpec(name="qsgd")
    found = [(path, path_cost(path, network, qsgd, {CodecDevice.GPU: GPU, CodecDevice.CPU: CPU})) for path in paths()]
    ours = [(path, cost) for path, cost in found if option_of(path, qsgd) is not None]
    numbers.add("tree_paths", len(found), "paths", "== 4341")
    numbers.add("tree_engine_paths", len(ours), "paths")
    layers = model_pipeline("alexnet" if numbers.quick else "resnet101", TREE_GBPS)

    def pipeline(chosen: Sequence[tuple[TreePath, GroupCost]]) -> Pipeline:
        costs = [chosen[index][1] for index in undominated([cost for _, cost in chosen])]
        return Pipeline(backward_s=layers.backward_s, numel=layers.numel, costs=tuple(costs))

    all_paths, engine_paths = pipeline(found), pipeline(ours)
    best, engine_best = search(all_paths, max_gap=MAX_GAP), search(engine_paths, max_gap=MAX_GAP)
    numbers.add("tree_undominated_paths", len(all_paths.costs), "paths")
    numbers.add("tree_best_ms", 1e3 * best.finish_s, "ms")
    numbers.add("tree_engine_over_best", engine_best.finish_s / best.finish_s, "x")
    holds_nothing_up = [index for index, cost in enumerate(all_paths.costs) if cost.compute_s(1) == 0]
    dense = min(holds_nothing_up, key=lambda index: all_paths.costs[index].network_s(1 << 20))
    rest = [index for index in range(len(all_paths.costs)) if index != dense]
    greedy_s = all_paths.finish_s(bytecomp(all_paths, dense=dense, compressing=rest, offloaded={}))
    numbers.add("tree_bytecomp_over_best", _over(greedy_s, best.finish_s), "x", ">= 1")


_HEADINGS = {
    "whole model": "whole",
    "layer-wise": "layers",
    "DDP buckets of 25 MB": "DDP",
    "best of buckets": "buckets",
    "best of even splits": "even",
    "Cupcake": "Cupcake",
    "ByteComp": "Byte-C.",
}


def strategy_table(numbers: PlannerNumbers, gbps: float) -> Table:
    """Return the joint plan of each model, its proven gap, and how many % longer a step takes under each strategy."""
    title = f"8 workers at {gbps:g} Gbit/s: ms per step, gap, % longer"
    names = list(numbers.models[0].strategies_s)
    table = new_table(title, "", "joint", "gap", *(_HEADINGS[name] for name in names), gap=0)
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
    table = new_table(None, "", "value", "unit", "baseline", "goal", "met", gap=0)
    for row in numbers.rows:
        if not row.name.startswith(models) and "_layers_" not in row.name:
            value, baseline = ("" if x is None else f"{x:.4g}" for x in (row.value, row.baseline))
            table.add_row(row.name, value, row.unit, baseline, (row.goal or "")[:9], row.verdict)
    return table


def plot_planner(numbers: PlannerNumbers, path: Path) -> None:
    """Write a picture of four panels."""
    figure = new_figure(13.5, 9.5)
    (table_axes, strategy_axes), (time_axes, scale_axes) = figure.subplots(2, 2)
    _draw_table(table_axes, numbers)
    _draw_strategies(strategy_axes, numbers)
    _draw_times(time_axes, numbers)
    _draw_scaling(scale_axes, numbers)
    for axes in (table_axes, strategy_axes, time_axes, scale_axes):
        clean(axes)
    add_title(figure, "python -m bench planner")
    save_figure(figure, path)


def _draw_table(axes: Axes, numbers: PlannerNumbers) -> None:
    styles = {"allgather": (BLUE, "o"), "artopk_ring": (VERMILION, "s"), "artopk_tree": (GREEN, "^")}
    for scheme, (color, marker) in styles.items():
        cells = [(measured, predicted) for name, predicted, measured in numbers.table6 if name == scheme]
        measured_ms, predicted_ms = zip(*cells, strict=True)
        axes.scatter(measured_ms, predicted_ms, color=color, marker=marker, s=28, label=scheme, zorder=2)
    ends = [min(cell[2] for cell in numbers.table6) / 1.3, max(cell[2] for cell in numbers.table6) * 1.3]
    axes.plot(ends, ends, color=GREY, linewidth=1, zorder=1)
    axes.set(xscale="log", yscale="log", xlabel="measured, ms", ylabel="predicted, ms", xlim=ends, ylim=ends)
    axes.set_title("Cost model and Flexible Communication, table 6")
    plain_numbers(axes.xaxis)
    plain_numbers(axes.yaxis)
    add_legend(axes)


def _draw_strategies(axes: Axes, numbers: PlannerNumbers) -> None:
    """Draw how much longer a step takes than under the joint plan, on the slower network."""
    found = [plan for plan in numbers.models if plan.gbps == MODEL_GBPS[0]]
    colors = {"layer-wise": GREY, "best of buckets": PURPLE, "Cupcake": VERMILION, "ByteComp": BLUE}
    width = 0.8 / len(colors)
    for index, (name, color) in enumerate(colors.items()):
        heights = [100 * (plan.strategies_s[name] / plan.joint_s - 1) for plan in found]
        places = [place + (index - (len(colors) - 1) / 2) * width for place in range(len(found))]
        axes.bar(places, heights, width, color=color, label=name, zorder=2)
    axes.set_xticks(range(len(found)), [plan.model for plan in found], rotation=30, ha="right", fontsize=9)
    axes.set(ylabel="% longer than the joint plan", title=f"A step of 8 workers at {MODEL_GBPS[0]:g} Gbit/s")
    add_legend(axes)


def _draw_times(axes: Axes, numbers: PlannerNumbers) -> None:
    layers = [time.num_layers for time in numbers.times]
    axes.plot(layers, [time.joint_ms for time in numbers.times], "o-", color=BLUE, label="joint search, 6 options")
    axes.plot(layers, [time.fusion_ms for time in numbers.times], "s-", color=GREEN, label="fusion, 1 option")
    axes.plot([314], [numbers.cupcake_ms], "D", color=VERMILION, label="Cupcake's search, ResNet-101")
    axes.set(xscale="log", yscale="log", xlabel="layers", ylabel="ms", title="Time to plan")
    plain_numbers(axes.xaxis)
    plain_numbers(axes.yaxis)
    add_legend(axes)


def _draw_scaling(axes: Axes, numbers: PlannerNumbers) -> None:
    for ranks_per_node, style in ((RANKS_PER_NODE, "o-"), (1, "s--")):
        found = [scaling for scaling in numbers.scaling if scaling.ranks_per_node == ranks_per_node]
        workers, place = [scaling.num_workers for scaling in found], f"{ranks_per_node} per node"
        planned, dense = (
            [100 * share for share in shares]
            for shares in zip(*((scaling.efficiency, scaling.dense_efficiency) for scaling in found), strict=True)
        )
        axes.plot(workers, planned, style, color=BLUE, label=f"planned, {place}")
        axes.plot(workers, dense, style, color=GREY, label=f"dense, {place}")
    axes.set(xlabel="workers", ylabel="% of the progress without communication", ylim=(0, 105))
    axes.set_xscale("log", base=2)
    axes.set_xticks(workers, [f"{count:,}" for count in workers], rotation=45, ha="right")
    axes.set_title(f"Predicted scaling, ResNet-101, {SCALING_GBPS:g} Gbit/s between nodes")
    add_legend(axes)
