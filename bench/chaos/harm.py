"""Do each fault of `python -m bench chaos` that comes from outside the training loop, and undo it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil

from bench.chaos.cluster import AGENT, CONTROLLER, LATENCY_S, PORTS, RATE_BIT_PER_S, WORKER, ChaosCluster
from bench.chaos.faults import ChaosError, ChaosFault, ChaosKind
from cgx_ray.lab.link import LinkChange

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


def harm(cluster: ChaosCluster, fault: ChaosFault, run_dir: Path) -> AbstractContextManager[None]:
    """Return a context in which `fault` is there. `run_dir`: of the run, with its journal."""
    host = fault.target % len(cluster.lab.hosts)
    kinds: dict[ChaosKind, Callable[[], AbstractContextManager[None]]] = {
        ChaosKind.RANK_STOPPED: lambda: _stopped(cluster, WORKER, fault.target),
        ChaosKind.HOST_CUT: lambda: _cut(cluster, host),
        ChaosKind.ALL_SLOW: lambda: _links(cluster, None, LinkChange(rate_bit_per_s=RATE_BIT_PER_S / 20)),
        ChaosKind.HOST_SLOW: lambda: _links(cluster, host, LinkChange(rate_bit_per_s=RATE_BIT_PER_S / 10)),
        ChaosKind.LATENCY: lambda: _links(cluster, None, LinkChange(latency_s=_LATENCY_S)),
        ChaosKind.LOSS: lambda: _links(cluster, None, LinkChange(loss=_LOST_SHARE)),
        ChaosKind.BUSY: lambda: _process(cluster, host, "while True: pass"),
        ChaosKind.AGENT_KILLED: lambda: _killed(cluster, AGENT, fault.target),
        ChaosKind.AGENT_STOPPED: lambda: _stopped(cluster, AGENT, fault.target),
        ChaosKind.CONTROLLER_KILLED: lambda: _killed(cluster, CONTROLLER, fault.target),
        ChaosKind.CONTROLLER_STOPPED: lambda: _stopped(cluster, CONTROLLER, fault.target),
        ChaosKind.READING_REFUSED: lambda: _hidden_pressure(cluster, host),
        ChaosKind.STRANGERS: lambda: _strangers(cluster, host),
        ChaosKind.JOURNAL_FULL: lambda: _journal(run_dir, lambda path: path.symlink_to("/dev/full")),
        ChaosKind.JOURNAL_PIPE: lambda: _journal(run_dir, os.mkfifo),
    }
    return kinds[fault.kind]()


@contextmanager
def _stopped(cluster: ChaosCluster, name: str, number: int) -> Iterator[None]:
    stopped = _one_of(cluster, name, number)
    stopped.suspend()
    try:
        yield
    finally:
        stopped.resume()


@contextmanager
def _killed(cluster: ChaosCluster, name: str, number: int) -> Iterator[None]:
    _one_of(cluster, name, number).kill()
    yield


def _one_of(cluster: ChaosCluster, name: str, number: int) -> psutil.Process:
    """Return a process of the class, once there is one: it may have been killed, and Ray starts it again."""
    cluster.wait_until(lambda: bool(cluster.actors(name)), RESTART_S)
    found = cluster.actors(name)
    if not found:
        raise ChaosError(f"no {name} lives after {RESTART_S:g} s: Ray has not started it again")
    return found[number % len(found)]


@contextmanager
def _cut(cluster: ChaosCluster, host: int) -> Iterator[None]:
    cluster.lab.cut(host)
    try:
        yield
    finally:
        cluster.lab.reconnect(host)


@contextmanager
def _links(cluster: ChaosCluster, host: int | None, change: LinkChange) -> Iterator[None]:
    cluster.lab.set(host, **change)
    try:
        yield
    finally:
        cluster.lab.set(rate_bit_per_s=RATE_BIT_PER_S, latency_s=LATENCY_S, loss=0.0)


def _strangers(cluster: ChaosCluster, host: int) -> AbstractContextManager[None]:
    """Return a context in which another host is connected to all our ports of `host`, and says nothing."""
    other = (host + 1) % len(cluster.lab.hosts)
    arguments = (cluster.lab.hosts[host].address, str(_NUM_STRANGERS), *map(str, PORTS))
    return _process(cluster, other, _STRANGERS, *arguments)


@contextmanager
def _process(cluster: ChaosCluster, host: int, script: str, *arguments: str) -> Iterator[None]:
    process = cluster.lab.popen(host, [sys.executable, "-c", script, *arguments])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def _hidden_pressure(cluster: ChaosCluster, host: int) -> Iterator[None]:
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
