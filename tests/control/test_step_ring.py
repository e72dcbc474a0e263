"""Joined steps in files of bounded size: the same version decides the same, and a stranger's file runs nothing."""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.control_runs import COSTS, DENSITIES, LAYERS, WORLD, FakeTraining

from cgx_ray.control import policy as policy_module
from cgx_ray.control.controller import Controller
from cgx_ray.control.journal import Journal
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.loop_process import LoopProcess
from cgx_ray.control.loop_work import LoopWork
from cgx_ray.control.policy import AdaptivePolicy
from cgx_ray.control.step_replay import StepReplay
from cgx_ray.control.step_ring import NAME, OLD_NAME, RETRY_S, StepRing
from cgx_ray.errors import ConfigError
from cgx_ray.plan import make_plan
from cgx_ray.planner.options import candidate_options

MIB = 1 << 20


def begin(folder: Path, max_bytes: int) -> FakeTraining:
    policy = AdaptivePolicy(candidate_options(DENSITIES), min_gain=0.8)
    loop = ControlLoop(policy, Journal(folder / "decisions.jsonl"), ring=StepRing(folder, max_bytes))
    loop.register(LAYERS, make_plan(LAYERS, version=0, world_size=WORLD), COSTS)
    return FakeTraining(loop, step=1)


def be_eventful(run: FakeTraining) -> int:
    """Train on other networks, with slow plans, bans, a fallen gain and an unsteady link; return the decisions."""
    decisions = run.run(10)
    for gbps, slowdown, gain, steps in ((0.05, 1.0, 0.3, 40), (0.05, 8.0, 0.95, 60), (1.0, 1.0, 0.2, 30)):
        run.gbps, run.slowdown = gbps, slowdown
        run.gain["topk:density=0.01"] = gain
        decisions += run.run(steps)
    for index in range(24):
        run.gbps = 0.05 if index % 2 else 1.0
        decisions += run.run(5)
    return len(decisions)


def again(folder: Path) -> tuple[StepReplay, list[Any]]:
    replay = StepReplay()
    return replay, list(replay.run(folder, lambda name, part: None))


def test_the_loop_decides_the_same_again_over_the_whole_run(tmp_path: Path) -> None:
    run = begin(tmp_path, 64 * MIB)
    num_decisions = be_eventful(run)
    replay, _ = again(tmp_path)
    assert num_decisions >= 15
    assert (replay.num_again, replay.num_same, replay.num_other_prediction) == (num_decisions, num_decisions, 0)
    assert (replay.num_unusable, replay.broken) == (0, [])
    # Numbers of steps begin with 1.
    assert replay.num_steps == run.step - 1


def test_the_files_keep_the_newest_steps_within_their_bound(tmp_path: Path) -> None:
    max_bytes = 100_000
    run = begin(tmp_path, max_bytes)
    for _ in range(3):
        be_eventful(run)
        sizes = [(tmp_path / name).stat().st_size for name in (NAME, OLD_NAME)]
        assert max(sizes) <= max_bytes // 2
        replay, found = again(tmp_path)
        assert 0 < replay.num_steps < run.step - 1
        assert replay.num_same == replay.num_again > 0
        assert found[-1].step > run.step - 30
    assert run.loop.history().plans


def test_another_process_with_other_hashes_of_strings_decides_the_same(tmp_path: Path) -> None:
    be_eventful(begin(tmp_path, 64 * MIB))
    for seed in ("1", "2"):
        argv = [sys.executable, "-m", "cgx_ray.cli", "replay", "--steps", str(tmp_path)]
        done = subprocess.run(
            argv, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "(100%)" in done.stdout


def test_another_version_is_told_from_the_first_decision_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(tmp_path, 64 * MIB)
    be_eventful(run)
    monkeypatch.setattr(policy_module, "MIN_IMPROVEMENT", 0.9)
    replay, found = again(tmp_path)
    assert replay.num_different == 1
    assert found[-1].differs
    # The steps after it were made under another plan.
    assert replay.num_unusable > 0
    assert replay.num_steps + replay.num_unusable == run.step - 1


def test_a_worker_group_begins_a_file_and_the_one_before_stays(tmp_path: Path) -> None:
    first = begin(tmp_path, 64 * MIB)
    first.run(12)
    second = begin(tmp_path, 64 * MIB)
    second.run(15)
    replay, _ = again(tmp_path)
    assert replay.num_steps == 12 + 15
    assert replay.num_different == 0
    # A restart of the workers under the same controller.
    second.loop.register(LAYERS, make_plan(LAYERS, version=0, world_size=WORLD), COSTS)
    second.run(5)
    replay, _ = again(tmp_path)
    assert (replay.num_steps, replay.num_different) == (15 + 5, 0)


def test_a_half_record_ends_its_file_and_is_named(tmp_path: Path) -> None:
    begin(tmp_path, 64 * MIB).run(12)
    whole = (tmp_path / NAME).read_bytes()
    (tmp_path / NAME).write_bytes(whole[:-5])
    replay, _ = again(tmp_path)
    assert replay.num_steps == 11
    (broken,) = replay.broken
    assert broken.startswith(f"{NAME} ends at byte")
    assert "cut or damaged" in broken


class _Runs:
    """Pickled as a call of `function` with a path."""

    def __init__(self, function: Callable[..., Any], path: Path) -> None:
        self.function, self.path = function, path

    def __reduce__(self) -> Any:
        return self.function, (str(self.path),)


@pytest.mark.parametrize("function", [os.mkdir, Controller, LoopProcess, LoopWork])
def test_a_strangers_file_runs_nothing(function: Callable[..., Any], tmp_path: Path) -> None:
    body = zlib.compress(pickle.dumps(_Runs(function, tmp_path / "made")))
    (tmp_path / NAME).write_bytes(struct.pack("<II", len(body), zlib.crc32(body)) + body)
    replay, found = again(tmp_path)
    assert found == []
    assert f"{function.__name__} is no value of the control loop" in replay.broken[0]
    assert not (tmp_path / "made").exists()


def test_a_folder_without_steps_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"has no {NAME}; give the folder of a run whose policy decides"):
        again(tmp_path)


def test_a_state_that_is_larger_than_the_bound_is_said_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = begin(tmp_path, 1000)
    run.run(20)
    assert caplog.text.count("training goes on") == 1
    assert "more than half of replay_bytes" in caplog.text
    assert not (tmp_path / NAME).exists()


def test_a_full_disk_costs_steps_and_what_comes_after_it_can_be_replayed(tmp_path: Path) -> None:
    # The limit on a file's size acts as a full disk: part of a record is written, then an error is raised.
    script = f"""
import resource, signal, sys
from pathlib import Path
sys.path[:0] = {sys.path!r}
from test_step_ring import NAME, RETRY_S, MIB, begin
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
run = begin(folder, 64 * MIB)
run.run(12)
size = (folder / NAME).stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
run.run(5)
assert not (folder / NAME).exists()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
run.run(int(RETRY_S) + 10)
"""
    folder = tmp_path / "run"
    folder.mkdir()
    argv = [sys.executable, "-c", script, str(folder)]
    here = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(argv, env=here, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"steps are not kept in {folder / NAME}") == 1
    replay, _ = again(folder)
    assert 5 < replay.num_steps < RETRY_S
    assert replay.num_different == 0
