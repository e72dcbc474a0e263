"""However a driver ends, its actors, shared memory and ports are gone seconds later.

`test_job_submit.py` stops a job.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.endings import (
    LOOP,
    actors_below,
    actors_in_session,
    kill_session,
    listening,
    living,
    loops_below,
    wait_for,
    wait_for_nothing,
)
from support.endless import SAID
from support.ray_processes import ENV, RayNodes, free_ports
from support.shared_memory import left_behind

TESTS = Path(__file__).parents[1]
# Ray starts, then workers import torch. A busy machine takes a minute.
START_S = 150.0
# Processes started in the background by a shell ignore SIGINT, and their children inherit it.
INTERRUPTIBLE = ["env", "--default-signal=INT"]
OURS = {"ray::NodeAgent", "ray::Controller", "ray::RayTrainWorker", LOOP}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    with tempfile.TemporaryDirectory(prefix="cgx-", dir="/tmp", ignore_cleanup_errors=True) as temp_dir:
        cluster = RayNodes(tmp_path_factory.mktemp("cluster"), temp_dir, num_cpus=2)
        try:
            yield cluster
        finally:
            cluster.end()


@contextmanager
def endless(address: str, log: Path, port: int) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Start a driver whose training lasts, in a session of its own; yield it and its ranks' ids once they train."""
    log.mkdir()
    env = {**ENV, "PYTHONPATH": os.pathsep.join([str(TESTS), ENV.get("PYTHONPATH", "")])}
    env["CGX_PORTS"] = f"{port}-{port + 9}"
    said, paths = log / "driver.log", [log / f"rank{rank}" for rank in range(2)]
    with said.open("w") as output:
        argv = [*INTERRUPTIBLE, sys.executable, "-m", "support.endless", "ray", address, str(log)]
        driver = subprocess.Popen(argv, env=env, cwd=TESTS, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_for(lambda: all(path.exists() and path.read_text() for path in paths), START_S, said.read_text)
        yield driver, [int(path.read_text()) for path in paths]
    finally:
        kill_session(driver.pid)
        driver.wait()


# For `make test-faults`: ways to end that differ little from those that stay.
SLOW = pytest.mark.slow


@pytest.mark.parametrize("end", [pytest.param("SIGINT", marks=SLOW), "SIGKILL", pytest.param("exception", marks=SLOW)])
def test_nothing_of_ours_is_left_on_a_cluster(end: str, nodes: RayNodes, tmp_path: Path) -> None:
    head, log = nodes.head.pid, tmp_path / "log"
    (port,) = free_ports(1)
    before = actors_below(head)
    with endless(nodes.address, log, port) as (driver, ranks):
        assert actors_below(head) >= OURS
        # An orphan is below the head no more.
        loops = loops_below(head)
        assert listening(port), "its monitors listen while it trains"
        if end == "exception":
            (log / "fail").touch()
        else:
            driver.send_signal(signal.Signals[end])

        def left() -> set[str]:
            is_driver = {"the driver"} if driver.poll() is None else set()
            ours = (actors_below(head) - before) | living(*loops)
            return is_driver | ours | {*left_behind(ranks)} | listening(port)

        print(f"ended after {wait_for_nothing(left):.1f} s")
        assert driver.returncode != 0
    if end == "exception":
        assert SAID in (log / "driver.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["SIGINT", "SIGKILL"])
def test_nothing_of_ours_is_left_of_a_driver_that_has_started_ray_itself(end: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with endless("local", tmp_path / "log", port) as (driver, ranks):
        assert actors_in_session(driver.pid) >= OURS
        driver.send_signal(signal.Signals[end])

        def left() -> set[str]:
            driver.poll()
            return actors_in_session(driver.pid) | {*left_behind(ranks)} | listening(port)

        print(f"ended after {wait_for_nothing(left):.1f} s")
