"""The system's own programs: `ip` and `tc` and the processes in a namespace."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from cgx_ray.errors import LabError

NAMESPACES = Path("/run/netns")
_END_TIMEOUT_S = 20.0


def run(*argv: str, text: str = "") -> str:
    """What the program writes. Raises LabError with its complaint if it fails."""
    done = subprocess.run(argv, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def ip_batch(namespace: str, lines: Sequence[str]) -> None:
    run("ip", "-netns", namespace, "-batch", "-", text="\n".join(lines))


def tc_batch(namespace: str, lines: Sequence[str]) -> None:
    run("tc", "-netns", namespace, "-batch", "-", text="\n".join(lines))


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def remove_namespace(name: str) -> None:
    """End the processes in it, wait until they are gone, delete it."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    while pids := run("ip", "netns", "pids", name).split():
        for pid in pids:
            if is_alive(int(pid)):
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > deadline:
            raise LabError(f"processes {', '.join(pids)} in namespace {name} do not end; end them by hand")
        time.sleep(0.02)
    run("ip", "netns", "delete", name)
