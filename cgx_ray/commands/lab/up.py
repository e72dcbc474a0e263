"""`cgx-ray lab up` and `down`: the start and the end of a lab."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time

import click
import psutil

from cgx_ray.commands.lab.link_options import change_of, describe_backend, lab_option, link_options
from cgx_ray.errors import LabConfigError, LabError
from cgx_ray.lab.handle import LabHandle, owner_lives
from cgx_ray.lab.namespaces import Lab

_DOWN_TIMEOUT_S = 30.0


@click.command()
@click.option("--hosts", default=4, show_default=True, help="Number of hosts, 1 to 64.")
@click.option("--seed", default=0, show_default=True, help="Seed of loss and jitter.")
@click.option("--detach", is_flag=True, help="Run in the background; `lab down` ends it.")
# A latency, even 0, selects a back end that can change everything later.
@link_options({"rate": "1gbit", "latency": "0ms"})
def up(hosts: int, seed: int, detach: bool, **words: str | None) -> None:
    """Start a lab and run it until Ctrl-C or `lab down`."""
    if detach:
        _start_detached()
        return
    try:
        with Lab(hosts, seed=seed, **change_of(words)) as started:
            click.echo(f"lab {started.pid} is up: {hosts} hosts, {describe_backend(started)}")
            click.echo(f"all links: {started.link(0, 'up')}")
            sys.stdout.flush()
            started.wait()
    except KeyboardInterrupt:
        click.echo(f"lab {os.getpid()} ends")


def _start_detached() -> None:
    """Run this command line again without `--detach`, and return when the lab is up."""
    argv = [sys.executable, "-m", "cgx_ray.cli", *(word for word in sys.argv[1:] if word != "--detach")]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        process.stdout.close()
        if not lines[1]:
            kind = LabConfigError if process.wait() == 2 else LabError
            errors.seek(0)
            raise kind(errors.read().strip().removeprefix("Error: ") or "the lab did not start")
    click.echo("".join(lines), nl=False)


def _check_own(handle: LabHandle) -> None:
    """Raise LabError if the lab is a part of another command than `lab up`, such as a bench."""
    try:
        command = psutil.Process(handle.pid).cmdline()
    except psutil.Error as error:
        raise LabError(f"lab {handle.pid} ends just now ({error})") from error
    if not {"lab", "up"} <= set(command):
        raise LabError(f"lab {handle.pid} is that of `{shlex.join(command)}`; to end it give --lab {handle.pid}")


@click.command()
@lab_option
def down(pid: int | None) -> None:
    """End a lab and everything in it. Without --lab only one of `lab up`."""
    handle = LabHandle.find(pid)
    if pid is None:
        _check_own(handle)
    os.kill(handle.pid, signal.SIGTERM)
    deadline = time.monotonic() + _DOWN_TIMEOUT_S
    while handle.state_dir.exists() and owner_lives(handle.pid):
        if time.monotonic() > deadline:
            raise LabError(
                f"lab {handle.pid} does not end; run `kill -9 {handle.pid}`, then the next lab removes the rest"
            )
        time.sleep(0.05)
    click.echo(f"lab {handle.pid} is down")
