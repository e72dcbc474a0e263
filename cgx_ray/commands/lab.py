"""`cgx-ray lab`: a lab from the shell. `up` runs it; the other commands find it and may run at any time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click

from cgx_ray.errors import LabError
from cgx_ray.lab.events import LinkEvent, append_events, links_now
from cgx_ray.lab.handle import LabHandle, owner_lives
from cgx_ray.lab.jobs import run_in_hosts, run_on_ray
from cgx_ray.lab.link import DIRECTIONS, LINK_WORDS, Direction, LinkChange, parse_change
from cgx_ray.lab.namespaces import Lab
from cgx_ray.lab.schedule import STEP_FILE_VARIABLE, Event, Schedule, last_step, play

_DOWN_TIMEOUT_S = 30.0
_HELP = {
    "rate": "Of IP packets, as 1gbit or 250mbit.",
    "latency": "One way between two hosts, as 5ms or 100us.",
    "jitter": "Latency varies in +- this.",
    "loss": "Share of packets lost between two hosts, as 1% or 0.01.",
    "queue": "Bytes a link holds before it drops, as 250kb; none paces senders instead.",
}


def _link_options(defaults: dict[str, str]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        for word in reversed(LINK_WORDS):
            shown = word in defaults
            function = click.option(f"--{word}", default=defaults.get(word), show_default=shown, help=_HELP[word])(
                function
            )
        return function

    return decorate


def _change_of(words: dict[str, str | None]) -> LinkChange:
    return parse_change((word, text) for word, text in words.items() if text is not None)


_lab_option = click.option("--lab", "pid", type=int, help="Process id of the lab; needed when several are up.")


@click.group()
def lab() -> None:
    """Emulated hosts and links on this machine. Needs root."""


@lab.command()
@click.option("--hosts", default=4, show_default=True, help="1 to 64.")
@click.option("--seed", default=0, show_default=True, help="Of loss and jitter.")
@click.option("--detach", is_flag=True, help="Leave it running in the background; `lab down` ends it.")
@_link_options({"rate": "1gbit", "latency": "0ms"})
def up(hosts: int, seed: int, detach: bool, **words: str | None) -> None:
    """Start a lab and run it until Ctrl-C or `lab down`."""
    if detach:
        _start_detached()
        return
    # A latency, even 0, asks for a back end that can set everything later.
    try:
        with Lab(hosts, seed=seed, **_change_of(words)) as started:
            click.echo(f"lab {started.pid} is up: {hosts} hosts, {_describe_backend(started)}")
            click.echo(f"all links: {started.link(0, 'up')}")
            sys.stdout.flush()
            started.wait()
    except KeyboardInterrupt:
        click.echo(f"lab {os.getpid()} ends")


def _start_detached() -> None:
    argv = [sys.executable, "-m", "cgx_ray.cli", *(word for word in sys.argv[1:] if word != "--detach")]
    with tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        process.stdout.close()
        if not lines[1]:
            process.wait()
            complaints.seek(0)
            raise LabError(complaints.read().strip().removeprefix("Error: ") or "the lab did not start")
    click.echo("".join(lines), nl=False)


def _describe_backend(handle: LabHandle) -> str:
    if handle.backend == "tc":
        return "back end tc (htb and netem)"
    return "back end switch (cgx-switch over TUN devices: this kernel has no netem)"


@lab.command("set")
@click.option("--host", type=int, help="Only the links of this host.")
@click.option("--direction", type=click.Choice(DIRECTIONS), help="Only this direction, seen from the host.")
@_link_options({})
@_lab_option
def set_links(host: int | None, direction: Direction | None, pid: int | None, **words: str | None) -> None:
    """Change links, now, with traffic flowing."""
    change = _change_of(words)
    if not change:
        raise LabError(f"nothing to set; give one of {', '.join(f'--{word}' for word in LINK_WORDS)}")
    LabHandle.find(pid).set(host, direction, **change)


@lab.command()
@click.argument("host", type=int)
@_lab_option
def cut(host: int, pid: int | None) -> None:
    """Cut a host off: what goes to and from it is lost."""
    LabHandle.find(pid).cut(host)


@lab.command()
@click.argument("host", type=int)
@_lab_option
def reconnect(host: int, pid: int | None) -> None:
    """Connect a host again."""
    LabHandle.find(pid).reconnect(host)


@lab.command()
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON.")
@_lab_option
def status(as_json: bool, pid: int | None) -> None:
    """Links, and what the switch counted: packets, drops, and how late it delivered."""
    handle = LabHandle.find(pid)
    counters = handle.counters() if handle.backend == "switch" else None
    links = [{way: handle.link(host.index, way) for way in DIRECTIONS} for host in handle.hosts]
    if as_json:
        state = {
            "pid": handle.pid,
            "backend": handle.backend,
            "hosts": [asdict(host) for host in handle.hosts],
            "connected": [handle.is_connected(host.index) for host in handle.hosts],
            "links": [{way: asdict(link) for way, link in both.items()} for both in links],
            "counters": counters and asdict(counters),
        }
        click.echo(json.dumps(state, indent=2))
        return
    click.echo(f"lab {handle.pid}: {len(handle.hosts)} hosts, {_describe_backend(handle)}")
    for host, both in zip(handle.hosts, links, strict=True):
        cut_off = "" if handle.is_connected(host.index) else "  CUT OFF"
        click.echo(f"{host.name}  {host.address}{cut_off}")
        for way, link in both.items():
            seen = ""
            if counters:
                count = counters.hosts[host.index][way]
                dropped = count.dropped_queue + count.dropped_loss + count.dropped_cut
                seen = f"  {count.packets} packets, {count.bytes / 1e6:.1f} MB, {dropped} dropped"
            click.echo(f"  {way:4} {link}{seen}")
    if counters:
        late = f"{counters.late_p50_ms:.3f} / {counters.late_p99_ms:.3f} / {counters.late_max_ms:.3f}"
        verdict = "sound" if counters.late_p99_ms < 0.2 else "too late: this machine is too busy for these links"
        click.echo(f"delivered {counters.delivered}, late by {late} ms (median / p99 / most): {verdict}")


@lab.command(context_settings={"allow_interspersed_args": False})
@click.option("--host", "hosts", type=int, multiple=True, help="In this host only; can be given again.")
@click.option("--ray", "on_ray", is_flag=True, help="Start Ray nodes in all hosts; submit the program as a job.")
@click.option("--cpus-per-node", default=1, show_default=True, help="Of each Ray node.")
@click.option("--schedule", help="Play this meanwhile: a file, c1 or c2.")
@click.option("--epoch", help="How long a schedule's epoch is, as 30s or 200steps.")
@click.option("--slower", default=1.0, show_default=True, help="Play the schedule on a network this much slower.")
@click.option(
    "--events",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write links at the start and each change here, for `cgx-ray report`.",
)
@_lab_option
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
    """Run COMMAND in every host, as a rank each, and exit with its status.

    torchrun and torch.distributed find each other by the environment: cgx-ray lab run -- torchrun train.py
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


@contextmanager
def _playing(handle: LabHandle, schedule: Schedule | None, step_file: Path, events: Path | None) -> Iterator[None]:
    """Play the schedule while the body runs. Links stay as it leaves them."""
    if schedule is None:
        yield
        return
    stop = threading.Event()
    failures: list[LabError | OSError] = []

    def note(event: Event) -> None:
        click.echo(f"{time.strftime('%H:%M:%S')} {schedule.unit} {event.at:g}: {event}", err=True)
        if events is not None:
            step = last_step(step_file)
            append_events(events, [LinkEvent.now(event, step if step >= 0 else None)])

    def body() -> None:
        try:
            play(schedule, handle, step_file, note, stop)
        except (LabError, OSError) as error:
            failures.append(error)
            click.echo(f"the schedule ends early: {error}", err=True)

    player = threading.Thread(target=body)
    player.start()
    try:
        yield
    finally:
        stop.set()
        player.join()
    if failures:
        raise failures[0]


def _schedule_to_play(name: str, epoch: str | None, slower: float) -> Schedule:
    schedule = _with_epoch(Schedule.read(name), epoch).slower(slower)
    if schedule.unit == "epoch":
        raise LabError(f"schedule {name} is in epochs; say how long one is: --epoch 30s or --epoch 200steps")
    return schedule


def _with_epoch(schedule: Schedule, epoch: str | None) -> Schedule:
    if epoch is None:
        return schedule
    number = epoch.removesuffix("steps").removesuffix("s")
    try:
        length = float(number)
    except ValueError:
        raise LabError(f"epoch {epoch!r} is not understood; write 30s or 200steps") from None
    return schedule.with_epoch(length, "step" if epoch.endswith("steps") else "s")


@lab.command("schedule")
@click.argument("schedule")
@click.option("--epoch", help="How long an epoch is, as 30s or 200steps.")
@click.option("--slower", default=1.0, show_default=True, help="A network this much slower.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="PNG", help="Draw it.")
def show_schedule(schedule: str, epoch: str | None, slower: float, plot: Path | None) -> None:
    """Check SCHEDULE (a file, c1 or c2), print and draw it."""
    from cgx_ray.lab.plot import plot_schedule  # noqa: PLC0415  loads Matplotlib

    parsed = _with_epoch(Schedule.read(schedule), epoch).slower(slower)
    for event in parsed.events:
        click.echo(f"{parsed.unit} {event.at:g}: {event}")
    if plot:
        plot_schedule(parsed, plot)
        click.echo(f"picture: {plot}")


@lab.command()
@_lab_option
def down(pid: int | None) -> None:
    """End a lab and everything in it."""
    handle = LabHandle.find(pid)
    os.kill(handle.pid, signal.SIGTERM)
    deadline = time.monotonic() + _DOWN_TIMEOUT_S
    while handle.state_dir.exists() and owner_lives(handle.pid):
        if time.monotonic() > deadline:
            raise LabError(f"lab {handle.pid} does not end; `kill -9 {handle.pid}`, the next lab cleans up")
        time.sleep(0.05)
    click.echo(f"lab {handle.pid} is down")
