"""However ranks without Ray end, all of them are gone seconds later, with their shared memory and ports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.endings import kill_session, listening, living, wait_for, wait_for_nothing
from support.endless import SAID
from support.ray_processes import free_ports
from support.shared_memory import left_behind

TESTS = Path(__file__).parents[1]
START_S = 120.0
# Processes started in the background by a shell ignore SIGINT, and their children inherit it.
TORCHRUN = ["env", "--default-signal=INT", sys.executable, "-m", "torch.distributed.run", "--standalone"]


@contextmanager
def endless(log: Path, port: int) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """Start torchrun with two ranks that train for ever; yield it and the ids of the ranks once both train."""
    log.mkdir()
    env = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "CGX_PORTS": f"{port}-{port + 9}"}
    said = log / "torchrun.log"
    with said.open("w") as output:
        argv = [*TORCHRUN, "--nproc-per-node=2", "-m", "support.endless", "rank", str(log)]
        torchrun = subprocess.Popen(argv, env=env, cwd=TESTS, stdout=output, stderr=output, start_new_session=True)
    paths = [log / f"rank{rank}" for rank in range(2)]
    pids: list[int] = []
    try:
        wait_for(lambda: all(path.exists() and path.read_text() for path in paths), START_S, said.read_text)
        pids += [int(path.read_text()) for path in paths]
        yield torchrun, pids
    finally:
        # Each rank leads a session of its own.
        for leader in (torchrun.pid, *pids):
            kill_session(leader)
        torchrun.wait()


@pytest.mark.fault("Ctrl-C, SIGTERM, an exception or a killed rank under torchrun", "everything ends; nothing is left")
@pytest.mark.parametrize(
    "end", ["SIGINT", *(pytest.param(end, marks=pytest.mark.slow) for end in ("SIGTERM", "exception", "rank killed"))]
)
def test_nothing_is_left_of_ranks_that_torchrun_has_started(end: str, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    log = tmp_path / "log"
    with endless(log, port) as (torchrun, pids):
        if end == "exception":
            (log / "fail").touch()
        elif end == "rank killed":
            os.kill(pids[1], signal.SIGKILL)
        else:
            torchrun.send_signal(signal.Signals[end])

        def left() -> set[str]:
            torchrun.poll()
            return living(torchrun.pid, *pids) | {*left_behind(pids)} | listening(port)

        print(f"ended after {wait_for_nothing(left):.1f} s")
        assert torchrun.wait() != 0
    if end == "exception":
        assert SAID in (log / "torchrun.log").read_text()
