"""A controller that stands still, or whose policy raises: training goes on, and ends in time."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from support import train_functions
from support.endings import living, loops_below, our_actors, wait_for_nothing
from support.failing_ranks import WITHIN_S
from support.loop_policies import RaisingPolicy

import cgx_ray
from cgx_ray.ray_train import config as ray_config

pytestmark = [
    # Ray's own: it leaves sockets and files open until its processes end, and calls its own deprecated APIs.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]
NUM_STEPS = 300
LINK = cgx_ray.SimulatedLink(latency_s=1e-4, schedule=((0, 2e7),))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    """A Ray cluster, as the folder of its session."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env_vars = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    context = ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": env_vars})
    yield Path(context.address_info["session_dir"])
    ray.shutdown()


def fit(tmp_path: Path, config: Any, steps: int = NUM_STEPS) -> None:
    (tmp_path / "log").mkdir()
    TorchTrainer(
        train_functions.train,
        train_loop_config={"log": str(tmp_path / "log"), "steps": steps, "pace": True},
        torch_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
    ).fit()


def hashes_of(tmp_path: Path, rank: int) -> list[str]:
    lines = (tmp_path / "log" / f"rank{rank}-from0.jsonl").read_text().splitlines()[1:]
    return [json.loads(line)["hash"] for line in lines]


def controller_pids() -> tuple[int, int]:
    """Return the ids of the controller's process and of its loop's."""
    pid = our_actors()["ray::Controller"]
    (loop,) = loops_below(pid)
    return pid, loop


def decisions_of(tmp_path: Path) -> list[dict[str, Any]]:
    path = tmp_path / "run" / "decisions.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in map(json.loads, lines) if line["event"] == "decision"]


def wait_for_decision(tmp_path: Path) -> None:
    # Beside other load Ray alone takes half a minute to start the workers.
    end_s = time.monotonic() + 120
    while not decisions_of(tmp_path):
        assert time.monotonic() < end_s, "no decision"
        time.sleep(0.2)


class Signalled(threading.Thread):
    """Sends `number` to the controller, or to its loop, once a plan was decided.

    pids    of both; (0, 0) if nothing was sent
    time_s  when it was sent; infinite if nothing was
    """

    def __init__(self, tmp_path: Path, number: signal.Signals, *, loop: bool) -> None:
        super().__init__()
        self.pids: tuple[int, int] = (0, 0)
        self.time_s = math.inf
        self._tmp_path, self._number, self._loop = tmp_path, number, loop
        self.start()

    def run(self) -> None:
        wait_for_decision(self._tmp_path)
        self.pids = controller_pids()
        os.kill(self.pids[self._loop], self._number)
        self.time_s = time.time()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.fault("the controller stands still (SIGSTOP)", "training goes on; the end waits for it for 9 s at most")
def test_a_stopped_controller_holds_up_neither_the_training_nor_its_end(tmp_path: Path) -> None:
    stopped = Signalled(tmp_path, signal.SIGSTOP, loop=False)
    fit(tmp_path, cgx_ray.CGXConfig(simulated_link=LINK))
    ended_s = time.time()
    stopped.join()
    assert len(hashes_of(tmp_path, 0)) == NUM_STEPS
    assert hashes_of(tmp_path, 0) == hashes_of(tmp_path, 1)
    assert ray_config.CLOSE_TIMEOUT_S + ray_config.HISTORY_TIMEOUT_S < 10
    last_step_s = max(path.stat().st_mtime for path in (tmp_path / "log").iterdir())
    assert stopped.time_s < last_step_s, "it was stopped too late to hold up anything"
    assert ended_s - last_step_s < WITHIN_S
    # Ray takes some seconds to kill a process that does not answer.
    try:
        wait_for_nothing(lambda: living(*stopped.pids))
    finally:
        for pid in living(*stopped.pids):
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.slow  # test_train.py kills the controller with its loop
@pytest.mark.fault("SIGKILL of the control loop's process", "Ray starts the controller again, and decisions go on")
def test_decisions_go_on_after_the_process_of_the_loop_was_killed(cluster: Path, tmp_path: Path) -> None:
    killed = Signalled(tmp_path, signal.SIGKILL, loop=True)
    fit(tmp_path, cgx_ray.CGXConfig(simulated_link=LINK), steps=2 * NUM_STEPS)
    killed.join()
    assert living(*killed.pids) == set()
    assert len(hashes_of(tmp_path, 0)) == 2 * NUM_STEPS
    assert hashes_of(tmp_path, 0) == hashes_of(tmp_path, 1)
    decisions = decisions_of(tmp_path)
    later = [line for line in decisions if line["time"] > killed.time_s]
    assert later, decisions
    assert later[0]["old"]["version"] >= decisions[0]["new"]["version"]
    versions = [one["new"]["version"] for one in decisions]
    assert versions == sorted(versions)
    logs = [path.read_text() for path in (cluster / "logs").glob("worker-*.err")]
    ended = "the process of the control loop has ended (exit status -9): the controller ends too"
    assert any(ended in text for text in logs)
    assert any("the controller was started again and goes on with plan" in text for text in logs)


@pytest.mark.slow
@pytest.mark.fault("the policy raises at every decision", "training goes on with its first plan; the log has the error")
def test_a_policy_that_raises_does_not_hold_up_the_training(cluster: Path, tmp_path: Path) -> None:
    fit(tmp_path, cgx_ray.CGXConfig(policy=RaisingPolicy(), simulated_link=LINK))
    assert len(hashes_of(tmp_path, 0)) == NUM_STEPS
    assert hashes_of(tmp_path, 0) == hashes_of(tmp_path, 1)
    logs = [path.read_text() for path in (cluster / "logs").glob("worker-*.err")]
    assert any("the policy has failed after step" in text for text in logs)
    events = [json.loads(line)["event"] for line in (tmp_path / "run" / "decisions.jsonl").read_text().splitlines()]
    assert (events[0], events[-1]) == ("start", "end")
    assert "decision" not in events
    assert events.count("policy_error") == 1
