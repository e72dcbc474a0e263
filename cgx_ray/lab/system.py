"""The system's own programs `ip` and `tc`, and the processes in a namespace."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cgx_ray.errors import LabError

NAMESPACES = Path("/run/netns")
_END_TIMEOUT_S = 20.0


def run(*argv: str, text: str = "") -> str:
    """Run a program and return its output. Raises LabError with its error message if it fails."""
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def ip_batch(namespace: str, lines: Sequence[str]) -> None:
    run("ip", "-netns", namespace, "-batch", "-", text="\n".join(lines))


def tc_batch(namespace: str, lines: Sequence[str]) -> None:
    run("tc", "-netns", namespace, "-batch", "-", text="\n".join(lines))


def start_time(pid: int) -> str | None:
    """Return the start time of a process in ticks, which with the id names it for good. None if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def remove_namespace(name: str) -> None:
    """End the processes in a namespace, wait until they are gone, and delete it."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while pids := run("ip", "netns", "pids", name).split():
        for pid in pids:
            if is_alive(int(pid)):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise LabError(f"processes {', '.join(pids)} in namespace {name} do not end; end them by hand")
        time.sleep(0.02)
    run("ip", "netns", "delete", name)


def wait_for_first(processes: Collection[subprocess.Popen[Any]]) -> subprocess.Popen[Any]:
    """Wait until one of the processes has ended, and return it."""
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        for process in processes:
            descriptor = os.pidfd_open(process.pid)
            stack.callback(os.close, descriptor)
            selector.register(descriptor, selectors.EVENT_READ, process)
        ended: subprocess.Popen[Any] = selector.select()[0][0].data
    ended.wait()
    return ended
