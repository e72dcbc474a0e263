"""Lines of the journal about drift and faults."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
from click.testing import CliRunner
from markupsafe import escape
from support.control_runs import journal, registration, start

from cgx_ray.cli import main
from cgx_ray.control.journal.lines import MAX_TEXT, Journal
from cgx_ray.control.journal_events import MAX_FAULTS
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.policy import Static
from cgx_ray.monitors.sample import Fault
from cgx_ray.report.journal_schema import JOURNAL_SCHEMA
from cgx_ray.report.live_view import view_of_record
from cgx_ray.report.record import load_run
from cgx_ray.report.run_page import Extras, report_page


def check_schema(folder: Path) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(JOURNAL_SCHEMA.read_text()))
    for line in journal(folder, "fault", "drift"):
        validator.validate(line)


def test_weights_that_drift_apart_are_written_down_each_time_they_are_twice_as_far_apart(tmp_path: Path) -> None:
    run = start(tmp_path)
    for run.weight_drift in (0.0, None, 1e-7, 1.5e-7, 3e-7, 0.0, 4e-7):
        run.run(1)
    assert [(line["step"], line["weight_drift"]) for line in journal(tmp_path, "drift")] == [(3, 1e-7), (5, 3e-7)]
    check_schema(tmp_path)
    record = load_run(tmp_path)
    (note,) = view_of_record(record).notes
    assert "the weights of the ranks differ by rounding, by 3e-07 of a layer's norm at step 5" in note
    assert escape(note) in report_page("run", [record], Extras())


def test_the_first_faults_are_written_down_and_all_are_counted_over_restarts(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.run(2)
    text = "the weights of rank 1 differ"
    for rank in range(20):
        run.loop.add_fault(Fault(rank=rank, step=2, kind="weights_differ", text=text + "." * MAX_TEXT), time_s=3.0)
    lines = journal(tmp_path, "fault")
    assert [line["rank"] for line in lines] == list(range(MAX_FAULTS))
    assert {len(line["text"]) for line in lines} == {MAX_TEXT}
    check_schema(tmp_path)
    assert run.loop.facts().num_faults == {(rank, "weights_differ"): 1 for rank in range(20)}
    again = ControlLoop(Static(), Journal(tmp_path / "decisions.jsonl"), run.loop.history())
    again.register(registration())
    again.add_fault(Fault(rank=1, step=5, kind="time_out", text="late"), time_s=4.0)
    assert again.facts().num_faults[1, "weights_differ"] == again.facts().num_faults[1, "time_out"] == 1
    assert journal(tmp_path, "fault")[-1]["kind"] == "time_out"
    assert any(text in note for note in view_of_record(load_run(tmp_path)).notes)


def test_the_report_says_what_has_stopped_the_training(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.run(5)
    run.loop.add_fault(Fault(rank=1, step=5, kind="connection", text="rank 0 hung up"), 9.0)
    run.loop.end(10.0)
    files = ["--plot", str(tmp_path / "x.png"), "--html", str(tmp_path / "x.html")]
    done = CliRunner().invoke(main, ["report", str(tmp_path), *files])
    assert done.exit_code == 0, done.output
    says = "the training stopped on rank 1: rank 0 hung up"
    assert says in done.output
    assert says in (tmp_path / "x.html").read_text()
