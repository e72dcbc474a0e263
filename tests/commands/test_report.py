"""Records of runs, their picture, and the numbers of the demo."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from click.testing import CliRunner
from support.control_runs import start

from cgx_ray.cli import main
from cgx_ray.demo.summary import NetworkPhases, decision_delay, loss_target, make_rows, time_to_loss_s
from cgx_ray.demo.train import StepLog
from cgx_ray.errors import ConfigError
from cgx_ray.lab.events import LinkEvent
from cgx_ray.report.picture import draw_runs, plot_runs
from cgx_ray.report.record import RunRecord, load_run
from cgx_ray.report.result import Row, write_result
from cgx_ray.report.run_facts import spans

NUM_STEPS, HALF = 40, 20
T0 = 1_000_000.0


def write_run(folder: Path, name: str, *, slow_s: float, new_plan_at: int | None) -> RunRecord:
    """Write a run of `NUM_STEPS` steps, which take 0.5 s each, or `slow_s` each on the slow network.

    At `new_plan_at` a plan with which a slow step takes 0.6 s comes into force, decided one step earlier. It is on
    trial for 6 steps, then permanent under another version.
    """
    run_dir = folder / name
    run_dir.mkdir(parents=True)
    now, lines = T0, []
    for step in range(NUM_STEPS):
        is_new = new_plan_at is not None and step >= new_plan_at
        step_s = 0.5 if step <= HALF - 1 else (0.6 if is_new else slow_s)
        now += step_s
        parts = {f"{part}_s": 0.1 for part in ("compute", "encode", "exchange", "decode")}
        version = (3 if step >= new_plan_at + 6 else 1) if new_plan_at is not None and is_new else 0
        plan = {"plan_version": version, "plan": "qsgd:bits=4,bucket_size=128 over sra" if is_new else "dense"}
        loss = {"time": now, "step": step, "loss": 5.5 - 0.05 * step, "step_s": step_s}
        lines.append({"event": "step", **loss, **parts, **plan})
        if step == HALF - 1:
            change = LinkEvent(event="change", time=now + 0.01, step=step, change={"rate_bit_per_s": 1e8})
    end = {"event": "end", "time": now, "validation_loss": 3.5, "weights_identical": True, "weights_sha256": ["a"]}
    (run_dir / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, end]))
    record = RunRecord(run_dir)
    # The links existed before the workers.
    start = {"rate_bit_per_s": 1e9, "latency_s": 1e-3}
    record.note(LinkEvent(event="start", time=T0 - 9, change=start))
    record.note(change)
    if new_plan_at is not None:
        decided = {"event": "decision", "time": lines[new_plan_at - 1]["time"], "step": new_plan_at - 1}
        old, new = {"version": 0, "plan": "dense"}, {"version": 1, "plan": "qsgd:bits=4,bucket_size=128 over sra"}
        rest = {"kind": "replace", "old": old, "new": new, "reason": "slow", "inputs": inputs(0.09)}
        # Made after the change, but with measurements from before it.
        keep = {"event": "decision", "time": change.time + 0.1, "step": HALF - 1, "kind": "keep"}
        keep |= {"old": old, "new": old, "reason": "late", "inputs": inputs(0.9)}
        predicted = {"predicted_step_s": 0.6, "predicted_dense_s": 3.0}
        outcome = {"event": "outcome", "time": decided["time"] + 3, "step": new_plan_at + 4, "measured_step_s": 0.6}
        journal = [{**keep, **predicted}, {**decided, **rest, **predicted}, outcome]
        (run_dir / "decisions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in journal))
    return load_run(run_dir)


def inputs(bandwidth_gbps: float) -> dict[str, float]:
    return {"world_size": 4, "bandwidth_gbps": bandwidth_gbps, "latency_ms": 1.1}


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


def test_the_start_of_the_network_is_no_change(runs):
    dense, adaptive = runs
    assert [event.event for event in dense.network] == ["start", "change"]
    assert [event.change for event in adaptive.changes] == [{"rate_bit_per_s": 1e8}]


def test_phases_leave_out_the_warmup_and_the_step_in_which_the_network_changed(runs):
    dense, _ = runs
    phases = NetworkPhases.of(dense)
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
    assert rows["decision_delay"].value == 3
    assert all(row.met is not False for row in rows.values())


def test_a_run_that_never_decides_misses_the_goal_of_the_delay(runs, tmp_path):
    silent = write_run(tmp_path / "other", "adaptive", slow_s=3.0, new_plan_at=None)
    assert decision_delay(silent) is None
    rows = {row.name: row for row in make_rows(runs[0], silent)}
    assert rows["decision_delay"].value is None
    assert rows["decision_delay"].met is False
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
    assert set(result) == {"bench", "date", "commit", "machine", "rows"}
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


def test_each_of_many_runs_has_a_colour(runs):
    _, adaptive = runs
    named = [copy.copy(adaptive) for _ in range(4)]
    for number, record in enumerate(named):
        record.name = f"run {number}"
    (axes,) = (axes for axes in draw_runs([*runs, *named], title="").axes if axes.get_ylabel().startswith("loss"))
    shown, names = axes.get_legend_handles_labels()
    assert names == ["dense", "adaptive", "run 0", "run 1", "run 2", "run 3"]
    assert len({line.get_color() for line in shown}) == len(names)


def test_many_runs_show_their_whole_step_times_and_no_decisions(runs, tmp_path):
    short, long = (copy.deepcopy(load_run(runs[1].run_dir, tmp_path / "none.jsonl")) for _ in range(2))
    short.steps.clear()
    long.steps.clear()
    long.decisions[-1]["time"] += 100
    (axes,) = draw_runs([long, short, short], title="").axes
    assert axes.get_xlim()[1] > 100
    assert axes.get_legend_handles_labels()[1] == ["adaptive"] * 3
    assert [axes.get_title() for axes in draw_runs([*runs, short], title="").axes] == ["Step time"]
    # Plain DDP has steps and no journal.
    plain = copy.copy(runs[0])
    plain.decisions, plain.progress, plain.outcomes = [], [], []
    (axes, *_) = draw_runs([plain, short], title="").axes
    assert len(axes.get_lines()[0].get_xdata()) == NUM_STEPS


@pytest.mark.parametrize(("plan", "longest_s"), [("dense", 0.5), ("qsgd 4-bit over sra, every 4 steps", 2.5)])
def test_a_pause_before_a_step_is_no_part_of_it_but_the_exchange_of_a_round_is(runs, plan, longest_s):
    record = copy.copy(runs[0])
    long_s = [0.5 if number % 4 else 2.5 for number in range(NUM_STEPS)]
    record.steps = [replace(line, step_s=s, plan=plan) for line, s in zip(record.steps, long_s, strict=True)]
    assert [span.step_s for span in spans(record)] == [min(one, longest_s) for one in long_s[1:]]


def panel(record: RunRecord, label: str) -> dict[str, list[tuple[float, float]]]:
    """Return the points of the panel whose y label begins with `label`, by their name in the legend."""
    (axes,) = (axes for axes in draw_runs([record], title="").axes if axes.get_ylabel().startswith(label))
    lines = zip(*axes.get_legend_handles_labels(), strict=True)
    return {name: [(float(x), float(y)) for x, y in line.get_xydata()] for line, name in lines}


def bottom_label(record: RunRecord) -> str:
    return draw_runs([record], title="").axes[-1].get_xlabel()


def test_the_legend_of_a_run_without_steps_fits_in_the_picture(runs):
    _, adaptive = runs
    (adaptive.run_dir / "steps.jsonl").unlink()
    figure = draw_runs([load_run(adaptive.run_dir, adaptive.run_dir / "none.jsonl")], title="")
    figure.draw_without_rendering()
    legend, whole = figure.legends[0].get_window_extent(), figure.bbox
    assert whole.x0 <= legend.x0
    assert legend.x1 <= whole.x1


def test_the_network_is_drawn_over_steps_where_the_run_has_them(runs):
    _, adaptive = runs
    adaptive.decisions[0]["new"]["version"], end = 3, NUM_STEPS - 0.5
    rate, latency = panel(adaptive, "rate"), panel(adaptive, "latency")
    # Set before step 0, and between the steps HALF - 1 and HALF; a schedule in seconds knows no steps.
    assert rate["all links, as set"] == [(-0.5, 1), (HALF - 0.5, 0.1), (end, 0.1)]
    assert latency["all links, as set"] == [(-0.5, 1), (end, 1)]
    assert rate["network estimated, plan kept"] == [(HALF - 1, 0.9)]
    assert rate["network estimated, plan changed"] == [(HALF + 2, 0.09)]
    assert [x for x, _ in rate["the network changes"]] == [HALF - 0.5] * 2
    assert [x for x, _ in rate["new plan"]] == [HALF + 3] * 2


def test_a_latency_that_no_step_has_measured_is_drawn_as_assumed(tmp_path):
    # As within a machine, where a decision's latency is a default.
    run = start(tmp_path)
    run.gbps = 0.1
    run.run(40)
    names = panel(load_run(tmp_path), "latency")
    assert any(name.startswith("network estimated, ") for name in names)
    record = load_run(tmp_path)
    for line in record.progress:
        line["latency_ms"] = None
    names = panel(record, "latency")
    assert any(name.startswith("latency not measured, assumed, ") for name in names)
    assert not any("estimated" in name for name in names)
    assert any(name.startswith("network estimated, ") for name in panel(record, "rate"))


def test_the_network_is_drawn_over_seconds_where_steps_are_not_known(runs, tmp_path):
    _, adaptive = runs
    (adaptive.run_dir / "steps.jsonl").unlink()
    events = tmp_path / "events.jsonl"
    # As the lab writes them for a job that reports steps. Host 1 is slow from the start, host 2 is cut off for a while.
    lines = [
        {"event": "start", "time": T0, "change": {"rate_bit_per_s": 1e9, "latency_s": 0.0}},
        {"event": "start", "time": T0, "host": 1, "direction": "up", "change": {"rate_bit_per_s": 2e8}},
        {"event": "change", "time": T0 + 10, "step": 20, "change": {"rate_bit_per_s": 1e8}},
        {"event": "change", "time": T0 + 12, "step": 22, "host": 2, "change": {}, "is_connected": False},
        {"event": "change", "time": T0 + 14, "step": 24, "host": 2, "change": {}, "is_connected": True},
    ]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rate = panel(load_run(adaptive.run_dir, events), "rate")
    decided, end = 10 + 3 * 3.0, 10 + 3 * 3.0 + 3
    assert rate["the others, as set"] == [(0, 1), (10, 0.1), (end, 0.1)]
    assert rate["host 1 up, as set"] == [(0, 0.2), (10, 0.1), (end, 0.1)]
    assert str(rate["host 2, as set"]) == str([(0.0, 1.0), (10.0, 0.1), (12.0, np.nan), (14.0, 0.1), (end, 0.1)])
    assert rate["network estimated, plan changed"] == [(decided, 0.09)]
    assert [x for x, _ in rate["new plan"]] == [decided] * 2
    assert bottom_label(load_run(adaptive.run_dir, events)) == "seconds since the first event of the network"
    # Without events the network as set is not drawn.
    unset = panel(load_run(adaptive.run_dir, tmp_path / "none.jsonl"), "rate")
    assert set(unset) == {"network estimated, plan kept", "network estimated, plan changed", "new plan"}
    assert bottom_label(load_run(adaptive.run_dir, tmp_path / "none.jsonl")) == "seconds since the first decision"
    steps = panel(load_run(adaptive.run_dir, events), "seconds per step")
    assert steps["adaptive"] == [(end, 0.6)]
    assert steps["step predicted, plan changed"] == [(decided, 0.6)]
    assert [y for _, y in steps["dense step predicted"]] == [3.0] * 3


def test_the_report_draws_a_run_that_still_trains(runs, tmp_path):
    _, adaptive = runs
    with (adaptive.run_dir / "decisions.jsonl").open("a") as file:
        file.write('{"event": "deci')
    picture = tmp_path / "report.png"
    page = tmp_path / "report.html"
    done = CliRunner().invoke(main, ["report", str(adaptive.run_dir), "--plot", str(picture), "--html", str(page)])
    assert done.exit_code == 0, done.output
    verdict, cut, said = done.output.splitlines()
    plan = "qsgd:bits=4,bucket_size=128 over sra"
    assert verdict == f"cgx_ray: 0 steps under {plan}; how fast dense would be is not known."
    assert cut.startswith(f"{adaptive.run_dir / 'decisions.jsonl'}: the last line is cut, and left out: ")
    assert cut in page.read_text()
    assert said == f"2 decisions, 1 for another plan; picture: {picture}; report: {page}"
    assert picture.read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        (None, None, "there is no folder "),
        ("steps.jsonl", "", "holds no decision and no step, neither in decisions.jsonl, which a run with CGXConfig"),
        ("other.jsonl", None, "holds no links; give the file that `cgx-ray lab run --events` wrote"),
    ],
)
def test_what_cannot_be_drawn_is_one_clear_error(tmp_path, file, line, message):
    run_dir = tmp_path / "adaptive"
    if file is not None:
        write_run(tmp_path, "adaptive", slow_s=3.0, new_plan_at=None if file == "steps.jsonl" else HALF + 3)
    if line:
        with (run_dir / file).open("a") as lines:
            lines.write(line + "\n")
    words = ["--events", str(run_dir / file)] if file == "other.jsonl" else []
    files = ["--plot", str(tmp_path / "x.png"), "--html", str(tmp_path / "x.html")]
    done = CliRunner().invoke(main, ["report", str(run_dir), *files, *words])
    assert done.exit_code == 2, done.output
    assert message in done.output.replace("\n", " ")
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("file", "line", "message"),
    [
        ("decisions.jsonl", "{nonsense", "decisions.jsonl, line 4 is broken (Expecting property name"),
        ("decisions.jsonl", "[1]", "decisions.jsonl, line 4 is broken ($: [1] is not of type 'object')"),
        (
            "decisions.jsonl",
            '{"event": "outcome", "time": 1, "step": 2}',
            "line 4 is broken ($: 'measured_step_s' is a required property)",
        ),
        ("steps.jsonl", '{"event": "step", "ti', "steps.jsonl, line 42 is broken (Invalid control character"),
        ("network.jsonl", '{"event": "start", "time": 1, "change": {"rate": 5}}', "network.jsonl, line 3 is broken"),
        ("network.jsonl", '{"event": "start", "time": 1}', "network.jsonl, line 3 is broken (TypeError"),
        (
            "network.jsonl",
            '{"event": "start", "time": "soon", "change": {}}',
            "line 3 is broken (LabError: time 'soon'",
        ),
        ("network.jsonl", '{"event": "change", "time": 1, "step": "a", "change": {}}', "LabError: step 'a'"),
        ("network.jsonl", '{"event": "change", "time": 1, "host": "a", "change": {}}', "LabError: host 'a'"),
        ("network.jsonl", '{"event": "change", "time": 1, "change": [1]}', "LabError: change [1]"),
    ],
)
def test_a_broken_line_is_skipped_and_named(runs, tmp_path, file, line, message):
    _, adaptive = runs
    with (adaptive.run_dir / file).open("a") as lines:
        lines.write(line + "\n")
    again = load_run(adaptive.run_dir)
    (broken,) = again.broken
    assert message in broken
    assert (again.steps, again.decisions, again.network) == (adaptive.steps, adaptive.decisions, adaptive.network)


def test_a_loss_that_was_not_finite_is_null_in_the_file_and_nan_here(tmp_path):
    with StepLog(tmp_path, 0) as log:
        log.step(0, float("inf"), None)
        log.step(1, 2.5, None)
        log.end(float("nan"), ["a"])
    assert '"loss": null' in (tmp_path / "steps.jsonl").read_text()
    record = load_run(tmp_path)
    assert record.broken == []
    assert [str(line.loss) for line in record.steps] == ["nan", "2.5"]
    assert record.end is not None
    assert math.isnan(record.end["validation_loss"])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("time", "soon", "$.time: 'soon' is not of type 'number'"),
        ("step", None, "$.step: None is not of type 'integer'"),
        ("new", [1], "$.new: [1] is not of type 'object'"),
        ("new", {"plan": 1}, "$.new.plan: 1 is not of type 'string'"),
        ("inputs", None, "$.inputs: None is not of type 'object'"),
        ("inputs", {"world_size": 4, "bandwidth_gbps": 1}, "$.inputs: 'latency_ms' is a required property"),
        (
            "inputs",
            {"world_size": "four", "bandwidth_gbps": 1, "latency_ms": 1},
            "$.inputs.world_size: 'four' is not of type 'integer'",
        ),
    ],
)
def test_a_decision_that_cannot_be_drawn_is_named_by_its_line(runs, name, value, message):
    _, adaptive = runs
    path = adaptive.run_dir / "decisions.jsonl"
    line = adaptive.decisions[0] | {name: value}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    again = load_run(adaptive.run_dir)
    assert again.broken == [f"{path}, line 4 is broken ({message})"]
    assert again.decisions == adaptive.decisions


def test_the_report_of_a_demo_draws_its_adaptive_run_beside_the_dense_one(runs, tmp_path):
    num_new = NUM_STEPS - HALF - 3
    line = {"event": "progress", "time": T0 + 99, "step": NUM_STEPS - 1, "num_steps": num_new, "version": 1}
    seconds = dict.fromkeys(("step_s", "compute_s", "encode_s", "exchange_s", "decode_s"), 0.6)
    rest = {"wire_bytes": 1, "dense_bytes": 1, "bandwidth_gbps": None, "latency_ms": None}
    with (tmp_path / "adaptive" / "decisions.jsonl").open("a") as file:
        file.write(json.dumps({**line, **seconds, **rest, "slow_ranks": [], "silent_nodes": []}) + "\n")
    picture = tmp_path / "demo.png"
    page = tmp_path / "report.html"
    done = CliRunner().invoke(main, ["report", str(tmp_path), "--plot", str(picture), "--html", str(page)])
    assert done.exit_code == 0, done.output
    verdict, said = done.output.splitlines()
    assert verdict.startswith("cgx_ray: 2.4x faster than dense ("), verdict
    assert verdict.endswith(" instead of 1.78 s per step); qsgd:bits=4,bucket_size=128 over sra since step 23."), (
        "as the dense run measured it"
    )
    assert said == f"2 decisions, 1 for another plan; picture: {picture}; report: {page}"
    pixels = matplotlib.image.imread(picture)[..., :3]
    for name, color in (("dense", (0xD5, 0x5E, 0x00)), ("adaptive", (0x00, 0x72, 0xB2))):
        num_pixels = int((np.abs(pixels * 255 - color).max(axis=-1) < 2).sum())
        assert num_pixels > 1000, f"{num_pixels} pixels in the colour of {name}"


def test_the_steps_show_the_plan_where_the_journal_ends_before_them(tmp_path):
    for name, new_plan_at in (("dense", None), ("adaptive", HALF + 3)):
        write_run(tmp_path, name, slow_s=3.0, new_plan_at=new_plan_at)
    files = ["--plot", str(tmp_path / "x.png"), "--html", str(tmp_path / "x.html")]
    verdict = CliRunner().invoke(main, ["report", str(tmp_path), *files]).output.splitlines()[0]
    assert verdict.endswith("; qsgd:bits=4,bucket_size=128 over sra since step 23."), verdict


def test_the_report_of_a_demo_without_its_dense_run_draws_the_adaptive_one(tmp_path):
    write_run(tmp_path, "adaptive", slow_s=3.0, new_plan_at=HALF + 3)
    files = ["--plot", str(tmp_path / "x.png"), "--html", str(tmp_path / "x.html")]
    done = CliRunner().invoke(main, ["report", str(tmp_path), *files])
    assert done.exit_code == 0, done.output


def test_a_folder_with_neither_a_run_nor_a_demo_is_one_error_that_names_both_files(tmp_path):
    files = ["--plot", str(tmp_path / "x.png"), "--html", str(tmp_path / "x.html")]
    done = CliRunner().invoke(main, ["report", str(tmp_path), *files])
    assert done.exit_code == 2
    output = done.output.replace("\n", " ")
    assert f"{tmp_path} holds no decision and no step, neither in decisions.jsonl" in output
    assert "such as a demo's adaptive/decisions.jsonl" in output
