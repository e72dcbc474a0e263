"""`cgx-ray report`: the picture of a run from what it has left behind."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from cgx_ray.errors import ConfigError
from cgx_ray.report.picture import plot_runs
from cgx_ray.report.record import RunRecord, load_run


def report_command(run_dir: Path, events: Path | None, console: Console, picture: Path) -> None:
    """Draw the run in `run_dir`, with the network as `events` has it. Raises ConfigError on what cannot be drawn."""
    record = _read(run_dir.resolve(), events)
    num_workers = record.decisions[-1]["inputs"]["world_size"]
    num_plans = sum(line["kind"] != "keep" for line in record.decisions)
    plot_runs([record], picture, title=f"{record.name}: {num_workers} workers")
    console.print(
        f"{len(record.decisions)} decisions, {num_plans} for another plan; picture: {picture}",
        highlight=False,
        soft_wrap=True,
    )


def _read(run_dir: Path, events: Path | None) -> RunRecord:
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is no folder; give that of a run, <storage path>/<run name>")
    record = load_run(run_dir, events)
    if not record.decisions:
        raise ConfigError(
            f"{run_dir / 'decisions.jsonl'} holds no decision; runs with CGXConfig(policy='adaptive') make them, "
            "with a remote storage path in ~/ray_results/<run name> on the node of Ray's train controller"
        )
    if events is not None and not record.network:
        raise ConfigError(f"{events} holds no links; give the file that `cgx-ray lab run --events` wrote")
    return record
