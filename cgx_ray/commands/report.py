"""`cgx-ray report`: a page and a picture of a run, or of several runs beside each other, from their files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from cgx_ray.commands.options import FILE, console_for, plot_option
from cgx_ray.commands.plan.decision_steps import decision_steps
from cgx_ray.errors import ConfigError
from cgx_ray.report.live_view import broken_note
from cgx_ray.report.picture import plot_runs
from cgx_ray.report.record import RunRecord, load_run
from cgx_ray.report.run_facts import spans, world_size
from cgx_ray.report.run_page import Extras, report_page
from cgx_ray.report.show import print_line, whole_file
from cgx_ray.units import format_count


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--events",
    type=click.Path(path_type=Path),
    help="File that `lab run --events` wrote.  [default: network.jsonl in RUN, if any]",
)
@click.option("--html", type=FILE, default="report.html", show_default=True, help="File of the page.")
@click.option("--price", type=click.FloatRange(min=0), help="US dollars per hour and worker, for the cost of the run.")
@plot_option("report.png")
def report(run_dir: Path, events: Path | None, html: Path, price: float | None, plot: Path) -> None:
    """Explain a run: where its time went, its decisions and predictions, and what to try next.

    RUN is the folder <storage path>/<run name> of a run with CGXConfig, or a folder of several runs, such as a demo's,
    which are compared. Training may still go on. Writes a page that works offline, and a picture.
    """
    folder = run_dir.resolve()
    records = _read_runs(folder, events)
    plot_runs(records, plot, title=f"{folder.name}: {world_size(records[-1])} workers")
    write_page(html, folder.name, records, usd_per_hour=price)
    console = console_for(None)
    for record in records:
        for note in (*broken_note(record.broken), *record.cut, *filter(None, [record.clipped])):
            print_line(console, note)
    decided = [record for record in records if record.decisions]
    counts = [f"{f'{one.name}: ' if len(decided) > 1 else ''}{_decisions_of(one)}" for one in decided]
    print_line(console, f"{'; '.join(counts)}; picture: {plot}; report: {html}")


def _decisions_of(record: RunRecord) -> str:
    num_plans = sum(line["kind"] != "keep" for line in record.decisions)
    return f"{format_count(len(record.decisions), 'decision')}, {num_plans} for another plan"


def write_page(path: Path, title: str, records: Sequence[RunRecord], *, usd_per_hour: float | None = None) -> None:
    """Write the report of `records` as one HTML file."""
    extras = Extras(usd_per_hour=usd_per_hour, timelines=decision_steps)
    with whole_file(path) as new:
        new.write_text(report_page(title, records, extras), encoding="utf-8")


def _read_runs(folder: Path, events: Path | None) -> list[RunRecord]:
    """Return the run in `folder`, or the runs below it, dense first. The last one has decisions."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give that of a run, <storage path>/<run name>, or of several runs")
    record = load_run(folder, events)
    records = [record]
    if not record.decisions and not record.starts:
        records = _runs_below(folder, events)
    if not records or not records[-1].decisions:
        skipped = "".join(f"; {note}" for note in broken_note(record.broken))
        raise ConfigError(
            f"{folder} holds no decision, neither in decisions.jsonl, which a run with CGXConfig(policy='adaptive') "
            "writes, nor in a folder below it, such as a demo's adaptive/decisions.jsonl. With a remote storage path, "
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
