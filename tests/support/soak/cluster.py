"""The cluster of the soak test: real Ray in the hosts of a lab, and what is done to it from outside.

Signals reach processes of a host from outside, since this machine sees them too.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from cgx_ray.demo.cluster import Cluster, driver_in_lab
from cgx_ray.lab.link import LinkChange
from cgx_ray.lab.namespaces import Lab
from cgx_ray.lab.ray_nodes import RayNodes
from cgx_ray.lab.system import run
from support.soak.faults import SoakFault, SoakKind

# The classes of the actors that a training has, as Ray names their processes, and the process of the control loop.
WORKER, AGENT, CONTROLLER, LOOP = "RayTrainWorker", "NodeAgent", "Controller", "loop_process"
OURS = (WORKER, AGENT, CONTROLLER, LOOP)
_TITLE = re.compile(r"(?:ray::|.* from cgx_ray\.control\.)(\w+)")
# Shared memory, and folders of the controller's snapshot and of checkpoints.
_LEFTOVERS = "ls -d /dev/shm/cgx-ray-* $TMPDIR/cgx_ray-* 2> /dev/null"
RATE_BIT_PER_S, LATENCY_S = 2e8, 1e-3
# The first and the last port at which ranks and monitors may listen.
PORTS = (20000, 20039)
# Hides the files of /proc/pressure in a host, whose mounts are its own.
_HIDE, _SHOW = "mount -t tmpfs tmpfs /proc/pressure", "umount /proc/pressure"
# Connects to each of our ports of a host that listens, and says nothing.
_STRANGERS = """
import socket, sys, time
address, number, first, last = sys.argv[1], *map(int, sys.argv[2:])
held = []
for port in range(first, last + 1):
    for _ in range(number):
        try:
            held.append(socket.create_connection((address, port), timeout=1))
        except OSError:
            break
time.sleep(1e6)
"""
_NUM_STRANGERS = 300
# Longest wait for an actor that was killed, in seconds. A new process imports torch.
RESTART_S = 60.0
_LOST_SHARE, _LATENCY_S = 0.01, 30e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakCluster(Cluster):
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
def soak_cluster(num_hosts: int, ranks_per_host: int, logs: Path) -> Iterator[SoakCluster]:
    """Start a lab, Ray in its hosts, and the driver that trains what is submitted to it."""
    env = {"PYTHONPATH": str(Path(__file__).parents[2]), "CGX_PORTS": f"{PORTS[0]}-{PORTS[1]}", "OMP_NUM_THREADS": "1"}
    with (
        Lab(num_hosts, rate_bit_per_s=RATE_BIT_PER_S, latency_s=LATENCY_S) as lab,
        RayNodes(lab, logs, cpus_per_node=ranks_per_host, env=env) as nodes,
    ):
        log_path = logs / "driver.log"
        argv = [sys.executable, "-m", "support.soak.training", nodes.address]
        with driver_in_lab(lab, nodes, argv, log_path, env) as driver:
            yield SoakCluster(driver=driver, driver_log=log_path, set_rate=lab.set_rate, lab=lab)


def harm(cluster: SoakCluster, fault: SoakFault, run_dir: Path) -> AbstractContextManager[None]:
    """Return a context in which `fault` is there. `run_dir`: of the run, with its journal."""
    host = fault.target % len(cluster.lab.hosts)
    kinds: dict[SoakKind, Callable[[], AbstractContextManager[None]]] = {
        SoakKind.RANK_STOPPED: lambda: _stopped(cluster, WORKER, fault.target),
        SoakKind.HOST_CUT: lambda: _cut(cluster, host),
        SoakKind.ALL_SLOW: lambda: _links(cluster, None, LinkChange(rate_bit_per_s=RATE_BIT_PER_S / 20)),
        SoakKind.HOST_SLOW: lambda: _links(cluster, host, LinkChange(rate_bit_per_s=RATE_BIT_PER_S / 10)),
        SoakKind.LATENCY: lambda: _links(cluster, None, LinkChange(latency_s=_LATENCY_S)),
        SoakKind.LOSS: lambda: _links(cluster, None, LinkChange(loss=_LOST_SHARE)),
        SoakKind.BUSY: lambda: _process(cluster, host, "while True: pass"),
        SoakKind.AGENT_KILLED: lambda: _killed(cluster, AGENT, fault.target),
        SoakKind.AGENT_STOPPED: lambda: _stopped(cluster, AGENT, fault.target),
        SoakKind.CONTROLLER_KILLED: lambda: _killed(cluster, CONTROLLER, fault.target),
        SoakKind.CONTROLLER_STOPPED: lambda: _stopped(cluster, CONTROLLER, fault.target),
        SoakKind.READING_REFUSED: lambda: _hidden_pressure(cluster, host),
        SoakKind.STRANGERS: lambda: _strangers(cluster, host),
        SoakKind.JOURNAL_FULL: lambda: _journal(run_dir, lambda path: path.symlink_to("/dev/full")),
        SoakKind.JOURNAL_PIPE: lambda: _journal(run_dir, os.mkfifo),
    }
    return kinds[fault.kind]()


@contextmanager
def _stopped(cluster: SoakCluster, name: str, number: int) -> Iterator[None]:
    stopped = _one_of(cluster, name, number)
    stopped.suspend()
    try:
        yield
    finally:
        stopped.resume()


@contextmanager
def _killed(cluster: SoakCluster, name: str, number: int) -> Iterator[None]:
    _one_of(cluster, name, number).kill()
    yield


def _one_of(cluster: SoakCluster, name: str, number: int) -> psutil.Process:
    """Return a process of the class, once there is one: it may have been killed, and Ray starts it again."""
    cluster.wait_until(lambda: bool(cluster.actors(name)), RESTART_S)
    found = cluster.actors(name)
    if not found:
        raise AssertionError(f"no {name} lives after {RESTART_S:g} s: Ray has not started it again")
    return found[number % len(found)]


@contextmanager
def _cut(cluster: SoakCluster, host: int) -> Iterator[None]:
    cluster.lab.cut(host)
    try:
        yield
    finally:
        cluster.lab.reconnect(host)


@contextmanager
def _links(cluster: SoakCluster, host: int | None, change: LinkChange) -> Iterator[None]:
    cluster.lab.set(host, **change)
    try:
        yield
    finally:
        cluster.lab.set(rate_bit_per_s=RATE_BIT_PER_S, latency_s=LATENCY_S, loss=0.0)


def _strangers(cluster: SoakCluster, host: int) -> AbstractContextManager[None]:
    """Return a context in which another host is connected to all our ports of `host`, and says nothing."""
    other = (host + 1) % len(cluster.lab.hosts)
    arguments = (cluster.lab.hosts[host].address, str(_NUM_STRANGERS), *map(str, PORTS))
    return _process(cluster, other, _STRANGERS, *arguments)


@contextmanager
def _process(cluster: SoakCluster, host: int, script: str, *arguments: str) -> Iterator[None]:
    process = cluster.lab.popen(host, [sys.executable, "-c", script, *arguments])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def _hidden_pressure(cluster: SoakCluster, host: int) -> Iterator[None]:
    def call(script: str) -> None:
        cluster.lab.popen(host, ["sh", "-c", script]).wait()

    call(_HIDE)
    try:
        yield
    finally:
        call(_SHOW)


@contextmanager
def _journal(run_dir: Path, make: Callable[[Path], None]) -> Iterator[None]:
    """Put what `make` makes in place of the journal, and then the journal back."""
    path, kept, other = (run_dir / f"decisions.jsonl{end}" for end in ("", ".kept", ".other"))
    kept.hardlink_to(path)
    make(other)
    # At once, so that the controller writes no new file in between.
    other.replace(path)
    try:
        yield
    finally:
        kept.replace(path)
