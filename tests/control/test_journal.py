"""The journal: its schema, what a replay needs, and what a full disk or a killed process leaves."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from support.control_runs import LAYERS, FakeTraining, journal, start

from cgx_ray.control.joined_steps import JoinedStep, join
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.journal.progress import Progress
from cgx_ray.control.journal.recorded import read_layers, read_policy, read_situation, situation_fields
from cgx_ray.errors import ConfigError
from cgx_ray.monitors.sample import node_steps
from cgx_ray.plan import DENSE, CodecSpec, Option, options_of
from cgx_ray.report.journal_schema import JOURNAL_FORMAT, JOURNAL_SCHEMA
from cgx_ray.report.record import load_run

LINE = {"event": "outcome", "time": 1.0, "step": 1, "measured_step_s": 0.5}


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run with another network, slow plans, bans, a fallen gain and an unsteady link."""
    folder = tmp_path_factory.mktemp("run")
    run = start(folder)
    run.run(10)
    for gbps, slowdown, gain, steps in ((0.05, 1.0, 0.3, 40), (0.05, 8.0, 0.95, 60), (1.0, 1.0, 0.2, 30)):
        run.gbps, run.slowdown = gbps, slowdown
        run.gain["topk:density=0.01"] = gain
        run.run(steps)
    for index in range(24):
        run.gbps = 0.05 if index % 2 else 1.0
        run.run(5)
    run.loop.end(1e6)
    return folder


def test_every_line_fits_the_schema(eventful: Path) -> None:
    schema = json.loads(JOURNAL_SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    lines = [json.loads(line) for line in (eventful / "decisions.jsonl").read_text().splitlines()]
    for line in lines:
        jsonschema.Draft202012Validator(schema).validate(line)
    assert {line["event"] for line in lines} == {"start", "decision", "outcome", "progress", "end"}
    decisions = [line for line in lines if line["event"] == "decision"]
    assert {line["kind"] for line in decisions} == {"keep", "replace", "disable"}
    # Nothing is written that the schema does not describe.
    for event in ("start", "decision", "outcome", "progress", "end"):
        # Decisions by trial have a cause, see test_tried_codecs.py.
        known = {"event", "time", *schema["$defs"][event]["properties"]} - {"cause"}
        assert {name for line in lines if line["event"] == event for name in line} == known
    known = set(schema["$defs"]["situation"]["properties"])
    assert {name for line in decisions for name in line["situation"]} == known


def test_the_policy_decides_the_same_again_from_the_journal_alone(eventful: Path) -> None:
    (first,) = journal(eventful, "start")
    layers, policy = read_layers(first), read_policy(first)
    assert layers == LAYERS
    asked = [line for line in journal(eventful, "decision") if line["made_by"] in ("policy", "codec_trial")]
    assert len(asked) >= 8
    assert any(line["situation"]["banned"] for line in asked)
    assert any(line["situation"]["recent_links"] for line in asked)
    assert any(line["situation"]["errors"]["options"] for line in asked)
    assert all(line["situation"]["dense_groups"] for line in asked)
    for line in asked:
        situation = read_situation(line["situation"], layers)
        assert situation_fields(situation) == line["situation"]
        decision = policy.decide(situation)
        assert decision is not None
        if line["made_by"] == "policy":
            found = (decision.kind, decision.reason, decision.step_s, decision.dense_s)
            assert found == tuple(line[name] for name in ("kind", "reason", "predicted_step_s", "predicted_dense_s"))


def test_a_situation_of_an_earlier_version_has_errors_of_outcomes_and_no_dense_groups(eventful: Path) -> None:
    (first,) = journal(eventful, "start")
    fields = journal(eventful, "decision")[-1]["situation"]
    del fields["dense_groups"]
    fields["errors"]["misses"] = [0.5]
    fields |= {"dwell_s": None, "switch_s": 0.3}
    assert read_situation(fields, read_layers(first)).planner_input.dense_groups == ()


def test_every_option_can_be_read_from_its_text() -> None:
    codecs = [CodecSpec.parse(text) for text in ("none", "qsgd:bits=3", "topk:density=0.003,value_bits=8", "powersgd")]
    for option in (DENSE, *(option for codec in codecs for option in options_of(codec))):
        assert Option.parse(str(option)) == option
    for text in ("", "qsgd", "qsgd over nothing", "dense, sideways inside nodes"):
        with pytest.raises(ConfigError):
            Option.parse(text)


def test_progress_adds_up_to_all_steps_and_names_the_link(eventful: Path) -> None:
    lines = journal(eventful, "progress")
    (end,) = journal(eventful, "end")
    # Those of the last seconds are in no line.
    assert 0.8 * end["step"] < sum(line["num_steps"] for line in lines) <= end["step"]
    low, estimate, high = lines[2]["bandwidth_gbps"]
    assert low <= estimate <= high
    assert estimate == pytest.approx(1.0, rel=0.05)
    assert {line["loss"] for line in lines} == {None}
    versions = [line["version"] for line in lines]
    assert versions == sorted(versions)


def joined(run: FakeTraining, step: int, losses: Sequence[float | None] = (None, None)) -> JoinedStep:
    samples = [replace(run.sample(rank), step=step, loss=loss) for rank, loss in enumerate(losses)]
    return join(node_steps(samples), len(samples))


def test_progress_has_the_mean_of_the_losses_that_are_reported(tmp_path: Path) -> None:
    run = start(tmp_path)
    progress = Progress()
    lines = []
    for step, losses in enumerate([(9.0, 9.0), (3.0, 4.0), (math.nan, 5.0), (None, None)]):
        progress.add_step(joined(run, step, losses), None, 3.0 * step)
        lines += progress.due_lines(3.0 * step, time_s=3.0 * step, facts=run.loop.facts)
    assert [line["loss"] for line in lines] == [3.5, 5.0, None]


def test_progress_of_a_plan_that_has_ended_is_in_a_line_of_its_own(tmp_path: Path) -> None:
    run = start(tmp_path)
    progress = Progress()
    # The first step of a training is in no line.
    for step, speed_up in enumerate((9.0, 1.0, 1.0, None, 3.0, 5.0)):
        version = 0 if step < 3 else 1
        progress.add_step(replace(joined(run, step), plan_version=version), speed_up, 0.0)
    lines = [*progress.due_lines(0.1, 0.1, run.loop.facts), *progress.due_lines(2.1, 2.1, run.loop.facts)]
    found = [(line["version"], line["step"], line["num_steps"], line["speed_up"]) for line in lines]
    assert found == [(0, 2, 2, 1.0), (1, 5, 3, 4.0)]


@pytest.mark.fault(
    "killed in the middle of a line of the journal", "the next line is whole; readers name the broken one"
)
def test_a_line_after_a_half_written_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text('{"event": "decis')  # killed in mid-line
    log = Journal(path)
    log.write(LINE)
    log.write(LINE)
    assert path.read_text().splitlines()[1:] == [json.dumps(LINE)] * 2
    record = load_run(tmp_path)
    assert len(record.outcomes) == 2
    (broken,) = record.broken
    assert broken.startswith(f"{path}, line 1 is broken (Invalid control character")


@pytest.mark.fault("the journal's disk is full", "lines are lost and counted; training goes on")
def test_a_disk_that_fills_up_and_is_cleared_costs_the_lines_in_between(tmp_path: Path) -> None:
    # The limit on a file's size acts as a full disk: part of a line is written, then an error is raised.
    script = f"""
import resource, signal, sys
from pathlib import Path
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.journal.progress import Progress
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
line = {LINE!r}
log = Journal(Path(sys.argv[1]))
log.write(line)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
log.write(line)
log.write(line)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
log.write(line)
assert log.num_errors == 2, log.num_errors
"""
    path = tmp_path / "decisions.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", script, path], env=os.environ, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("training goes on") == 1
    assert path.stat().st_size > 100
    record = load_run(tmp_path)
    assert len(record.outcomes) == 2
    assert len(record.broken) == 1
    assert "line 2 is broken" in record.broken[0]


def test_a_number_that_is_not_finite_loses_its_line_only(tmp_path: Path) -> None:
    log = Journal(tmp_path / "decisions.jsonl")
    for seconds in (1.0, math.nan, math.inf, 2.0):
        log.write(LINE | {"measured_step_s": seconds})
    assert log.num_errors == 2
    record = load_run(tmp_path)
    assert [line["measured_step_s"] for line in record.outcomes] == [1.0, 2.0]
    assert record.broken == []


@pytest.mark.fault("a journal with broken lines", "readers skip, count and name them")
@pytest.mark.parametrize(
    "line",
    [
        "{nonsense",
        "[1]",
        "7",
        "\udc80\udcff",
        "[" * 100_000,
        '{"event": "outcome", "time": 1, "step": 2}',
        '{"event": "decision", "time": 1, "step": "soon"}',
    ],
)
def test_what_is_no_line_of_a_journal_is_skipped_and_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "decisions.jsonl"
    whole = json.dumps(LINE)
    path.write_bytes(f"{whole}\n{line}\n{whole}\n".encode(errors="surrogateescape"))
    record = load_run(tmp_path)
    assert len(record.outcomes) == 2
    (broken,) = record.broken
    assert broken.startswith(f"{path}, line 2 is broken (")
    assert len(broken) < 300 + len(str(path))


def test_events_of_a_later_version_are_passed_over_and_a_later_format_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_text('{"event": "weather", "time": 1}\n' + json.dumps(LINE | {"mood": "good"}) + "\n")
    record = load_run(tmp_path)
    assert (len(record.outcomes), record.broken) == (1, [])
    run = start(tmp_path / "later")
    run.run(3)
    (first,) = journal(tmp_path / "later", "start")
    path.write_text(json.dumps(first | {"format": JOURNAL_FORMAT + 1}) + "\n")
    with pytest.raises(ConfigError, match=rf"has format {JOURNAL_FORMAT + 1}, this version of cgx_ray reads"):
        load_run(tmp_path)
