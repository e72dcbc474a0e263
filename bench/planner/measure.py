"""`python -m bench planner`: checks against brute force and tables of papers, planning times, and predicted scaling."""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch

from bench.planner.bits import measure_bits, measure_gain, record_gradients
from bench.planner.cases import (
    COMPRESSING,
    DENSE_INDEX,
    GPU,
    OFFLOADED,
    QSGD_INDEX,
    RANKS_PER_NODE,
    cluster,
    earliest_finish_s,
    longer,
    model_pipeline,
    over,
    random_pipeline,
    read_table,
    repeated,
    resnet101,
    with_bits,
    with_hosts,
)
from bench.planner.fusion import fuse
from bench.planner.strategies import named_strategies
from bench.planner.tree import crippled_rows, tree_rows
from bench.shared.picture import Line, Plot
from bench.shared.runner import BenchRun, OnPart, bench_command
from cgx_ray.commands.collective import compare_schemes
from cgx_ray.plan import Option
from cgx_ray.planner.candidates import candidate_options, codec_options, offloaded
from cgx_ray.planner.cost import Link
from cgx_ray.planner.fidelity import Fidelity, codecs_of
from cgx_ray.planner.joint import MAX_GAP, BestPlan, best_plan
from cgx_ray.planner.models import MODEL_NAMES
from cgx_ray.planner.papers.cupcake import cupcake
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES
from cgx_ray.planner.pipeline import cheapest, group_cost
from cgx_ray.planner.prediction import Measured, forget_work, predict
from cgx_ray.planner.search import search
from cgx_ray.report.result import Row
from cgx_ray.session.calibrate import Call, best_seconds

MODEL_GBPS = (1.0, 25.0)
JOINT_GBPS = (0.1, 1.0, 10.0, 100.0)
SWEPT_GBPS = 10.0
SWEPT_LAYERS = (10, 20, 50, 100, 200, 314, 500, 1000, 2000)
SWEPT_WORKERS = tuple(1 << exponent for exponent in range(3, 15))
SCALING_GBPS = 3.0
# Partial groupings: half a minute for 314 layers where Cupcake's search does not end by itself; and of a short check.
CUPCAKE_NODES, QUICK_CUPCAKE_NODES = 100_000, 2_000
# The same where it goes without one of its insights.
INSIGHTS_NODES = 20_000
CUPCAKE_GBPS, CUPCAKE_LAYERS = (1.0, 10.0, 25.0), (20, 28, 40, 56, 80, 160, 314)
ROUNDING = 1e-12


@dataclass(slots=True)
class PlannerNumbers:
    """Rows and panels. `longer`: % that a step takes longer than the joint plan, by strategy and model."""

    quick: bool
    rows: list[Row] = field(default_factory=list)
    panels: list[Plot] = field(default_factory=list)
    longer: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def cupcake_nodes(self) -> int:
        """Partial groupings after which Cupcake's search is cut."""
        return QUICK_CUPCAKE_NODES if self.quick else CUPCAKE_NODES

    def add_row(
        self, name: str, value: float, unit: str, goal: str | None = None, baseline: float | None = None
    ) -> None:
        self.rows.append(Row(name=name, value=value, unit=unit, goal=None if self.quick else goal, baseline=baseline))

    def value(self, name: str) -> float:
        """Return the value of a row."""
        (found,) = (row.value for row in self.rows if row.name == name)
        assert found is not None
        return found


@bench_command(quick="A short check: few cases, small models, no goals.", picture="planner.png")
def planner(run: BenchRun) -> Iterable[Row]:
    """Check that plans are optimal, and time the planner.

    Compares with brute force and with strategies of the literature, for up to 16,384 workers.
    """
    numbers = PlannerNumbers(quick=run.quick)
    measure_planner(numbers, run.on_part)
    run.panels += numbers.panels
    shown = [
        Line(label=name, x=list(by_model), y=list(by_model.values()), style="o")
        for name, by_model in numbers.longer.items()
    ]
    title = f"A step of 8 workers at {MODEL_GBPS[0]:g} Gbit/s"
    run.panels.append(Plot(title=title, x="", y="% longer than the joint plan", lines=shown))
    return numbers.rows


def measure_planner(numbers: PlannerNumbers, on_part: OnPart) -> None:
    """Measure everything in about two minutes; quick ones leave out most parts and all goals."""
    record = cache(lambda: list(record_gradients()))
    models = MODEL_NAMES[: 1 if numbers.quick else None]
    parts: list[tuple[str, Callable[[PlannerNumbers], None]]] = [
        ("tables of Flexible Communication", _tables),
        ("fusion and brute force", _fusion_is_exact),
        ("joint search and brute force", _joint_is_exact),
        *((f"strategies for {model}", partial(_model, model=model)) for model in models),
        ("planning times", _times),
        ("numbers of layers", _sweep_layers),
        ("Cupcake's search", _cupcake_ends),
        ("Cupcake's insights", _insights),
        ("numbers of workers", _sweep_workers),
        ("the decision tree", lambda numbers: numbers.rows.extend(tree_rows(quick=numbers.quick))),
        ("the tree with less of it", lambda numbers: numbers.rows.extend(crippled_rows())),
    ]
    if not numbers.quick:
        parts += [
            ("bits per layer", lambda numbers: numbers.rows.extend(measure_bits(record()))),
            ("gain from a histogram", lambda numbers: numbers.rows.extend(measure_gain(record()))),
        ]
    for index, (what, measure) in enumerate(parts):
        on_part(what, index / len(parts))
        measure(numbers)


def _tables(numbers: PlannerNumbers) -> None:
    columns = {"allgather": "ag_ms", "artopk_ring": "art_ring_ms", "artopk_tree": "art_tree_ms"}
    winners, errors, points = 0, [], []
    for row in read_table("flexible_table6"):
        found = compare_schemes(
            numel=int(row["params"]), density=float(row["cr"]), num_workers=int(row["workers"]), link=_link_of(row)
        )
        cells = [(scheme, found.costs_ms[scheme], float(row[column])) for scheme, column in columns.items()]
        winners += found.scheme == min(cells, key=lambda cell: cell[2])[0]
        errors += [abs(math.log(predicted / measured)) for _, predicted, measured in cells]
        points += cells
    lines = [
        Line(
            label=scheme,
            x=[measured for name, _, measured in points if name == scheme],
            y=[predicted for name, predicted, _ in points if name == scheme],
            style="o",
        )
        for scheme in columns
    ]
    ends = [min(point[2] for point in points), max(point[2] for point in points)]
    lines.append(Line(label="as measured", x=ends, y=ends, style=":"))
    title = "Flexible Communication, table 6"
    numbers.panels.append(Plot(title=title, x="measured, ms", y="predicted, ms", lines=lines, log="xy"))
    numbers.add_row("table6_winners", winners, "rows", "== 27")
    numbers.add_row("table6_mean_log_error", statistics.mean(errors), "|log|", "<= 0.03")
    errors = []
    for row in read_table("flexible_table2"):
        found = compare_schemes(
            numel=int(row["params"]), density=0.1, num_workers=int(row["workers"]), link=_link_of(row)
        )
        errors.append(abs(found.costs_ms["dense"] / float(row["dense_ring_ms"]) - 1))
    numbers.add_row("table2_dense_ring_error", max(errors), "share", "<= 0.05")


def _link_of(row: dict[str, str]) -> Link:
    return Link.from_rates(bandwidth_gbps=float(row["bandwidth_gbps"]), latency_ms=float(row["latency_ms"]))


def _fusion_is_exact(numbers: PlannerNumbers) -> None:
    """Compare fusion with brute force on problems of up to 14 layers."""
    rng, num_cases = random.Random(0), 20 if numbers.quick else 1000
    problems = [random_pipeline(rng, rng.randint(1, 14), 1) for _ in range(num_cases)]
    same = sum(_same(fuse(problem)[1], earliest_finish_s(problem)) for problem in problems)
    numbers.add_row("fusion_equals_brute_force", same, "cases", "== 1000")


def _joint_is_exact(numbers: PlannerNumbers) -> None:
    """Compare the joint search with brute force on problems of up to 8 layers and 6 options."""
    rng, num_cases = random.Random(0), 10 if numbers.quick else 300
    problems = [random_pipeline(rng, rng.randint(1, 8), 6) for _ in range(num_cases)]
    same = sum(_same(search(problem).finish_s, earliest_finish_s(problem)) for problem in problems)
    numbers.add_row("joint_equals_brute_force", same, "cases", "== 300")


def _same(found_s: float, expected_s: float) -> bool:
    return math.isclose(found_s, expected_s, rel_tol=ROUNDING)


def _model(numbers: PlannerNumbers, *, model: str) -> None:
    for gbps in MODEL_GBPS:
        pipeline = model_pipeline(model, gbps)
        joint = search(pipeline)
        strategies = named_strategies(pipeline, dense=DENSE_INDEX, compressing=COMPRESSING, offloaded=OFFLOADED)
        strategies_s = {name: pipeline.finish_s(groups) for name, groups in strategies.items()}
        best_s = min(strategies_s.values())
        if gbps == MODEL_GBPS[0]:
            for label, seconds in strategies_s.items():
                numbers.longer.setdefault(label, {})[model] = 100 * (seconds / joint.finish_s - 1)
        name = f"{model}_{gbps:g}gbps"
        numbers.add_row(f"{name}_best_strategy_over_joint", over(best_s, joint.finish_s), "x", ">= 1")
        numbers.add_row(f"{name}_gap", joint.gap, "share", "<= 0.01")


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
    groups, has_ended = cupcake(pipeline, QSGD_INDEX, max_nodes=numbers.cupcake_nodes)
    cupcake_ms = 1e3 * (time.perf_counter() - start)
    fusion_ms = _milliseconds(partial(fuse, pipeline, QSGD_INDEX))
    numbers.add_row("fusion_314_ms", fusion_ms, "ms", "<= 100", baseline=cupcake_ms)
    found_s = fuse(pipeline, QSGD_INDEX)[1]
    unit = "x" if has_ended else f"x, cut at {numbers.cupcake_nodes:,} groupings"
    numbers.add_row("cupcake_314_over_fusion", over(pipeline.finish_s(groups), found_s), unit, ">= 1")
    options = candidate_options(CANDIDATE_DENSITIES)
    numbers.add_row("options", len(options), "options")
    for gbps in JOINT_GBPS:
        for ranks_per_node in (1, RANKS_PER_NODE):
            measured = resnet101(cluster(64, gbps=gbps, ranks_per_node=ranks_per_node))
            name = f"joint_314_{gbps:g}gbps_{64 // ranks_per_node}x{ranks_per_node}"
            numbers.add_row(
                f"{name}_ms", _milliseconds(partial(_first_plan, measured, options), num_rounds=3), "ms", "<= 200"
            )
            numbers.add_row(f"{name}_gap", best_plan(measured, options).gap, "share", "<= 0.01")
    on_gpus = with_hosts(resnet101(cluster(64, gbps=10, ranks_per_node=1)))
    offload_ms = _milliseconds(partial(_first_plan, on_gpus, (*options, *offloaded(options))), num_rounds=3)
    numbers.add_row("joint_314_offload_ms", offload_ms, "ms", "<= 200")
    _times_with_bits(numbers)
    network = cluster(64, gbps=10)
    costs = [group_cost(option, network=network, codec_cost=GPU) for option in options]
    calls: list[Call] = [partial(cheapest, costs, 1 << 20)]
    (choice_s,) = best_seconds(calls, torch.device("cpu"), num_rounds=5)
    numbers.add_row("scheme_choice_us", 1e6 * choice_s, "us", "<= 50")


def _times_with_bits(numbers: PlannerNumbers) -> None:
    """Measure planning with errors by layer and the codecs of fidelity "fast" but top-k: qsgd and bf16."""
    options = codec_options(codecs_of(Fidelity.FAST))
    numbers.add_row("bits_options", len(options), "options")
    for num_layers, most_ms in ((314, 200), (2000, 1000)):
        for gbps in JOINT_GBPS:
            measured = with_bits(longer(resnet101(cluster(64, gbps=gbps)), num_layers))
            name = f"bits_{num_layers}_{gbps:g}gbps"
            planning_ms = _milliseconds(partial(_first_plan, measured, options), num_rounds=3)
            numbers.add_row(f"{name}_ms", planning_ms, "ms", f"<= {most_ms}")
            found = best_plan(measured, options)
            numbers.add_row(f"{name}_gap", found.gap, "share", "<= 0.01")
            by_elements = best_plan(replace(measured, squared_errors={}), options).best.groups
            numbers.add_row(f"{name}_score", found.best.score / predict(measured, by_elements).score, "x by elements")


def _sweep_layers(numbers: PlannerNumbers) -> None:
    """Measure planning times for the layers of ResNet-101, repeated until there are enough."""
    swept = SWEPT_LAYERS[: 3 if numbers.quick else None]
    for num_layers in swept:
        pipeline = repeated(model_pipeline("resnet101", SWEPT_GBPS), num_layers)
        rounds = []
        for _ in range(3 if num_layers <= 500 else 1):
            start = time.perf_counter()
            fuse(pipeline, QSGD_INDEX)
            fused = time.perf_counter()
            gap = search(pipeline, max_gap=MAX_GAP).gap
            rounds.append((1e3 * (fused - start), 1e3 * (time.perf_counter() - fused)))
        fusion_ms, joint_ms = (min(column) for column in zip(*rounds, strict=True))
        numbers.add_row(f"fusion_{num_layers}_layers_ms", fusion_ms, "ms")
        numbers.add_row(f"joint_{num_layers}_layers_ms", joint_ms, "ms")
        numbers.add_row(f"joint_{num_layers}_layers_gap", gap, "share")
    lines = [
        Line(label=label, x=swept, y=[numbers.value(f"{search}_{num_layers}_layers_ms") for num_layers in swept])
        for search, label in (("joint", "joint search, 6 options"), ("fusion", "fusion, 1 option"))
    ]
    numbers.panels.append(Plot(title="Time to plan", x="layers", y="ms", lines=lines, log="xy"))


def _cupcake_ends(numbers: PlannerNumbers) -> None:
    """Find the most layers of ResNet-101 for which Cupcake's search ends before CUPCAKE_NODES groupings."""
    for gbps in CUPCAKE_GBPS:
        pipelines = [repeated(model_pipeline("resnet101", gbps), num_layers) for num_layers in CUPCAKE_LAYERS]
        ended = itertools.takewhile(lambda one: cupcake(one, QSGD_INDEX, max_nodes=numbers.cupcake_nodes)[1], pipelines)
        most = max((one.num_layers for one in ended), default=0)
        numbers.add_row(f"cupcake_ends_up_to_{gbps:g}gbps", most, f"layers of {CUPCAKE_LAYERS[-1]}")


def _insights(numbers: PlannerNumbers) -> None:
    """Time Cupcake's search with both of its insights, one and none, where it ends with both (its table 1)."""
    num_nodes = QUICK_CUPCAKE_NODES if numbers.quick else INSIGHTS_NODES
    for model in ("resnet50", "resnet101", "bert_base")[: 1 if numbers.quick else None]:
        pipeline = model_pipeline(model, CUPCAKE_GBPS[0])
        for insights in ((1, 2), (1,), (2,), ()):
            start = time.perf_counter()
            _, has_ended = cupcake(pipeline, QSGD_INDEX, num_nodes, insights)
            cut = "" if has_ended else f", cut at {num_nodes:,} groupings"
            name = f"cupcake_{model}_insights_{'_'.join(map(str, insights)) or 'none'}"
            numbers.add_row(name, 1e3 * (time.perf_counter() - start), f"ms{cut}")


def _sweep_workers(numbers: PlannerNumbers) -> None:
    options = candidate_options(CANDIDATE_DENSITIES)
    swept, lines = SWEPT_WORKERS[: 2 if numbers.quick else None], []
    for ranks_per_node in (1, RANKS_PER_NODE):
        for num_workers in swept:
            measured = resnet101(cluster(num_workers, gbps=SCALING_GBPS, ranks_per_node=ranks_per_node))
            start = time.perf_counter()
            plan = _first_plan(measured, options)
            seconds = time.perf_counter() - start
            name = f"plan_{num_workers // ranks_per_node}x{ranks_per_node}"
            numbers.add_row(f"{name}_s", seconds, "s", "<= 1")
            # Shares of the progress without any communication; what compression loses is left out.
            planned, dense = plan.best.compute_s / plan.best.score, plan.dense.compute_s / plan.dense.step_s
            numbers.add_row(f"{name}_efficiency", planned, "share", baseline=dense)
        rows = [row for row in numbers.rows if row.name.endswith(f"x{ranks_per_node}_efficiency")]
        for label, shares in (("planned", [row.value for row in rows]), ("dense", [row.baseline for row in rows])):
            y = [100 * share for share in shares if share is not None]
            lines.append(Line(label=f"{label}, {ranks_per_node} per node", x=swept, y=y))
    title = f"Predicted scaling, ResNet-101, {SCALING_GBPS:g} Gbit/s between nodes"
    numbers.panels.append(Plot(title=title, x="workers", y="% of the progress alone", lines=lines, log="x"))
