"""`cgx-ray plan --clusters`: what priced clusters train per second and per US dollar, as text, picture and JSON."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from cgx_ray.commands.options import console_for
from cgx_ray.commands.plan.clusters import Rental, read_clusters, rent
from cgx_ray.commands.plan.plan_tables import main_option
from cgx_ray.planner.prediction import Prediction
from cgx_ray.report.show import new_table, print_line, progress_bar, write_json
from cgx_ray.untrusted import printable


def answer_for_clusters(path: Path, given: Mapping[str, Any], json_path: str | None, plot: Path | None) -> None:
    """Compare the clusters of a file, and write the picture and JSON that were asked for. `given`: as in `rent`."""
    clusters, console = read_clusters(path), console_for(json_path)
    rentals: list[Rental] = []
    num_rentals = sum(len(cluster.node_counts) for cluster in clusters)
    with progress_bar(console) as on_part:
        for rental in rent(clusters, given):
            rentals.append(rental)
            on_part(rental.cluster.name, len(rentals) / num_rentals)
    assumptions = shared_assumptions(rentals)
    print_line(console, best_buy(rentals), style="bold")
    for line in assumptions:
        print_line(console, f"assumed: {line}", style="dim")
    for table in cluster_tables(rentals):
        console.print(table)
    if plot is not None:
        from cgx_ray.commands.plan.clusters_picture import draw_clusters  # noqa: PLC0415 - the extra plots
        from cgx_ray.report.style import save_figure  # noqa: PLC0415

        save_figure(draw_clusters(rentals, title=f"{given['model']}: dense and planned gradients for rent"), plot)
        print_line(console, f"picture: {plot}")
    if json_path is not None:
        rows = [_describe(rental) for rental in rentals]
        write_json(json_path, {"best_buy": best_buy(rentals), "assumptions": assumptions, "rows": rows})


def shared_assumptions(rentals: Sequence[Rental]) -> list[str]:
    """Return the assumptions, each once; those of some clusters only begin with the clusters' names."""
    clusters_of: dict[str, dict[str, None]] = {}
    for rental in rentals:
        for line in rental.question.assumptions:
            clusters_of.setdefault(line, {})[printable(rental.cluster.name)] = None
    num_clusters = len({rental.cluster.name for rental in rentals})
    return [
        line if len(names) == num_clusters else f"{', '.join(names)}: {line}" for line, names in clusters_of.items()
    ]


def best_buy(rentals: Sequence[Rental]) -> str:
    """Return in one sentence what trains the most per US dollar; a planned sample counts with the share it keeps."""
    dense = max(rentals, key=lambda rental: rental.samples_per_usd(rental.answer.dense))
    planned = max(rentals, key=lambda rental: rental.kept * rental.samples_per_usd(rental.answer.best))
    for_dense = dense.samples_per_usd(dense.answer.dense)
    ratio = planned.kept * planned.samples_per_usd(planned.answer.best) / for_dense
    said = f"Most per US dollar: dense {_named(dense)}, {for_dense:,.0f} samples"
    if planned.answer.speedup == 1:
        return f"{said}; no plan brings more."
    return f"{said}; planned {_named(planned)}, {ratio:.2f}x as much progress."


def _named(rental: Rental) -> str:
    return f"{rental.num_nodes} x {printable(rental.cluster.name)}"


def cluster_tables(rentals: Iterable[Rental]) -> Iterator[Table]:
    """Yield a table per cluster: for each number of nodes a row of dense gradients, and one of a better plan if any."""
    for name, own in itertools.groupby(rentals, key=lambda rental: rental.cluster.name):
        columns = ("nodes", "GPUs", "USD/h", "samples/s", "samples/USD", "h/epoch", "USD/epoch", "kept")
        table = new_table(printable(name), "gradients", *columns, gap=0)
        for rental in own:
            sizes = (str(rental.num_nodes), str(rental.num_workers), f"{rental.usd_per_hour:.2f}")
            table.add_row("dense", *sizes, *_cells(rental, rental.answer.dense), "100%")
            best = rental.answer.best
            if best.groups != rental.answer.dense.groups:
                table.add_row(_codec(best), "", "", "", *_cells(rental, best), f"{rental.kept:.1%}")
        yield table


def _codec(step: Prediction) -> str:
    """Return the codec of most bytes with its first parameter, such as "qsgd:bits=4": a table has little room."""
    return str(main_option(step).codec).partition(",")[0]


def _cells(rental: Rental, step: Prediction) -> Iterator[str]:
    epoch = rental.epoch(step)
    yield from map(_short, (rental.samples_per_s(step), rental.samples_per_usd(step)))
    yield from ("", "") if epoch is None else map(_short, epoch)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _describe(rental: Rental) -> dict[str, Any]:
    """Return a row for JSON."""
    answer = rental.answer
    return {
        "cluster": rental.cluster.name,
        "num_nodes": rental.num_nodes,
        "num_workers": rental.num_workers,
        "usd_per_hour": rental.usd_per_hour,
        "dense": _describe_step(rental, answer.dense),
        "planned": _describe_step(rental, answer.best),
        "kept": rental.kept,
        "speedup": answer.speedup,
        "options": answer.best.describe(),
    }


def _describe_step(rental: Rental, step: Prediction) -> dict[str, Any]:
    epoch = rental.epoch(step)
    return {
        "step_ms": 1e3 * step.step_s,
        "bound_by": step.bound_by,
        "samples_per_s": rental.samples_per_s(step),
        "samples_per_usd": rental.samples_per_usd(step),
        "epoch": None if epoch is None else epoch._asdict(),
    }
