"""The cluster of `python -m bench chaos`: real Ray in the hosts of a lab, and our processes and files there.

Signals reach processes of a host from outside, since this machine sees them too.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from cgx_ray.demo.cluster import Cluster, driver_in_lab
from cgx_ray.lab.namespaces import Lab
from cgx_ray.lab.ray_nodes import RayNodes
from cgx_ray.lab.system import run

# The classes of the actors that a training has, as Ray names their processes, and the process of the control loop.
WORKER, AGENT, CONTROLLER, LOOP = "RayTrainWorker", "NodeAgent", "Controller", "loop_process"
OURS = (WORKER, AGENT, CONTROLLER, LOOP)
_TITLE = re.compile(r"(?:ray::|.* from cgx_ray\.control\.)(\w+)")
# Shared memory, and folders of the controller's snapshot and of checkpoints.
_LEFTOVERS = "ls -d /dev/shm/cgx-ray-* $TMPDIR/cgx_ray-* 2> /dev/null"
RATE_BIT_PER_S, LATENCY_S = 2e8, 1e-3
# The first and the last port at which ranks and monitors may listen.
PORTS = (20000, 20039)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosCluster(Cluster):
    """A cluster in a lab that can be harmed."""

    lab: Lab

    def actors(self, name: str, host: int | None = None) -> list[psutil.Process]:
        """Return the processes with this of the names OURS, in one host or in all, oldest first."""
        hosts = self.lab.hosts if host is None else (self.lab.hosts[host],)
        found = []
        for one in hosts:
            for pid in run("ip", "netns", "pids", one.namespace).split():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(int(pid))
                    match = _TITLE.match(" ".join(process.cmdline()))
                    if match is not None and match[1] == name:
                        found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def leftover_files(self) -> list[str]:
        """Return our segments and temporary folders in all hosts, each with its host."""
        found = []
        for host in self.lab.hosts:
            listing = self.lab.popen(host.index, ["sh", "-c", _LEFTOVERS], stdout=subprocess.PIPE, text=True)
            found += [f"{host.name}: {path}" for path in listing.communicate()[0].split()]
        return found

    def wait_until(self, holds: Callable[[], bool], timeout_s: float) -> float | None:
        """Return the seconds until `holds`, None if it does not in time. Raises DemoError if the driver ends."""
        began_s = time.monotonic()
        while not holds():
            self.check()
            if time.monotonic() > began_s + timeout_s:
                return None
            time.sleep(0.05)
        return time.monotonic() - began_s


@contextmanager
def chaos_cluster(num_hosts: int, ranks_per_host: int, logs: Path) -> Iterator[ChaosCluster]:
    """Start a lab, Ray in its hosts, and the driver that trains what is submitted to it."""
    env = {"CGX_PORTS": f"{PORTS[0]}-{PORTS[1]}", "OMP_NUM_THREADS": "1"}
    with (
        Lab(num_hosts, rate_bit_per_s=RATE_BIT_PER_S, latency_s=LATENCY_S) as lab,
        RayNodes(lab, logs, cpus_per_node=ranks_per_host, env=env) as nodes,
    ):
        log_path = logs / "driver.log"
        argv = [sys.executable, "-m", "bench.chaos.driver", nodes.address]
        with driver_in_lab(lab, nodes, argv, log_path, env) as driver:
            yield ChaosCluster(driver=driver, driver_log=log_path, set_rate=lab.set_rate, lab=lab)
