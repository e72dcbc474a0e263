"""The cluster of the demo: hosts of a lab, or a local Ray cluster with a simulated link."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from cgx_ray.errors import CGXError
from cgx_ray.lab.namespaces import Lab, uninterrupted
from cgx_ray.lab.ray_nodes import RayNodes, ray_env

_END_TIMEOUT_S = 10.0
# Ray takes some seconds to end a training in order, of which nothing is left to keep when a signal ends the demo.
_ABORT_TIMEOUT_S = 0.5


class DemoError(CGXError, RuntimeError):
    """The demo's training ended early; the message holds the driver's last lines."""


class Submitted(Protocol):
    """A run, as a line for the driver."""

    def to_json(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A driver process that trains runs, and its network.

    set_rate  changes the rate of the links; None where the link is simulated
    """

    driver: subprocess.Popen[str]
    driver_log: Path
    set_rate: Callable[[float], None] | None

    @property
    def is_simulated(self) -> bool:
        return self.set_rate is None

    def submit(self, run: Submitted) -> None:
        assert self.driver.stdin is not None
        try:
            self.driver.stdin.write(run.to_json() + "\n")
            self.driver.stdin.flush()
        except BrokenPipeError:
            self.driver.wait()
            self.check()

    def check(self) -> None:
        """Raise DemoError if the driver has ended early."""
        status = self.driver.poll()
        if status is not None:
            raise DemoError(f"the training process ended with status {status}:\n{self.log_tail()}")

    def log_tail(self, num_lines: int = 30) -> str:
        lines = self.driver_log.read_text(errors="replace").splitlines()
        # Ray writes this every second, and it is harmless: its state API needs the dashboard, which is off.
        lines = [line for line in lines if "(PlacementGroupCleaner" not in line][-num_lines:]
        return "\n".join([*lines, f"(whole log: {self.driver_log})"])


@contextmanager
def lab_cluster(num_workers: int, rate_bit_per_s: float, out: Path) -> Iterator[Cluster]:
    """Run one host per worker, with all processes inside the lab."""
    with Lab(num_workers, rate_bit_per_s=rate_bit_per_s) as lab, RayNodes(lab, out / "logs") as nodes:
        log_path = out / "logs" / "driver.log"
        with driver_in_lab(lab, nodes, _driver_argv(nodes.address, num_workers), log_path) as driver:
            yield Cluster(driver=driver, driver_log=log_path, set_rate=lab.set_rate)


@contextmanager
def driver_in_lab(
    lab: Lab, nodes: RayNodes, argv: Sequence[str], log_path: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start the driver in host 0, and wait for `nodes` meanwhile. The end of its input ends it."""
    with log_path.open("w") as log:
        driver = lab.popen(
            0, argv, {**(env or {}), **ray_env()}, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True
        )
    assert driver.stdin is not None
    with driver.stdin:
        nodes.wait()  # while the driver imports PyTorch
        yield driver


@contextmanager
def local_cluster(num_workers: int, out: Path) -> Iterator[Cluster]:
    """Run a Ray cluster of one node, which the driver starts itself."""
    log_path = out / "logs" / "driver.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("w") as log:
        driver = subprocess.Popen(
            _driver_argv("local", num_workers),
            env={**os.environ, **ray_env()},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    assert driver.stdin is not None
    timeout_s = _ABORT_TIMEOUT_S
    try:
        with driver.stdin:
            yield Cluster(driver=driver, driver_log=log_path, set_rate=None)
        timeout_s = _END_TIMEOUT_S
    except BaseException:
        driver.terminate()
        raise
    finally:
        with uninterrupted():
            _end(driver, timeout_s)


def _driver_argv(address: str, num_workers: int) -> list[str]:
    settings = json.dumps({"address": address, "num_workers": num_workers})
    return [sys.executable, "-m", "cgx_ray.demo.driver", settings]


def _end(driver: subprocess.Popen[str], timeout_s: float) -> None:
    """Wait for the driver to end, kill it after `timeout_s`, then kill the remaining processes of its Ray cluster.

    Ray's processes notice the end of the driver themselves, but those that were starting notice only after minutes.
    """
    try:
        driver.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        driver.kill()
        driver.wait()
    deadline = time.monotonic() + _END_TIMEOUT_S
    while (left := _session_members(driver.pid)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _session_members(session: int) -> list[int]:
    """Return all processes of a session. The driver leads one, and Ray's processes stay in it."""
    members = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == session:
                members.append(pid)
    return members
