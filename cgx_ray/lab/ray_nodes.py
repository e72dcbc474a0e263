"""A Ray cluster in a lab: one node per host."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from cgx_ray.errors import LabError
from cgx_ray.lab.handle import LabHandle

GCS_PORT = 6379
_DASHBOARD_PORT = 8265
_START_TIMEOUT_S = 180.0

# Prefix of a command: all its descendants end with it, even those that left their parents.
OWN_PROCESS_TREE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")

# Imports no Ray, so it starts fast.
_WAIT_FOR_HEAD = """
import socket, sys, time
while True:
    try:
        socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1).close()
        break
    except OSError:
        time.sleep(0.05)
"""

# Ends once so many nodes have registered.
_WAIT_FOR_NODES = """
import sys, time, ray._raylet
address, wanted = sys.argv[1], int(sys.argv[2])
client = ray._raylet.GcsClient(address=address)
while sum(node.state == 0 for node in client.get_all_node_info().values()) < wanted:
    time.sleep(0.05)
"""


class RayNodes:
    """A head on host 0 and a worker on each other host, with `cpus_per_node` each, as a context manager.

    On entry the head answers; `wait` for the others. The nodes end with the lab.

    address       for `ray.init(address=...)` inside the lab
    log_dir       folder with one log per node, which is kept
    jobs_address  for `ray job submit --address` inside the lab, if it `takes_jobs`. Then the nodes also end with this
                  context, and drivers that are not jobs cannot connect
    """

    def __init__(
        self,
        lab: LabHandle,
        log_dir: Path,
        *,
        cpus_per_node: int = 1,
        takes_jobs: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.lab = lab
        self.log_dir = log_dir
        self.cpus_per_node = cpus_per_node
        self.address = f"{lab.hosts[0].address}:{GCS_PORT}"
        self.jobs_address = f"http://{lab.hosts[0].address}:{_DASHBOARD_PORT}"
        self._takes_jobs = takes_jobs
        self._env = {**(env or {}), **ray_env()}
        self._nodes: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> RayNodes:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        head = ["--head", f"--port={GCS_PORT}", f"--temp-dir={self.lab.temp_dir}/ray"]
        head += [f"--include-dashboard={str(self._takes_jobs).lower()}"]
        head += [f"--dashboard-host={self.lab.hosts[0].address}", f"--dashboard-port={_DASHBOARD_PORT}"]
        self._start(0, head)
        self._wait(_WAIT_FOR_HEAD, self.lab.hosts[0].address, str(GCS_PORT))
        if len(self.lab.hosts) > 1:
            # The port answers before the head's own node has registered, and another node gives up if that takes long.
            self._wait(_WAIT_FOR_NODES, self.address, "1")
        for host in self.lab.hosts[1:]:
            self._start(host.index, [f"--address={self.address}"])
        return self

    def wait(self) -> None:
        """Wait until all nodes are up; before that, the head knows fewer of them."""
        self._wait(_WAIT_FOR_NODES, self.address, str(len(self.lab.hosts)))
        if self._takes_jobs:
            self._wait(_WAIT_FOR_HEAD, self.lab.hosts[0].address, str(_DASHBOARD_PORT))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the nodes that are process trees of their own; the others end with the lab.

        `ray stop` would also end nodes outside the lab.
        """
        if self._takes_jobs:
            for node in self._nodes:
                node.kill()
                node.wait()

    def _start(self, host: int, role: list[str]) -> None:
        argv = [*OWN_PROCESS_TREE] if self._takes_jobs else []
        argv += [sys.executable, "-m", "ray.scripts.scripts", "start", *role, "--block", "--disable-usage-stats"]
        argv += [f"--node-ip-address={self.lab.hosts[host].address}", f"--num-cpus={self.cpus_per_node}"]
        argv += [f"--object-store-memory={128 << 20}"]
        with self._log(host).open("w") as log:
            node = self.lab.popen(host, argv, self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._nodes.append(node)

    def _wait(self, script: str, *arguments: str) -> None:
        argv = [sys.executable, "-c", script, *arguments]
        silent = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        probe = self.lab.popen(0, argv, self._env, **silent)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while probe.poll() is None:
            for host, node in enumerate(self._nodes):
                if node.poll() is not None:
                    raise LabError(f"the Ray node on host {host} ended at start:\n{self._log_tail(host)}")
            if time.monotonic() > deadline:
                raise LabError(
                    f"Ray is not up on {len(self.lab.hosts)} hosts after {_START_TIMEOUT_S:.0f} s; the "
                    f"log of the last one:\n{self._log_tail(len(self._nodes) - 1)}"
                )
            time.sleep(0.05)
        if probe.returncode:
            raise LabError(f"the Ray head on host 0 does not answer:\n{self._log_tail(0)}")

    def _log(self, host: int) -> Path:
        return self.log_dir / f"node-{host}.log"

    def _log_tail(self, host: int, num_lines: int = 20) -> str:
        return "\n".join(self._log(host).read_text(errors="replace").splitlines()[-num_lines:])


def ray_env() -> dict[str, str]:
    """Return the environment for programs that use a lab's Ray cluster."""
    return {
        "RAY_AUTH_MODE": "disabled",  # else Ray looks for a token file in the user's home
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # it queries cloud services, which a lab has none of
        "PYTHONUNBUFFERED": "1",
    }
