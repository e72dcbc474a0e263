"""Records of runs and the picture made from them, and the numbers of the demo."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from cgx_ray.bench.result import Row, write_result
from cgx_ray.demo.summary import Phases, decision_delay, loss_target, make_rows, time_to_loss_s
from cgx_ray.errors import ConfigError
from cgx_ray.report.plots import plot_runs
from cgx_ray.report.record import RateChange, RunRecord, load_run

NUM_STEPS, HALF = 40, 20
T0 = 1_000_000.0


def write_run(folder: Path, name: str, *, slow_s: float, new_plan_at: int | None) -> RunRecord:
    """A run of `NUM_STEPS` steps, 0.5 s each and `slow_s` each on the slow network.

    At `new_plan_at` a plan with which a slow step takes 0.6 s comes into force, decided one step earlier.
    """
    run_dir = folder / name
    run_dir.mkdir(parents=True)
    now, lines = T0, []
    for step in range(NUM_STEPS):
        is_new = new_plan_at is not None and step >= new_plan_at
        step_s = 0.5 if step <= HALF - 1 else (0.6 if is_new else slow_s)
        now += step_s
        parts = {f"{part}_s": 0.1 for part in ("compute", "encode", "exchange", "decode")}
        plan = {"plan_version": int(is_new), "plan": "qsgd:bits=4,bucket_size=128 over sra" if is_new else "dense"}
        loss = {"time": now, "step": step, "loss": 5.5 - 0.05 * step, "step_s": step_s}
        lines.append({"event": "step", **loss, **parts, **plan})
        if step == HALF - 1:
            change = RateChange(time=now + 0.01, step=step, rate_bit_per_s=1e8)
    end = {"event": "end", "time": now, "validation_loss": 3.5, "weights_identical": True, "weights_sha256": ["a"]}
    (run_dir / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, end]))
    record = RunRecord(run_dir)
    record.note_rate(change)
    if new_plan_at is not None:
        decided = {"event": "decision", "time": lines[new_plan_at - 1]["time"], "step": new_plan_at - 1}
        old, new = {"version": 0, "plan": "dense"}, {"version": 1, "plan": "qsgd:bits=4,bucket_size=128 over sra"}
        rest = {"kind": "replace", "old": old, "new": new, "reason": "slow", "inputs": {"bandwidth_gbps": 0.09}}
        # Made after the change, but with what was measured before it.
        keep = {"event": "decision", "time": change.time + 0.1, "step": HALF - 1, "kind": "keep"}
        keep |= {"old": old, "new": old, "reason": "late", "inputs": {"bandwidth_gbps": 0.9}}
        outcome = {"event": "outcome", "time": decided["time"] + 3, "step": new_plan_at + 4}
        journal = [keep, {**decided, **rest}, outcome]
        (run_dir / "decisions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in journal))
    return load_run(run_dir)


@pytest.fixture
def runs(tmp_path):
    return (
        write_run(tmp_path, "dense", slow_s=3.0, new_plan_at=None),
        write_run(tmp_path, "adaptive", slow_s=3.0, new_plan_at=HALF + 3),
    )


def test_a_record_follows_files_that_are_still_being_written(tmp_path):
    whole = write_run(tmp_path, "whole", slow_s=1.0, new_plan_at=None)
    text = (whole.run_dir / "steps.jsonl").read_text()
    (tmp_path / "growing").mkdir()
    record = RunRecord(tmp_path / "growing")
    assert not record.poll()
    middle = len(text) // 2
    (record.run_dir / "steps.jsonl").write_text(text[:middle])
    assert record.poll()
    assert 0 < len(record.steps) < NUM_STEPS
    assert not record.poll()
    (record.run_dir / "steps.jsonl").write_text(text)
    assert record.poll()
    assert record.steps == whole.steps
    assert record.end == whole.end


def test_decisions_and_outcomes_are_told_apart(runs):
    _, adaptive = runs
    assert [line["kind"] for line in adaptive.decisions] == ["keep", "replace"]
    assert len(adaptive.outcomes) == 1


def test_phases_leave_out_the_warmup_and_the_step_in_which_the_network_changed(runs):
    dense, _ = runs
    phases = Phases.of(dense)
    assert [line.step for line in phases.fast] == list(range(3, HALF))
    assert [line.step for line in phases.slow] == list(range(HALF + 1, NUM_STEPS))


def test_the_rows_hold_the_numbers_of_the_runs(runs):
    rows = {row.name: row for row in make_rows(*runs)}
    assert rows["slow_phase_speedup"].value == pytest.approx(3.0 / 0.6)
    assert rows["slow_phase_step_s"].baseline == pytest.approx(3.0)
    assert rows["fast_phase_ratio"].value == pytest.approx(1.0)
    assert rows["validation_loss_ratio"].value == 1.0
    # Dense: 20 x 0.5 + 20 x 3; adaptive: 20 x 0.5 + 3 x 3 + 17 x 0.6.
    assert rows["time_to_loss_s"].baseline == pytest.approx(70, abs=3.1)
    assert rows["time_to_loss_ratio"].value == pytest.approx(70 / 29.2, rel=0.02)
    assert rows["decision_delay_steps"].value == 3
    assert rows["decision_delay_s"].value == pytest.approx(9.0, abs=0.1)
    assert rows["decision_delay_s"].met, "later than 5 s, but within 20 steps"
    assert all(row.met is not False for row in rows.values())


def test_a_run_that_never_decides_meets_neither_delay_goal(runs, tmp_path):
    silent = write_run(tmp_path / "other", "adaptive", slow_s=3.0, new_plan_at=None)
    assert decision_delay(silent) is None
    rows = {row.name: row for row in make_rows(runs[0], silent)}
    assert rows["decision_delay_steps"].value is None
    assert rows["decision_delay_steps"].met is False
    assert rows["slow_phase_speedup"].met is False


def test_the_time_to_a_loss_that_is_never_reached_is_none(runs):
    dense, adaptive = runs
    assert time_to_loss_s(adaptive, 0.1) is None
    assert time_to_loss_s(dense, loss_target(dense)) is not None


def test_a_goal_is_judged_on_the_ratio_if_there_is_one():
    assert Row(name="x", value=9.0, unit="s", ratio=1.04, goal="<= 1.05").met is True
    assert Row(name="x", value=1.06, unit="x", goal="<= 1.05").met is False
    assert Row(name="x", value=None, unit="x", goal=">= 3").met is False
    assert Row(name="x", value=1.0, unit="x").met is None
    with pytest.raises(ConfigError, match="is not a goal"):
        Row(name="x", value=1.0, unit="x", goal="about 3")


def test_results_go_to_standard_output_in_the_common_shape(capsys):
    write_result("demo", [Row(name="x", value=2.0, unit="x", goal=">= 3")], "-")
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"bench", "commit", "machine", "rows"}
    assert set(result["rows"][0]) == {"name", "value", "unit", "baseline", "limit", "ratio", "goal", "met"}
    assert result["rows"][0]["met"] is False
    assert result["machine"]["cores"] >= 1


def test_the_picture_shows_both_runs(runs, tmp_path):
    path = tmp_path / "pictures" / "demo.png"
    plot_runs(runs, path, title="4 workers")
    pixels = matplotlib.image.imread(path)[..., :3]
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 1000
    for name, color in (("dense", (0xD5, 0x5E, 0x00)), ("adaptive", (0x00, 0x72, 0xB2))):
        num_pixels = int((np.abs(pixels * 255 - color).max(axis=-1) < 2).sum())
        assert num_pixels > 1000, f"{num_pixels} pixels in the colour of {name}"
