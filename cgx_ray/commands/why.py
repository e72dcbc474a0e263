"""`cgx-ray why`: observe a training that does not know cgx_ray, and say what bounds its steps."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click
import psutil
from rich.console import Console

from cgx_ray.commands.options import FILE, PICTURE, json_option
from cgx_ray.errors import ConfigError
from cgx_ray.report.show import print_line, whole_file, write_json
from cgx_ray.report.style import save_figure
from cgx_ray.untrusted import parse_json, read_bytes
from cgx_ray.why.records import GATHERED_FILE, OPTIONS_FILE, ObserverOptions, RankRecord, from_json
from cgx_ray.why.show import draw_bars, show_verdict, verdict_page
from cgx_ray.why.verdict import verdict_of

VARIABLE = "CGX_WHY"
# Steps of which a record stays small enough for the store that ranks hand it over by.
MAX_STEPS = 1000
_LOOK_S = 0.2
# Seconds that a script which got Ctrl-C from the terminal has to end by itself.
_INTERRUPTED_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outputs:
    """Files to write besides the text, each if it is not None."""

    html: Path | None
    plot: Path | None
    json_path: str | None


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--steps",
    type=click.IntRange(1, MAX_STEPS),
    default=ObserverOptions().num_steps,
    show_default=True,
    help="Steps to observe, after 5 to warm up.",
)
@click.option("--stop", is_flag=True, help="End the script after these steps; else it goes on, unobserved.")
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    default=40.0,
    show_default="40: torchrun gives its workers 30",
    metavar="SECONDS",
    help="Time that the script has to end after SIGTERM, before it is killed.",
)
@click.option("--probe", is_flag=True, help="Let nodes probe each other before the first step, some seconds per pair.")
@click.option("--html", type=FILE, help="Write a page that works offline.")
@click.option("--plot", type=PICTURE, help="Draw the mean step of each rank.")
@click.option(
    "--attach",
    "folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Instead of COMMAND: report on a script that ran with CGX_WHY=FOLDER.",
)
@json_option("the verdict")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def why(
    steps: int,
    stop: bool,
    grace_s: float,
    probe: bool,
    html: Path | None,
    plot: Path | None,
    folder: Path | None,
    json_path: str | None,
    command: tuple[str, ...],
) -> None:
    """Observe a DDP training that runs as COMMAND, and say what bounds its steps.

    The script needs no change: cgx-ray why -- torchrun train.py. With several nodes, run the same on each; the report
    is at rank 0's. It goes to standard error, after the script's own output.

    Exit status: the script's own if it fails; else 0 healthy, 3 bound by the network, 4 by a rank, 5 by input, 1 if no
    step was seen.
    """
    if (folder is None) == (not command):
        raise ConfigError("give a training, as in `cgx-ray why -- torchrun train.py`, or --attach FOLDER, not both")
    outputs = _Outputs(html=html, plot=plot, json_path=json_path)
    if folder is not None:
        raise SystemExit(_report(folder, str(folder), outputs))
    place = Path(tempfile.mkdtemp(prefix="cgx-why-"))
    try:
        options = ObserverOptions(num_steps=steps, probes=probe)
        (place / OPTIONS_FILE).write_text(json.dumps(asdict(options)))
        try:
            failed = _run(command, place, stop=stop, grace_s=grace_s)
        except KeyboardInterrupt:
            _report(place, " ".join(command), outputs)  # of what was seen until then
            raise
        if failed and not any(place.glob("rank-*.json")) and not any(place.glob("error-*.txt")):
            what = f"the script ended with status {failed} before it made a process group"
            print_line(Console(stderr=True), f"cgx-ray why: {what}")
            raise SystemExit(failed)
        status = _report(place, " ".join(command), outputs)
    finally:
        shutil.rmtree(place)
    raise SystemExit(failed or status)


def _run(command: Sequence[str], folder: Path, *, stop: bool, grace_s: float) -> int:
    """Run the training, with the terminal as it is. Return its status, 0 if it was ended after the last step."""
    # Ctrl-C while it starts would leave it running, out of sight.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    unblock = partial(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
    try:
        child = subprocess.Popen(command, env={**os.environ, VARIABLE: str(folder)}, preexec_fn=unblock)  # noqa: PLW1509
    except OSError as error:
        unblock()
        raise ConfigError(f"{command[0]} cannot be started: {error.strerror}; give one as in a shell") from error
    try:
        unblock()
        is_over = False
        while not is_over and child.poll() is None:
            time.sleep(_LOOK_S)
            # Asked after the end as well: ranks fail once those of another node were ended.
            is_over = stop and (folder / GATHERED_FILE).exists()
        if is_over:
            _end(child, grace_s)
            return 0
    except KeyboardInterrupt:
        try:
            child.wait(_INTERRUPTED_S)
        except subprocess.TimeoutExpired:
            _end(child, grace_s)
        raise
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """End a training with all that it has started."""
    try:
        started = psutil.Process(child.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    child.terminate()
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    for process in started:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _report(folder: Path, title: str, outputs: _Outputs) -> int:
    """Report what the ranks have written into `folder`; return the exit status."""
    console = Console(stderr=True)
    records = [_read_record(path) for path in sorted(folder.glob("rank-*.json"))]
    # Others are of an earlier run with the same folder.
    records = [record for record in records if record.world_size == records[0].world_size]
    if records and records[0].rank != 0 and not any(folder.glob("error-*.txt")):
        ranks = " and ".join(f"rank {record.rank}" for record in records)
        print_line(console, f"cgx-ray why: {ranks} ran here; the report is where rank 0 ran")
        return 0
    verdict, notes = verdict_of(records), _notes(folder, records)
    show_verdict(console, verdict, notes)
    if outputs.html is not None:
        with whole_file(outputs.html) as new:
            new.write_text(verdict_page(title, verdict, notes), encoding="utf-8")
        print_line(console, f"page: {outputs.html}")
    if outputs.plot is not None and verdict.parts is not None:
        save_figure(draw_bars(verdict.parts).figure, outputs.plot)
        print_line(console, f"picture: {outputs.plot}")
    if outputs.json_path is not None:
        write_json(outputs.json_path, {**verdict.described(), "notes": notes})
    return verdict.exit_status


def _read_record(path: Path) -> RankRecord:
    try:
        return from_json(RankRecord, parse_json(read_bytes(path)))
    except ValueError as error:  # ConfigError is one
        raise ConfigError(f"{path}: {error}") from error


def _notes(folder: Path, records: Sequence[RankRecord]) -> list[str]:
    """Return what the report lacks, and why."""
    notes = []
    missing = sorted(set(range(records[0].world_size)) - {record.rank for record in records}) if records else []
    if missing:
        notes.append(f"ranks {', '.join(map(str, missing))} were not seen; run the same command on their nodes")
    for path in sorted(folder.glob("error-*.txt")):
        last = "".join(path.read_text().strip().splitlines()[-1:]) or "its file is empty: is the disk full?"
        notes.append(f"the observer failed in a process, which trained on without it: {last}")
    return notes
