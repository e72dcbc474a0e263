"""Elastic Ray Train: the number of workers changes with the nodes of a real local cluster."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ray_processes import ENV, RayNodes, end_with_children

SIZES = (4, 3, 1, 4)


def _states(log: Path, group: int, end: str) -> list[dict[str, Any]]:
    paths = [log / f"group{group}-{end}-rank{rank}-of-{SIZES[group]}.pt" for rank in range(SIZES[group])]
    return [torch.load(path, weights_only=True) for path in paths]


def _owed(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the mean of the residuals by layer, which is the gradient that is not sent yet."""
    names = states[0]["residuals"]
    return {name: torch.stack([state["residuals"][name] for state in states]).mean(0) for name in names}


def _wait_for(log: Path, group: int) -> None:
    deadline = time.monotonic() + 240
    while len(list(log.glob(f"group{group}-waits-*"))) < SIZES[group]:
        assert time.monotonic() < deadline, sorted(path.name for path in log.iterdir())
        time.sleep(0.2)
    # Ray's controller polls for checkpoints and resumes only from one that it has seen.
    time.sleep(3)


def _train_elastically(nodes: RayNodes, tmp_path: Path, log: Path) -> list[BaseException]:
    """Train while nodes are killed and one is added; return the errors of doing so."""
    two, one = nodes.add_node(num_cpus=2), nodes.add_node(num_cpus=1)
    errors: list[BaseException] = []

    def resize() -> None:
        try:
            _wait_for(log, 0)
            end_with_children(one)
            _wait_for(log, 1)
            end_with_children(two)
            _wait_for(log, 2)
            nodes.add_node(num_cpus=3)
        except BaseException as error:  # noqa: BLE001 - the caller fails with it
            errors.append(error)
            (log / "stop").touch()

    thread = threading.Thread(target=resize)
    thread.start()
    # In a process of its own: Ray reads RAY_AUTH_MODE once per process, and other tests need tokens.
    done = subprocess.run(
        [sys.executable, "-m", "support.elastic_driver", nodes.address, str(tmp_path), str(log), *map(str, SIZES)],
        cwd=Path(__file__).parents[1],
        env={**ENV, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20"},
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    thread.join()
    assert done.returncode == 0, done.stderr[-3000:]
    return errors


# Four worker groups start one after the other, each in 20 to 60 s.
@pytest.mark.slow
@pytest.mark.fault("nodes leave and come: 4, 3, 1 and 4 workers with Ray", "the mean of residuals stays the same")
@pytest.mark.timeout(900)
def test_residuals_keep_their_sum_while_workers_leave_and_come(tmp_path: Path) -> None:
    """4 -> 3 -> 1 -> 4 workers: nodes are killed, one joins. The mean of residuals is the gradient not sent yet."""
    log = tmp_path / "log"
    log.mkdir()
    with tempfile.TemporaryDirectory(prefix="cgx-", dir="/tmp", ignore_cleanup_errors=True) as temp_dir:
        nodes = RayNodes(tmp_path, temp_dir, num_cpus=1)
        try:
            errors = _train_elastically(nodes, tmp_path, log)
        finally:
            nodes.end()
    assert errors == []
    for group in range(1, len(SIZES)):
        before = _owed(_states(log, group - 1, "end"))
        after = _owed(_states(log, group, "begin"))
        assert set(after) == {"0.weight", "2.weight"}
        for name, residual in before.items():
            assert residual.norm() > 0
            torch.testing.assert_close(after[name], residual, rtol=0, atol=1e-6)
    # Alone, a worker exchanges nothing and keeps the residuals that it has taken over.
    assert [_states(log, group, "begin")[0]["step"] for group in range(4)] == [0, 6, 12, 12]
