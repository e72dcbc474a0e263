"""`cgx-ray replay`: the same version decides the same; another policy, and a journal that was changed, do not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.control_runs import LAYERS, WORLD, start

from bench.adapt.cases import CASES
from bench.adapt.simulate import SimulatedRun
from bench.shared.simulated_cluster import SimulatedCluster
from cgx_ray.cli import main
from cgx_ray.control.history import Registration
from cgx_ray.control.journal.lines import FORMAT, Journal
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.policies.policy import Static
from cgx_ray.control.replay import WhatIf
from cgx_ray.plan import make_plan
from cgx_ray.untrusted import MAX_BYTES

pytestmark = pytest.mark.long

Entries = list[dict[str, Any]]


def simulate(folder: Path, name: str, *, until_s: float) -> Path:
    """Return the journal of the case `name` of `python -m bench adapt`."""
    case = next(case for case in CASES if case.name == name)
    cluster = SimulatedCluster(case.model, case.costs, case.gain, case.errors(0), 0)
    path = folder / name / "decisions.jsonl"
    loop = ControlLoop(Adaptive(candidates=case.options, min_gain=case.min_gain), Journal(path))
    loop.register(
        Registration(
            layers=tuple(case.model.layers),
            first_plan=make_plan(case.model.layers, version=0, world_size=4),
            codec_costs=case.calibrated_costs(0),
        )
    )
    run = SimulatedRun(loop=loop, cluster=cluster, schedule=case.schedule)
    run.run(until_s=until_s)
    loop.end(run.now_s)
    return path


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the journal of a run with wrong codec times, whose codecs are timed in trials."""
    return simulate(tmp_path_factory.mktemp("wrong_costs"), "wrong_costs", until_s=120.0)


def replay(path: Path, *words: str, status: int) -> Result:
    result = CliRunner().invoke(main, ["replay", str(path), *words])
    assert result.exit_code == status, result.output + result.stderr
    return result


def numbers(path: Path, out: Path, *words: str, status: int = 0) -> dict[str, Any]:
    replay(path, "--json", str(out / "replay.json"), *words, status=status)
    found = json.loads((out / "replay.json").read_text())
    assert isinstance(found, dict)
    return found


def changed(journal: Path, folder: Path, change: Callable[[Entries], object]) -> Path:
    """Return a copy of `journal` in `folder`, its lines changed by `change`."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    change(lines)
    path = folder / "changed.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def decisions(lines: Entries, *made_by: str) -> Entries:
    return [line for line in lines if line.get("made_by") in made_by]


def test_the_same_version_decides_everything_the_same(journal: Path, tmp_path: Path) -> None:
    compared = simulate(tmp_path, "more_compute", until_s=180.0)
    for path, made_by, skipped in (
        (journal, {"policy", "codec_trial"}, set()),
        (
            compared,
            {"policy", "codec_trial", "dense_trial", "return"},
            {"dense measured for a few steps", "return from measuring steps"},
        ),
    ):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert {line["made_by"] for line in lines if line["event"] == "decision"} == made_by
        found = numbers(path, tmp_path, "--all")
        assert found["num_made_again"] == found["num_same"] == len(decisions(lines, "policy", "codec_trial"))
        assert (found["num_different"], found["num_other_prediction"], found["num_broken_lines"]) == (0, 0, 0)
        assert set(found["not_re_decided"]) == skipped
        assert len(found["decisions"]) == len(decisions(lines, *made_by))
    assert "(100%); otherwise: 0" in replay(journal, status=0).output
    # A run's folder will do.
    assert numbers(journal.parent, tmp_path) == numbers(journal, tmp_path)


def test_every_kind_of_decision_of_an_eventful_run_is_the_same_or_not_made_again(tmp_path: Path) -> None:
    run = start(tmp_path / "run")
    run.run(10)
    for gbps, slowdown, steps in ((0.05, 1.0, 40), (0.05, 8.0, 60), (1.0, 1.0, 30)):
        run.gbps, run.slowdown = gbps, slowdown
        run.run(steps)
    for index in range(24):
        run.gbps = 0.05 if index % 2 else 1.0
        run.run(5)
    found = numbers(tmp_path / "run", tmp_path, "--all")
    assert found["num_made_again"] == found["num_same"] >= 8
    assert found["not_re_decided"]["taken back by the guard"] >= 1
    assert {line["recorded"]["kind"] for line in found["decisions"]} == {"keep", "replace", "disable"}


def test_a_planted_difference_is_found_and_is_the_exit_status(journal: Path, tmp_path: Path) -> None:
    def plant(lines: Entries) -> None:
        lines[0]["policy"]["min_gain"] = 0.999

    path = changed(journal, tmp_path, plant)
    found = numbers(path, tmp_path, status=1)
    assert found["num_different"] >= 1
    differing = [line for line in found["decisions"] if line["result"] == "differs"]
    line = next(line for line in differing if line["recorded"]["plan"] == "qsgd 4-bit over sra")
    assert "qsgd" not in line["now"]["plan"]
    assert line["now"]["step_s"] > line["recorded"]["step_s"]

    def regroup(lines: Entries) -> None:
        groups = next(line for line in decisions(lines, "policy") if line["kind"] == "replace")["new_groups"]
        merged = groups[-2]["layers"] + groups[-1]["layers"]
        groups[-2:] = [groups[-1] | {"layers": merged}]

    (line,) = (
        line
        for line in numbers(changed(journal, tmp_path, regroup), tmp_path, status=1)["decisions"]
        if line["result"] == "differs"
    )
    assert line["note"] == "in other groups"

    def predict(lines: Entries) -> None:
        decisions(lines, "policy")[0]["predicted_step_s"] *= 1.01

    found = numbers(changed(journal, tmp_path, predict), tmp_path)
    assert (found["num_different"], found["num_other_prediction"]) == (0, 1)


def test_what_if_answers_with_differences_and_status_0(journal: Path, tmp_path: Path) -> None:
    found = numbers(journal, tmp_path, "--min-gain", "0.999")
    assert found["num_different"] >= 1
    assert found["what_if"] == {"min_gain": 0.999, "options": None}
    found = numbers(journal, tmp_path, "--candidates", "bf16", "--candidates", "powersgd:rank=4")
    assert found["num_different"] >= 1
    assert found["unmeasured"] == ["powersgd:rank=4"]
    assert "never chosen" in replay(journal, "--candidates", "powersgd:rank=4", status=0).output
    balanced = numbers(journal, tmp_path, "--fidelity", "balanced")
    assert any("qsgd:bits=3" in option for option in balanced["what_if"]["options"])
    start = json.loads(journal.read_text().splitlines()[0])
    for other in (Adaptive(fidelity="balanced"), Adaptive(candidates=["bf16"])):
        made = WhatIf(other=other).policy(start)
        assert isinstance(made, Adaptive)
        periods = other.periods if other.candidates is None else tuple(start["policy"]["periods"])
        assert made == replace(other, min_gain=start["policy"]["min_gain"], periods=periods)
    both = replay(journal, "--fidelity", "fast", "--candidates", "bf16", status=2)
    assert "give one of them" in both.stderr
    assert "unknown codec 'nonsense'" in replay(journal, "--candidates", "nonsense", status=2).stderr


def test_a_restart_has_its_own_layers_and_policy(journal: Path, tmp_path: Path) -> None:
    run = start(tmp_path / "restart")
    run.run(10)
    path = tmp_path / "both.jsonl"
    path.write_bytes((tmp_path / "restart" / "decisions.jsonl").read_bytes() + journal.read_bytes())
    found = numbers(path, tmp_path)
    assert found["num_made_again"] == found["num_same"] > numbers(journal, tmp_path)["num_made_again"]


def test_a_cut_journal_is_replayed_up_to_the_cut(journal: Path, tmp_path: Path) -> None:
    path, text = tmp_path / "cut.jsonl", journal.read_bytes()
    path.write_bytes(text[: max(text.rindex(b'"made_by": "policy"'), text.rindex(b'"made_by": "codec_trial"'))])
    found = numbers(path, tmp_path)
    assert found["num_broken_lines"] == 1
    assert found["first_broken_line"].endswith("cut in the middle, or still being written")
    assert found["num_made_again"] == found["num_same"] == numbers(journal, tmp_path)["num_made_again"] - 1
    # A start line that is broken takes the decisions after it along, and no others.
    first, rest = text.split(b"\n", 1)
    path.write_bytes(text + first[:50] + b"\n" + rest)
    found = numbers(path, tmp_path)
    assert found["not_re_decided"]["the start line before it is broken"] == found["num_made_again"]


def _broken_inputs(lines: Entries) -> None:
    for line in decisions(lines, "policy", "codec_trial"):
        line["situation"]["backward_s"] = "soon"


def _old(lines: Entries) -> None:
    lines[:] = [line for line in lines if line["event"] in ("decision", "outcome")]
    for line in decisions(lines, "policy", "codec_trial", "return"):
        del line["situation"], line["made_by"], line["new_groups"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[0].update(format=FORMAT + 1), rf"has format {FORMAT + 1}, this version of cgx_ray reads"),
        (lambda lines: lines.clear(), "is empty; give the decisions.jsonl of a run"),
        (lambda lines: lines.__delitem__(slice(1, None)), "holds no decision yet"),
        (lambda lines: lines.pop(0), "no start line before it"),
        (lambda lines: lines[0].pop("layers"), "the start line before it is broken"),
        (_broken_inputs, "$.situation.backward_s: 'soon' is not of type 'array'"),
        (_old, "its inputs were not recorded: an old version wrote it"),
    ],
)
def test_a_journal_that_cannot_be_replayed_is_one_clear_error(
    journal: Path, tmp_path: Path, change: Callable[[Entries], object], message: str
) -> None:
    error = replay(changed(journal, tmp_path, change), status=2).stderr
    assert message in error
    assert error.startswith("Error: ")
    assert error.count("\n") == 1


def test_what_is_no_journal_of_an_adaptive_run_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("hello\n\x00\n[1]\n")
    assert "is no journal: it holds no start and no decision (broken lines: 3; the first is line 1" in (
        replay(path, status=2).stderr
    )
    assert "is no file; give the decisions.jsonl of a run" in replay(tmp_path, status=2).stderr
    run = start(tmp_path / "static")
    loop = ControlLoop(Static(), Journal(tmp_path / "static" / "decisions.jsonl"))
    loop.register(Registration(layers=LAYERS, first_plan=make_plan(LAYERS, version=0, world_size=WORLD)))
    run.loop = loop
    run.run(20)
    for words in ([], ["--min-gain", "0.5"]):
        error = replay(tmp_path / "static", *words, status=2).stderr
        assert "is of a run with policy 'static', which keeps the plan that the user chose" in error


def peak_kb(path: Path) -> int:
    """Return the largest memory of a process that replays `path`."""
    code = f"""
from cgx_ray.cli import main
main(["replay", {str(path)!r}], standalone_mode=False)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return int(done.stdout.splitlines()[-1])


def test_memory_does_not_grow_with_the_journal(journal: Path, tmp_path: Path) -> None:
    big = tmp_path / "big.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    progress = "".join(line for line in lines if line.startswith('{"event": "progress"'))
    with big.open("w") as file:
        file.writelines(lines)
        for _ in range((32 << 20) // len(progress)):
            file.write(progress)
        file.write("x" * (64 << 20) + "\n")
        file.write(lines[-1])
    # One line may take up to MAX_BYTES, and as much again twice while it is read.
    assert peak_kb(big) - peak_kb(journal) < 4 * MAX_BYTES / 1024
