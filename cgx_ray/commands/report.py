"""`cgx-ray report`: a page and a picture of a run, or of several runs beside each other, from their files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

from cgx_ray.commands.options import FILE, PICTURE, RunFolder, check_plots, console_for, json_option, plot_option
from cgx_ray.control.journal.sentences import RunTotals
from cgx_ray.errors import ConfigError
from cgx_ray.report.live_view import broken_note, fault_note
from cgx_ray.report.record import RunRecord, load_run
from cgx_ray.report.run_facts import (
    SpeedUp,
    between_share,
    counted_steps,
    dense_of,
    last_loss,
    left_out_steps,
    loss_note,
    mean_step_s,
    num_changes,
    prediction_errors,
    spans,
    world_size,
)
from cgx_ray.report.show import print_line, whole_file, write_json
from cgx_ray.units import format_count


@click.command()
@click.argument("run_dir", metavar="RUN", type=RunFolder(path_type=Path))
@click.option(
    "--events",
    type=click.Path(path_type=Path),
    help="File that `lab run --events` wrote.  [default: network.jsonl in RUN, if any]",
)
@click.option("--html", type=FILE, show_default="report.html in RUN", help="File of the page.")
@click.option("--price", type=click.FloatRange(min=0), help="US dollars per hour and worker, for the cost of the run.")
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@json_option("verdict, plan, times and expected loss of each run")
@plot_option(None, shown="report.png in RUN")
def report(
    run_dir: Path,
    events: Path | None,
    html: Path | None,
    price: float | None,
    opens: bool,
    json_path: str | None,
    plot: Path | None,
) -> None:
    """Explain a run: where its time went, its decisions and predictions, and what to try next.

    RUN is the folder <storage path>/<run name> of a run with CGXConfig, or its journal decisions.jsonl, or a folder of
    several runs, such as a demo's, which are compared. Training may still go on. Prints the verdict; writes a page that
    works offline, and a picture.
    """
    folder, console = run_dir.resolve(), console_for(json_path)
    check_plots()
    records = _read_runs(folder, events)
    # Several runs: to the folder that holds them. Of another user's run the report goes to the current folder.
    place = records[0].run_dir if len(records) == 1 else folder
    place = place if os.access(place, os.W_OK | os.X_OK) else Path()
    html = html or FILE.convert(place / "report.html", None, None)
    plot = plot or PICTURE.convert(place / "report.png", None, None)
    from cgx_ray.report.picture import plot_runs  # noqa: PLC0415 - the extra plots, see `check_plots`

    dense, decided = dense_of(records), [record for record in records if record.has_journal]
    for record in decided:
        name = f"{record.name}: " if len(decided) > 1 else ""
        print_line(console, f"cgx_ray: {name}{verdict(record, dense)}.", style="bold")
    ranks = world_size(records[-1])
    plot_runs(records, plot, title=f"{folder.name}: {ranks} workers" if ranks is not None else folder.name)
    write_page(html, folder.name, records, usd_per_hour=price)
    for record in records:
        name = f"{record.name}: " if len(records) > 1 else ""
        clipped = [f"{name}{record.clipped}"] if record.clipped else []
        faults = [f"{name}{note}" for note in fault_note(record.faults)]
        for note in (*faults, *broken_note(record.broken), *record.cut, *clipped):
            print_line(console, note)
    for note in loss_note(*records):
        print_line(console, note)
    counts = [f"{_decisions_of(decided)}; "] if decided else []
    print_line(console, f"{''.join(counts)}picture: {plot}; report: {html}")
    if json_path is not None:
        write_json(json_path, {"runs": [describe_run(record, dense) for record in records]})
    if opens:
        click.launch(html.resolve().as_uri())


def totals_of(record: RunRecord) -> RunTotals:
    """Return the sums over the run's steps that its verdict is made of."""
    totals = RunTotals()
    for line in sorted((*record.starts, *record.decisions, *record.progress), key=lambda line: line["time"]):
        totals.add_line(line)
    # Where the journal ends before the run, its steps show the plan.
    reported = record.progress[-1]["step"] if record.progress else -1
    for step in record.steps:
        if step.step > reported and step.plan_version is not None:
            totals.add_version(step.step, step.plan_version)
    return totals


def verdict(record: RunRecord, dense: RunRecord | None) -> str:
    """Return what the run has brought, beside the run `dense` if there is one; "" for one without a journal."""
    return totals_of(record).verdict(_beside(record, dense)) if record.has_journal else ""


def speed_up(record: RunRecord, dense: RunRecord | None) -> SpeedUp | None:
    """Return the speed-up of all steps against dense ones: of the run `dense`, else of the run itself.

    The time between steps is in neither side.
    """
    totals, beside = totals_of(record), _beside(record, dense)
    if dense is not None and beside is not None:
        step_s, dense_s = beside
        same = sum(span.num_steps for span in spans(record)) == sum(span.num_steps for span in spans(dense))
        note = "" if same else "; the two did not train the same number of steps"
        known_by = f"measured: the mean step of the run {dense.name!r} took {dense_s:.3g} s{note}"
        return SpeedUp(ratio=dense_s / step_s, dense_s=dense_s, is_predicted=False, known_by=known_by)
    if totals.speed_up is None:
        return None
    known_by = "measured: all steps were dense"
    if totals.is_predicted:
        known_by = "predicted by the model of the measured link, so no speed-up is named"
    elif totals.in_dense_s < totals.all_s:
        known_by = f"measured: against {format_count(totals.num_in_dense, 'dense step')} of this run"
    mean_s = mean_step_s(spans(record))
    return SpeedUp(
        ratio=totals.speed_up,
        dense_s=mean_s * totals.speed_up if mean_s is not None else None,
        is_predicted=totals.is_predicted,
        known_by=known_by,
    )


def _beside(record: RunRecord, dense: RunRecord | None) -> tuple[float, float] | None:
    """Return the mean seconds of a step of both, None without `dense`."""
    if dense is None or dense is record:
        return None
    step_s, dense_s = mean_step_s(spans(record)), mean_step_s(spans(dense))
    return (step_s, dense_s) if step_s and dense_s else None


def describe_run(record: RunRecord, dense: RunRecord | None = None) -> dict[str, Any]:
    """Return the run for JSON. `dense`: a run without compression beside it."""
    totals, found, gained = totals_of(record), spans(record), speed_up(record, dense)
    errors = prediction_errors(record)
    return {
        "name": record.name,
        "verdict": verdict(record, dense) if record.has_journal else None,
        "plan": totals.plan if record.has_journal else None,
        "since_step": totals.since if record.has_journal else None,
        "num_steps": sum(span.num_steps for span in found),
        "counted_steps": counted_steps(record),
        "left_out_steps": left_out_steps(record),
        "step_s": mean_step_s(found),
        "between_share": between_share(found),
        "dense_step_s": gained.dense_s if gained is not None else None,
        "speed_up": gained.ratio if gained is not None else None,
        "is_predicted": gained is not None and gained.is_predicted,
        "num_dense_steps": totals.num_in_dense,
        "expected_loss": totals.expected_loss,
        "loss": last_loss(record),
        "validation_loss": record.end["validation_loss"] if record.end is not None else None,
        "num_decisions": len(record.decisions),
        "num_new_plans": num_changes(record),
        "prediction_error": median(map(abs, errors)) if errors else None,
    }


def _decisions_of(records: Sequence[RunRecord]) -> str:
    of_runs = f"{len(records)} runs with " if len(records) > 1 else ""
    num_decisions = sum(len(record.decisions) for record in records)
    return f"{of_runs}{format_count(num_decisions, 'decision')}, {sum(map(num_changes, records))} for another plan"


def write_page(path: Path, title: str, records: Sequence[RunRecord], *, usd_per_hour: float | None = None) -> None:
    """Write the report of `records` as one HTML file."""
    from cgx_ray.commands.plan.decision_steps import decision_steps  # noqa: PLC0415 - the extra plots
    from cgx_ray.report.run_page import Extras, report_page  # noqa: PLC0415

    extras = Extras(usd_per_hour=usd_per_hour, timelines=decision_steps, verdict=verdict, speed_up=speed_up)
    with whole_file(path) as new:
        new.write_text(report_page(title, records, extras), encoding="utf-8")


def _read_runs(folder: Path, events: Path | None) -> list[RunRecord]:
    """Return the run in `folder`, or the runs below it, dense first. The last one has decisions."""
    if not folder.is_dir():
        problem = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
        raise ConfigError(f"{problem}; give the folder of a run, <storage path>/<run name>, or of several")
    record = load_run(folder, events)
    records = [record]
    if not record.has_journal:
        records = _runs_below(folder, events)
    if not records or not (records[-1].decisions or spans(records[-1])):
        skipped = "".join(f"; {note}" for note in broken_note(record.broken))
        raise ConfigError(
            f"{folder} holds no decision and no step, neither in decisions.jsonl, which a run with CGXConfig writes, "
            "nor in a folder below it, such as a demo's adaptive/decisions.jsonl. With a remote storage path, "
            f"decisions.jsonl is in ~/ray_results/<run name> on the node of Ray's train controller{skipped}"
        )
    if events is not None and not records[-1].network:
        raise ConfigError(f"{events} holds no links; give the file that `cgx-ray lab run --events` wrote")
    return records


def _runs_below(folder: Path, events: Path | None) -> list[RunRecord]:
    """Return the runs in the folders of `folder`: dense first, then those without decisions, then by name.

    Runs that wrote no steps cannot be compared over steps; of those, only the last one with decisions is returned.
    """
    found = [
        load_run(path, events if path.name != "dense" else None) for path in sorted(folder.iterdir()) if path.is_dir()
    ]
    found = [record for record in found if spans(record) or record.decisions]
    found.sort(key=lambda record: (record.name != "dense", bool(record.decisions), record.name))
    return found if all(spans(record) for record in found) else found[-1:]
