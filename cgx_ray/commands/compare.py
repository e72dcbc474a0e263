"""`cgx-ray compare`: two runs side by side, from their journals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from cgx_ray.commands.options import RunFolder, console_for, json_option
from cgx_ray.commands.report import describe_run, totals_of
from cgx_ray.control.journal.sentences import DENSE
from cgx_ray.errors import ConfigError
from cgx_ray.report.record import RunRecord, load_run
from cgx_ray.report.run_facts import loss_note, losses, num_changes, spans
from cgx_ray.report.show import new_table, print_line, write_json
from cgx_ray.units import format_count, format_seconds
from cgx_ray.untrusted import printable

_LOSS = "loss at the end"
_FOLDER = RunFolder(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.argument("first", metavar="A", type=_FOLDER)
@click.argument("second", metavar="B", type=_FOLDER)
@json_option("both runs, and the ratio of their step times")
def compare(first: Path, second: Path, json_path: str | None) -> None:
    """Compare two runs: time per step, loss and plans side by side.

    A and B are folders of runs, or their journals: each has decisions.jsonl or steps.jsonl. They should have trained
    the same model. Losses are means over the last steps that both have. If one run was dense throughout, the other's
    dense steps are those of that run.
    """
    records = [_read(folder) for folder in (first, second)]
    dense = next((record for record in records if _is_dense(record)), None)
    found = [describe_run(record, dense) for record in records]
    loss_steps = _compare_losses(records, found)
    (one, other), console = found, console_for(json_path)
    ratio = one["step_s"] / other["step_s"] if other["step_s"] else None
    if ratio is not None:
        faster = f"{max(ratio, 1 / ratio):.2f}x {'faster' if ratio > 1 else 'slower'} than"
        said = "as fast as" if round(ratio, 2) == 1 else faster
        print_line(console, f"a step of {other['name']} is {said} one of {one['name']}", style="bold")
    table = new_table(None, "", *(printable(run["name"]) for run in found), wrap=True)
    # Perhaps on another network.
    rows = _ROWS | {"a dense step": _seconds("dense_step_s", partial(_known_by, dense=dense))}
    for name, show in rows.items():
        heading = _loss_at(*loss_steps) if name == _LOSS and loss_steps is not None else name
        table.add_row(heading, *(show(run) for run in found))
    console.print(table)
    for note in (*loss_note(*records), *_model_note(records)):
        print_line(console, note)
    if json_path is not None:
        write_json(json_path, {"runs": found, "step_ratio": ratio, "loss_steps": loss_steps})


def _read(folder: Path) -> RunRecord:
    record = load_run(folder.resolve())
    if not spans(record):
        raise ConfigError(f"{folder} holds no step: give the folder of a run, with its decisions.jsonl or steps.jsonl")
    return record


def _is_dense(record: RunRecord) -> bool:
    """Return whether all steps of the run were dense. Plain DDP writes no journal."""
    plans = {step.plan for step in record.steps} or {totals_of(record).plan}
    return plans == {DENSE} and not num_changes(record)


def _compare_losses(records: Sequence[RunRecord], found: Sequence[dict[str, Any]]) -> tuple[int, int] | None:
    """Make the losses of `found` means over the same steps, the last that all have, and return the first and the last.

    These are the steps of one line of the run whose lines have most steps each. None if there are no such steps.
    """
    known = [losses(record) for record in records]
    if not all(known):
        return None
    end = min(lines[-1][1] for lines in known)
    longest = min(known, key=len)
    window = next(((first, last) for first, last, _ in reversed(longest) if last <= end), None)
    if window is None:
        return None
    for run, lines in zip(found, known, strict=True):
        run["loss"] = _mean_loss(lines, *window)
    return window


def _model_note(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """Return a line that the runs have gradients of different sizes, if they do."""
    sizes = [round(record.progress[-1].get("dense_bytes", 0)) for record in records if record.progress]
    if len(sizes) < len(records) or len({*sizes}) == 1 or not all(sizes):
        return ()
    of_runs = " and ".join(f"{size / 1e6:.6g} MB" for size in sizes)
    return (f"the two may not have trained the same model: a rank's gradients have {of_runs}",)


def _loss_at(first: int, last: int) -> str:
    return f"loss at step {last}" if first == last else f"loss, steps {first} to {last}"


def _mean_loss(lines: Sequence[tuple[int, int, float]], first: int, last: int) -> float | None:
    """Return the mean loss of the steps from `first` to `last`, from lines with a mean over some steps each."""
    parts = [(min(last, end) - max(first, begin) + 1, loss) for begin, end, loss in lines]
    num_steps = sum(num for num, _ in parts if num > 0)
    return sum(num * loss for num, loss in parts if num > 0) / num_steps if num_steps else None


def _seconds(name: str, known_by: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], str]:
    return lambda run: f"{format_seconds(run[name])} ({known_by(run)})" if run[name] is not None else "-"


def _number(name: str, form: str) -> Callable[[dict[str, Any]], str]:
    return lambda run: format(run[name], form) if run[name] is not None else "-"


def _known_by(run: dict[str, Any], dense: RunRecord | None = None) -> str:
    if dense is not None and run["name"] != dense.name:
        return f"that of {printable(dense.name)}"
    return "predicted" if run["is_predicted"] else f"by {format_count(run['num_dense_steps'], 'step')}"


_ROWS: dict[str, Callable[[dict[str, Any]], str]] = {
    "steps that count": lambda run: f"{run['num_steps']}: {run['counted_steps']}",
    "steps left out": lambda run: run["left_out_steps"] or "-",
    "time per step": _seconds("step_s", lambda run: "measured"),
    "of the time between steps": _number("between_share", ".0%"),
    "a dense step": _seconds("dense_step_s", _known_by),
    _LOSS: _number("loss", ".4g"),
    "validation loss at the end": _number("validation_loss", ".4g"),
    "expected loss over dense's": _number("expected_loss", ".3f"),
    "plan at the end": lambda run: printable(run["plan"] or "dense"),
    "since step": _number("since_step", "d"),
    "new plans": _number("num_new_plans", "d"),
}
