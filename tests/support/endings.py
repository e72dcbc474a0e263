"""Everything of ours that a training has on this machine: processes, ports, and the wait for their end."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence

import psutil
import torch.distributed as dist

from support.shared_memory import left_behind

# Longest wait until everything has ended, in seconds. The promise is ten; two cores at load 15 took up to nine, and at
# load 200 twenty-nine.
END_S = 60.0
# The process of the control loop, in its command line and as a title.
LOOP = "cgx_ray.control.loop_process"
# Ray's own actors and processes, which it leaves to end by themselves, minutes later.
RAYS_OWN = {
    "JobSupervisor",
    "PlacementGroupCleaner",
    "_AutoscalingCoordinatorActor",
    "DashboardAgent",
    "RuntimeEnvAgent",
}


def loops_below(pid: int) -> list[int]:
    """Return the processes of control loops below process `pid`."""
    return [below for below in _below(pid) if LOOP in _command(below)]


def actors_below(pid: int) -> set[str]:
    """Return the titles of the actors that run below process `pid`."""
    return _actors(_below(pid))


def our_actors() -> dict[str, int]:
    """Return the processes of controller and agent, by title, of a Ray that this process has started."""
    commands = {pid: _command(pid) for pid in _below(os.getpid())}
    titles = ("ray::Controller", "ray::NodeAgent")
    return {title: pid for title in titles for pid, text in commands.items() if re.match(rf"{title}\b", text)}


def actors_in_session(leader: int) -> set[str]:
    """Return the titles of the actors in the session that process `leader` has begun, and "the leader" if it runs."""
    actors = _actors(_session(leader))
    return actors | ({"the leader"} if living(leader) else set())


def _actors(pids: Sequence[int]) -> set[str]:
    """Return the titles of actors: Ray names a process after its class. Without idle workers and Ray's own actors.

    The process of a controller's loop is an actor here.
    """
    titles = set()
    for pid in pids:
        command = _command(pid)
        if command.startswith("ray::"):
            titles.add(command.partition(".")[0].split()[0])
        elif LOOP in command:
            titles.add(LOOP)
    return titles - {"ray::IDLE", *(f"ray::{name}" for name in RAYS_OWN)}


def _below(pid: int) -> list[int]:
    """Return the processes below process `pid`, none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process.pid for process in psutil.Process(pid).children(recursive=True)]
    return []


def _command(pid: int) -> str:
    """Return the command line of a process, nothing if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def listening(port: int) -> set[str]:
    """Return the ports, of ten from `port` on, at which somebody listens, on any address."""
    found = {str(one.laddr.port) for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    return found & set(map(str, range(port, port + 10)))


def living(*pids: int) -> set[str]:
    """Return those of the processes that run; zombies do not."""
    found = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.add(str(pid))
    return found


def _session(leader: int) -> list[int]:
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == leader:
                members.append(pid)
    return members


def wait_for(holds: Callable[[], bool], timeout_s: float, what: Callable[[], str]) -> None:
    """Wait until `holds`; fail with `what()` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what()
        time.sleep(0.1)


def wait_for_nothing(left: Callable[[], set[str]], timeout_s: float = END_S) -> float:
    """Wait until nothing is `left`; fail with what is. Return the seconds."""
    began_s = time.monotonic()
    while found := left():
        assert time.monotonic() < began_s + timeout_s, f"left after {timeout_s:g} s: {sorted(found)}"
        time.sleep(0.1)
    return time.monotonic() - began_s


def kill_session(leader: int) -> None:
    """Kill all processes of the session that `leader` has begun, for a test that fails."""
    deadline = time.monotonic() + END_S
    while (left := living(*_session(leader))) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)


def grown(before: Sequence[int], now: Sequence[int]) -> list[int]:
    """Return by how much each number of `now` exceeds that of `before`; 0 if it fell, as what ends late may have."""
    return [max(0, late - early) for early, late in zip(before, now, strict=True)]


def held() -> tuple[int, int, int, int]:
    """Return the numbers of threads, descriptors, shared-memory segments and process groups of this process."""
    gc.collect()
    groups = dist.distributed_c10d._world.pg_map  # noqa: TID251 - torch has no public list
    segments = left_behind([os.getpid()])
    return threading.active_count(), psutil.Process().num_fds(), len(segments), len(groups)
