"""`python -m bench chaos`: faults as values, what its numbers are judged by, and one small run with real faults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.emulated import needs_lab

from bench.__main__ import bench
from bench.chaos.cluster import OURS
from bench.chaos.faults import IN_LOOP, ChaosKind, ChaosOptions, quick_options
from bench.chaos.measure import ChaosNumbers, ChaosResult, Survived, chaos_rows
from cgx_ray.errors import ConfigError
from cgx_ray.report.record import RunRecord
from cgx_ray.report.result import Row

OPTIONS = ChaosOptions(seed=7, steps=3000, faults=50)


def test_a_seed_draws_the_same_faults_again_and_another_seed_others() -> None:
    faults = OPTIONS.draw()
    assert faults == OPTIONS.draw()
    assert faults != replace(OPTIONS, seed=8).draw()
    assert len(faults) == 50


def test_faults_are_of_all_kinds_in_the_middle_of_the_training_one_after_the_other() -> None:
    faults = OPTIONS.draw()
    numbers = [sum(fault.kind is kind for fault in faults) for kind in ChaosKind]
    assert max(numbers) - min(numbers) <= 1, numbers
    steps = [fault.step for fault in faults]
    assert steps == sorted(set(steps))
    assert 150 <= steps[0] < steps[-1] < 2550
    assert all(1 <= fault.seconds <= 5 for fault in faults)
    for fault in faults:
        is_rank = fault.kind in IN_LOOP or fault.kind is ChaosKind.RANK_STOPPED
        assert 0 <= fault.target < (OPTIONS.num_ranks if is_rank else OPTIONS.num_hosts)


def test_more_faults_than_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="give at most 80, or more minutes"):
        ChaosOptions(seed=0, steps=100, faults=81)


def result(folder: Path, *, loss: float, back_s: list[float], left: list[str]) -> ChaosResult:
    steps = RunRecord(folder)
    steps.end = {"validation_loss": loss, "weights_identical": True}
    outside = [fault for fault in OPTIONS.draw() if not fault.is_in_loop]
    return ChaosResult(
        steps=steps,
        run=RunRecord(folder),
        seconds=60.0,
        survived=[Survived(fault=fault, back_s=seconds) for fault, seconds in zip(outside, back_s, strict=False)],
        counts=dict.fromkeys(OURS, (40, 90 + len(left))),
        num_actors=dict.fromkeys(OURS, 2),
        ended_s=2.0,
        left=left,
    )


def rows_of(folder: Path, **harmed: Any) -> dict[str, Row]:
    quiet = result(folder, loss=2.0, back_s=[], left=[])
    numbers = ChaosNumbers(faults=OPTIONS.draw(), quiet=quiet, harmed=result(folder, **harmed))
    return {row.name: row for row in chaos_rows(OPTIONS, numbers)}


def test_goals_judge_loss_faults_and_what_is_left(tmp_path: Path) -> None:
    outside = sum(not fault.is_in_loop for fault in OPTIONS.draw())
    good = rows_of(tmp_path, loss=2.019, back_s=[1.0] * outside, left=[])
    assert {name for name, row in good.items() if row.met is False} == {"journal_is_ended"}
    bad = rows_of(tmp_path, loss=2.03, back_s=[1.0] * (outside - 1), left=["a segment"] * 13)
    missed = {name for name, row in bad.items() if row.met is False}
    files = {"worker_open_files", "agent_open_files", "controller_open_files", "loop_open_files"}
    assert missed == {"validation_loss", "faults_survived", "left_behind", "journal_is_ended"} | files
    assert bad["faults_survived"].value == 49


# Ray starts in two hosts, and then two trainings one after the other. Each fault has a test of its own.
@pytest.mark.slow
@pytest.mark.timeout(400)
@needs_lab(rates_only=False)
def test_a_quick_run_survives_its_faults_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "chaos.json"
    done = CliRunner().invoke(bench, ["chaos", "--quick", "--seed", "1", "--json", str(path)])
    assert done.exit_code == 0, done.output
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    options = quick_options(1)
    assert rows["seed"]["value"] == 1
    assert rows["steps"]["value"] == options.steps
    assert rows["faults_survived"]["value"] == options.faults, done.output
    assert {name: row["value"] for name, row in rows.items() if row["met"] is False} == {}, done.output
    assert rows["worker_threads"]["value"] > 0
    assert "to repeat it: python -m bench chaos --quick --seed 1" in done.output
    for fault in options.draw():
        assert str(fault.kind) in done.output
