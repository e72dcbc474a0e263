"""`cgx-ray lab run`: a program in the hosts of a lab, while a schedule changes the links."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from cgx_ray.commands.lab.link_options import epoch_option, lab_option, read_schedule, slower_option
from cgx_ray.errors import LabConfigError, LabError
from cgx_ray.lab.events import LinkEvent, append_events, links_now
from cgx_ray.lab.handle import LabHandle
from cgx_ray.lab.jobs import run_in_hosts, run_on_ray
from cgx_ray.lab.schedule import STEP_FILE_VARIABLE, Schedule, ScheduledAction, last_step, play


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--host", "hosts", type=int, multiple=True, help="Run in this host only; may be repeated.")
@click.option("--ray", "on_ray", is_flag=True, help="Start Ray nodes in all hosts; submit the program as a job.")
@click.option("--cpus-per-node", default=1, show_default=True, help="CPUs of each Ray node.")
@click.option("--schedule", help="Play this schedule meanwhile: a file, c1 or c2.")
@epoch_option
@slower_option
@click.option(
    "--events",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the links at the start, and each change, to this file for `cgx-ray report`.",
)
@lab_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    hosts: tuple[int, ...],
    on_ray: bool,
    cpus_per_node: int,
    schedule: str | None,
    epoch: str | None,
    slower: float,
    events: Path | None,
    pid: int | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND in every host, as one rank each.

    Exits with COMMAND's status. torchrun and torch.distributed read ranks and addresses from the environment:
    cgx-ray lab run -- torchrun train.py
    """
    handle = LabHandle.find(pid)
    with tempfile.TemporaryDirectory(prefix="cgx-lab-") as folder:
        step_file = Path(folder) / "step"
        env = {STEP_FILE_VARIABLE: str(step_file)}
        played = None if schedule is None else _schedule_to_play(schedule, epoch, slower)
        if events is not None:
            events.write_text("")
            append_events(events, links_now(handle))
        with _playing(handle, played, step_file, events):
            if on_ray:
                log_dir = Path("runs") / time.strftime("lab-%Y%m%d-%H%M%S")
                click.echo(f"starting Ray on {len(handle.hosts)} hosts; logs in {log_dir}", err=True)
                code = run_on_ray(handle, command, log_dir, cpus_per_node, env)
            else:
                everywhere = tuple(host.index for host in handle.hosts)
                chosen = [handle.check(host) for host in hosts or everywhere]
                code = run_in_hosts(handle, chosen, command, _echo_line, env)
    raise SystemExit(code)


def _echo_line(host: int, line: str) -> None:
    click.echo(f"[{host}] {line}", nl=False)


def _schedule_to_play(name: str, epoch: str | None, slower: float) -> Schedule:
    schedule = read_schedule(name, epoch, slower)
    if schedule.unit == "epoch":
        raise LabConfigError(f"schedule {name} is in epochs; say how long one is: --epoch 30s or --epoch 200steps")
    return schedule


@contextmanager
def _playing(handle: LabHandle, schedule: Schedule | None, step_file: Path, events: Path | None) -> Iterator[None]:
    """Play the schedule while the body runs. Links keep their last state."""
    if schedule is None:
        yield
        return
    stop = threading.Event()
    failures: list[LabError | OSError] = []

    def note(event: ScheduledAction) -> None:
        click.echo(f"{time.strftime('%H:%M:%S')} {schedule.unit} {event.at:g}: {event}", err=True)
        if events is not None:
            step = last_step(step_file)
            append_events(events, [LinkEvent.now(event, step if step >= 0 else None)])

    def play_to_the_end() -> None:
        try:
            play(schedule, handle, step_file, note, stop)
        except (LabError, OSError) as error:
            failures.append(error)
            click.echo(f"the schedule ends early: {error}", err=True)

    player = threading.Thread(target=play_to_the_end)
    player.start()
    try:
        yield
    finally:
        stop.set()
        player.join()
    if failures:
        raise failures[0]
