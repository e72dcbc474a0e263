"""The verdict on a run where a user meets it: `cgx-ray report`, its page and JSON, and `cgx-ray compare`."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from support.control_runs import LAYERS, WORLD, registration, start

from cgx_ray.cli import main
from cgx_ray.commands import compare
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.policy import Static
from cgx_ray.plan import make_plan
from cgx_ray.report.live_view import view_of_record
from cgx_ray.report.page import paragraph
from cgx_ray.report.picture import draw_runs
from cgx_ray.report.record import load_run
from cgx_ray.report.run_facts import next_step, prediction_errors
from cgx_ray.report.run_pictures import draw_density, draw_shares
from cgx_ray.report.show import write_json
from cgx_ray.report.style import BLUE, DENSE_COLOR, codec_color

QSGD = "qsgd 4-bit over sra"


def train(folder: Path, *gbps: float) -> Path:
    """Write the journal of an adaptive run, 40 steps on each network."""
    run = start(folder)
    for one in gbps:
        run.gbps = one
        run.run(40)
    run.loop.end(1e3)
    return folder


def keep(folder: Path, codec: str) -> Path:
    """Write the journal of a static run at 100 Mbit/s."""
    run = start(folder)
    policy = Static(codec)
    run.loop = ControlLoop(policy, Journal(folder / "decisions.jsonl"))
    scheme = policy.option.scheme
    plan = make_plan(LAYERS, version=0, world_size=WORLD, codec=policy.option.codec, scheme=scheme)
    run.loop.register(registration(first_plan=plan))
    run.gbps = 0.1
    run.run(40)
    run.loop.end(1e3)
    return folder


def invoke(*words: object) -> str:
    done = CliRunner().invoke(main, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def report(run: Path, *words: str) -> tuple[str, str, dict[str, Any]]:
    """Return the first line, the page and the JSON."""
    numbers, page = run / "report.json", run / "report.html"
    said = invoke("report", run, "--json", numbers, *words)
    assert said.splitlines()[-1].endswith(f"; picture: {run / 'report.png'}; report: {page}")
    (found,) = json.loads(numbers.read_text())["runs"]
    return said.splitlines()[0], page.read_text(), found


def test_the_verdict_is_the_first_line_of_the_report_its_page_and_its_json(tmp_path: Path) -> None:
    first, page, found = report(train(tmp_path, 0.1))
    assert first.startswith("cgx_ray: ")
    assert f"x faster than dense (on average {found['step_s'] * 1e3:.0f}"[:33] in first
    assert f"{QSGD} since step 4; expected loss 1.005 ± 0.006 of dense." in first
    assert first == f"cgx_ray: {found['verdict']}."
    assert f'<p class="verdict">{found["verdict"]}.</p>' in page
    assert found["speed_up"] > 1.5
    assert "Note: no loss was reported; attachment.observe(loss=loss) " in page
    assert (found["plan"], found["since_step"], found["expected_loss"]) == (QSGD, 4, pytest.approx(1.0046))


def test_a_static_run_is_reported_and_compared_with_predicted_dense_steps(tmp_path: Path) -> None:
    first, _, found = report(keep(tmp_path, "qsgd"))
    assert found["is_predicted"]
    assert " per step on average; dense was not measured, and is predicted to take " in first
    speed = view_of_record(load_run(tmp_path)).speed
    assert speed == f"dense is predicted to take {found['dense_step_s']:.2g} s per step"
    assert f"{QSGD} from the first step on" in first
    # As the adaptive run measures it on the same network.
    adaptive = report(train(tmp_path / "adaptive", 0.1))[2]
    assert found["dense_step_s"] == pytest.approx(adaptive["dense_step_s"], rel=0.3)


def test_a_predicted_speed_up_is_named_neither_on_the_page_nor_on_the_terminal(tmp_path: Path) -> None:
    first, page, found = report(keep(tmp_path / "static", "qsgd"), "--price", "3")
    assert "x faster than dense" not in first + page
    assert f"<dt>dense step, predicted</dt><dd>{found['dense_step_s']:.3g} s</dd>" in page
    assert "Dense steps are predicted by the model of the measured link, so no speed-up is named." in page
    assert "<dt>with dense gradients, predicted</dt>" in page
    assert "<dt>speed-up of the run</dt>" not in page
    first, page, found = report(train(tmp_path / "adaptive", 0.1), "--price", "3")
    assert f"{found['speed_up']:.2g}x faster than dense" in first
    assert f"<dt>speed-up of the run</dt><dd>{found['speed_up']:.2f}x</dd>" in page
    assert re.search(r"The speed-up is measured: against \d+ dense steps? of this run\.", page)
    assert "<dt>with dense gradients</dt>" in page


def test_a_plan_counts_from_its_first_step_on(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps, run.lag = 0.1, 20
    run.run(12)
    decided = load_run(tmp_path).decisions[0]
    assert (decided["new"]["plan"], decided["step"]) == (QSGD, 3)
    assert view_of_record(load_run(tmp_path)).plan == f"dense; next {QSGD}, decided at step 3"
    run.run(40)
    run.loop.end(1e3)
    first, _, found = report(tmp_path)
    assert found["since_step"] == 24
    assert f"{QSGD} since step 24" in first
    assert view_of_record(load_run(tmp_path)).plan == QSGD


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    write_json("-", {"loss": math.nan, "rows": [(math.inf, 1.5)]})
    assert json.loads(capsys.readouterr().out) == {"loss": None, "rows": [[None, 1.5]]}


def test_the_report_of_a_folder_that_is_read_only_goes_to_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, here = train(tmp_path / "run", 0.1), tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK or Path(path) != run)
    assert invoke("report", run).splitlines()[-1].endswith("; picture: report.png; report: report.html")
    assert {path.name for path in here.iterdir()} == {"report.html", "report.png"}


def test_the_report_of_a_folder_with_one_run_lies_beside_that_run(tmp_path: Path) -> None:
    run = train(tmp_path / "run", 0.1)
    assert invoke("report", tmp_path).splitlines()[-1].endswith(f"report: {run / 'report.html'}")
    assert list(tmp_path.iterdir()) == [run]


def test_the_time_before_a_later_start_is_no_step(tmp_path: Path) -> None:
    journal = train(tmp_path / "run", 0.1) / "decisions.jsonl"
    once_s = load_run(journal.parent).duration_s
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    later = [line | {"time": line["time"] + 1000} for line in lines]
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines + later))
    record = load_run(journal.parent)
    steps = draw_runs([record], title="").axes[0].get_lines()[0]
    gaps = [at for at, seconds in steps.get_xydata() if math.isnan(seconds)]
    assert gaps == [pytest.approx(later[0]["time"] - lines[0]["time"])]
    assert record.duration_s == pytest.approx(2 * once_s)
    assert view_of_record(record).elapsed_s == record.duration_s


def test_a_run_that_goes_on_in_another_folder_names_the_steps_before(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.step = 150
    run.run(20)
    run.loop.end(100.0)
    assert report(tmp_path)[2]["left_out_steps"].startswith("0 to 150 (before this journal)")


def test_a_journal_stands_for_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(tmp_path / "run", 0.1)
    journal = run / "decisions.jsonl"
    assert invoke("report", journal).splitlines()[-1].endswith(f"report: {run / 'report.html'}")
    assert invoke("compare", journal, run).startswith("a step of run is as fast as one of run")
    monkeypatch.chdir(run)
    assert "run: step " in invoke("top", "--once", "decisions.jsonl")
    other = tmp_path / "other.jsonl"
    other.touch()
    for command in ("report", "compare"):
        done = CliRunner().invoke(main, [command, str(other), *[str(run)] * (command == "compare")])
        assert done.exit_code == 2, done.output
        assert "is none of a run's files, decisions.jsonl and steps.jsonl; give the run's folder" in done.output


def test_the_page_is_opened_if_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(click, "launch", opened.append)
    report(train(tmp_path, 0.1), "--open")
    assert opened == [(tmp_path / "report.html").as_uri()]


def test_the_steps_of_a_mean_and_those_left_out_are_named(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.run(20)
    # Rank 0 has reported two steps more than the others when the run ends.
    run.silent = {1, 2, 3}
    run.run(2)
    run.loop.end(100.0)
    _, _, told = report(tmp_path)
    assert (told["num_steps"], told["counted_steps"]) == (19, "2 to 20")
    left_out = "0 to 1 (start-up), 21 to 22 (not reported by all ranks before the end)"
    assert told["left_out_steps"] == left_out
    said = " ".join(invoke("compare", tmp_path, tmp_path).split())
    assert "steps that count 19: 2 to 20 19: 2 to 20" in said
    assert "steps left out 0 to 1 (start-up)" in said
    assert f"Means are over 19 steps, 2 to 20; steps left out: {left_out}." in (tmp_path / "report.html").read_text()


def test_runs_of_other_models_are_told_from_those_of_one(tmp_path: Path) -> None:
    said = "the two may not have trained the same model"
    for name in ("one", "other"):
        train(tmp_path / name, 0.1)
    assert said not in invoke("compare", tmp_path / "one", tmp_path / "other")
    journal = tmp_path / "other" / "decisions.jsonl"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    larger = [line | {"dense_bytes": 2 * line["dense_bytes"]} if "dense_bytes" in line else line for line in lines]
    journal.write_text("".join(json.dumps(line) + "\n" for line in larger))
    assert f"{said}: a rank's gradients have " in " ".join(
        invoke("compare", tmp_path / "one", tmp_path / "other").split()
    )


def test_runs_without_a_loss_are_named_once(tmp_path: Path) -> None:
    for name in ("one", "other"):
        train(tmp_path / name, 0.1)
    end = "; attachment.observe(loss=loss) reports it, ray.train.report does not"
    assert f"no loss was reported of one, other{end}" in invoke("report", tmp_path).replace("\n", " ")
    assert f"\nno loss was reported{end}" in invoke("report", tmp_path / "one")


def test_two_runs_are_compared_side_by_side(tmp_path: Path) -> None:
    one, other = keep(tmp_path / "dense_run", "none"), keep(tmp_path / "quantized", "qsgd")
    path = tmp_path / "compared.json"
    said = invoke("compare", one, other, "--json", path)
    found = json.loads(path.read_text())
    assert said.splitlines()[0] == f"a step of quantized is {found['step_ratio']:.2f}x faster than one of dense_run"
    assert [run["plan"] for run in found["runs"]] == ["dense", QSGD]
    rows = {line[:28].strip(): line[28:] for line in said.splitlines()}
    assert rows["time per step"].count("(measured)") == 2
    # The first run was dense throughout, so it is what the second is compared with.
    dense, quantized = found["runs"]
    assert quantized["speed_up"] == found["step_ratio"]
    assert quantized["dense_step_s"] == dense["step_s"]
    assert "(that of dense_run)" in rows["a dense step"]
    assert said.count(f"{found['step_ratio']:.2f}x") == 1
    assert "speed-up" not in said
    for row in ("time per step", "loss at the end", "expected loss over dense's", "plan at the end"):
        assert row in said
    assert said.splitlines()[-1].startswith(
        "no loss was reported of dense_run, quantized; attachment.observe(loss=loss) "
    )
    done = CliRunner().invoke(main, ["compare", str(one), str(tmp_path / "nothing")])
    assert done.exit_code == 2


def test_losses_are_compared_at_the_last_step_of_the_shorter_run(tmp_path: Path) -> None:
    for name, num_steps in (("short", 40), ("long", 80)):
        run = start(tmp_path / name)
        run.loss = lambda step: 10.0 - step / 10
        run.run(num_steps)
        run.loop.end(1e3)
    path = tmp_path / "compared.json"
    said = invoke("compare", tmp_path / "short", tmp_path / "long", "--json", path)
    found = json.loads(path.read_text())
    first, last = found["loss_steps"]
    assert 30 < last <= 40
    assert (first, f"loss at step {last}" in said) == (last, True)
    losses = [run["loss"] for run in found["runs"]]
    assert losses == pytest.approx([10.0 - (first + last) / 20] * 2, abs=0.3)


def test_losses_are_means_over_the_same_steps_whatever_lines_the_journals_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # First and last step of a line, and the mean of a loss of 10 - step / 10.
    fine, coarse = (
        [(begin, begin + num - 1, 10 - (2 * begin + num - 1) / 20) for begin in range(0, 70, num)] for num in (5, 23)
    )
    monkeypatch.setattr(compare, "losses", lambda record: record)
    found: list[dict[str, Any]] = [{}, {}]
    # The last line of the coarse one begins after the end of the fine one, and the one before ends within a line.
    assert compare._compare_losses([fine[:12], coarse], found) == (23, 45)  # type: ignore[list-item]
    assert [run["loss"] for run in found] == pytest.approx([10 - 3.4] * 2, abs=0.1)


def test_one_decision_on_a_change_does_not_make_the_error(tmp_path: Path) -> None:
    _, page, found = report(train(tmp_path, 1.0, 0.05))
    errors = sorted(map(abs, prediction_errors(load_run(tmp_path))))
    assert found["prediction_error"] == errors[len(errors) // 2] or found["prediction_error"] < max(errors)
    assert "usual prediction error" in page


def test_sentences_of_the_page_have_no_backticks_and_try_balanced_before_fast(tmp_path: Path) -> None:
    record = load_run(train(tmp_path, 0.02))
    policy = record.starts[-1]["policy"]
    for fidelity, says in (
        ("strict", "fidelity='balanced', which "),
        ("balanced", "fidelity='fast', which "),
        ("fast", "candidates of your own, "),
        (None, "codecs that send less, "),
    ):
        policy["fidelity"] = fidelity
        assert f"try again with {says}" in next_step(record, None)
    _, page, _ = report(tmp_path)
    assert "`" not in page
    assert paragraph("run `cgx-ray top` <now>") == "<p>run <code>cgx-ray top</code> &lt;now&gt;</p>"


def test_predictions_that_are_off_are_looked_into_by_a_command_that_fits_the_run(tmp_path: Path) -> None:
    record = load_run(train(tmp_path, 0.1))
    for line in record.outcomes:
        line["measured_step_s"] *= 2
    text = next_step(record, None)
    assert "`cgx-ray probe` on a Ray cluster or by `cgx-ray why --probe -- torchrun ...`" in text
    record.starts[-1]["link"] = "machine"
    text = next_step(record, None)
    assert "see whether other programs use the processors of this machine" in text
    assert "probe" not in text


def test_charts_that_would_be_constant_are_left_out_and_each_codec_has_one_colour(tmp_path: Path) -> None:
    constant = load_run(keep(tmp_path / "static", "bf16"))
    assert draw_density(constant) is None
    changing = load_run(train(tmp_path / "adaptive", 0.1))
    assert draw_density(changing) is not None
    picture = draw_shares(changing)
    assert picture is not None
    (legend,) = picture.figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert any(name.startswith("codec qsgd ") for name in names), names
    assert codec_color("qsgd") == BLUE.lower()
    assert codec_color("none") == codec_color("dense") == DENSE_COLOR.lower()
    assert codec_color("qsgd", 1) not in (codec_color("qsgd"), codec_color("bf16"))
