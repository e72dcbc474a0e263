"""`cgx-ray report`: the picture of a run, or of the demo's runs, from the files they have written."""

from __future__ import annotations

from pathlib import Path

import click

from cgx_ray.commands.options import console_for, plot_option
from cgx_ray.errors import ConfigError
from cgx_ray.report.picture import plot_runs
from cgx_ray.report.record import RunRecord, load_run
from cgx_ray.report.show import print_line


@click.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--events",
    type=click.Path(path_type=Path),
    help="File that `lab run --events` wrote.  [default: network.jsonl in RUN, if any]",
)
@plot_option("report.png")
def report(run_dir: Path, events: Path | None, plot: Path) -> None:
    """Draw a run: step times, network and decisions.

    RUN is the folder <storage path>/<run name> of a run with CGXConfig, or the folder of a demo, whose dense run is
    then drawn beside the adaptive one. Training may still go on.
    """
    folder = run_dir.resolve()
    records = _read_runs(folder, events)
    decisions = records[-1].decisions
    num_workers = decisions[-1]["inputs"]["world_size"]
    num_plans = sum(line["kind"] != "keep" for line in decisions)
    plot_runs(records, plot, title=f"{folder.name}: {num_workers} workers")
    print_line(console_for(None), f"{len(decisions)} decisions, {num_plans} for another plan; picture: {plot}")


def _read_runs(folder: Path, events: Path | None) -> list[RunRecord]:
    """Return the run in `folder`, or the demo's runs below it, dense first. The last one has decisions."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give that of a run, <storage path>/<run name>, or of a demo")
    record = load_run(folder, events)
    records = [record]
    if not record.decisions:
        record = load_run(folder / "adaptive", events)
        dense = load_run(folder / "dense")
        records = [dense, record] if dense.steps and record.steps else [record]
    if not record.decisions:
        raise ConfigError(
            f"{folder} holds no decision, neither in decisions.jsonl, which a run with CGXConfig(policy='adaptive') "
            "writes, nor in adaptive/decisions.jsonl, which a demo writes. With a remote storage path, "
            "decisions.jsonl is in ~/ray_results/<run name> on the node of Ray's train controller"
        )
    if events is not None and not record.network:
        raise ConfigError(f"{events} holds no links; give the file that `cgx-ray lab run --events` wrote")
    return records
