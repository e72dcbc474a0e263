"""Sentences that a user reads: one line per decision, and the verdict on a run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.control_runs import start
from support.samples import step_sample

from cgx_ray.control.journal.facts import IN_MEMORY
from cgx_ray.control.journal.sentences import MAX_LINE, RunTotals, decision_line
from cgx_ray.engine.telemetry import Telemetry
from cgx_ray.logs import NAME
from cgx_ray.plan import Layer, make_plan
from cgx_ray.report.live_view import is_new_plan
from cgx_ray.session.lines import end_line, start_line
from cgx_ray.session.settings import Settings

QSGD = "qsgd 4-bit over sra"
CAUSE = "bandwidth fell from 1.00 Gbit/s to 94 Mbit/s"


def decided(old: str, new: str, *, step: int = 12, **others: Any) -> dict[str, Any]:
    plans = {"old": {"version": 0, "plan": old}, "new": {"version": 1, "plan": new, "expected_loss": 1.003}}
    line = {"event": "decision", "step": step, "kind": "replace", "made_by": "policy", "situation": {"cause": CAUSE}}
    return {**line, **plans, "reason": "", "predicted_step_s": 0.6, "predicted_dense_s": 1.9, **others}


def progress(version: int, num_steps: int, step_s: float, speed_up: float | None, **others: Any) -> dict[str, Any]:
    steps = {"event": "progress", "version": version, "num_steps": num_steps, "step_s": step_s, "speed_up": speed_up}
    return {**steps, "step": num_steps + 12, "compute_s": 0.3, "is_dense_measured": True, **others}


def started(plan: str = "dense", kind: str = "adaptive") -> dict[str, Any]:
    plans = {"version": 0, "plan": plan, "expected_loss": 1.0 if plan == "dense" else 1.003}
    return {"event": "start", "policy": {"kind": kind}, "plan": plans}


def totals(*lines: dict[str, Any]) -> RunTotals:
    found = RunTotals()
    for line in lines:
        found.add_line(line)
    return found


def test_a_new_plan_is_one_line_in_plain_words() -> None:
    numbers = "predicted 600 ms per step, dense 1.9 s"
    short = decided("dense", QSGD, situation={"cause": "regular review"})
    assert decision_line(short) == f"decided at step 12: {QSGD} instead of dense; {numbers}; regular review"
    # Where all have no room, the old plan is left out: the line before had it; then what dense would take.
    line = f"decided at step 12: {QSGD}; predicted 600 ms per step; bandwidth fell from 1.00 Gbit/s to 94 Mbit/s"
    assert decision_line(decided("dense", QSGD)) == line
    others = decision_line(decided(QSGD, QSGD))
    bandwidth = "bandwidth fell from 1.00 Gbit/s to 94 Mbit/s"
    assert others == f"decided at step 12: other groups of {QSGD}; predicted 600 ms; {bandwidth}"
    back = decision_line(decided(QSGD, "dense", made_by="guard", kind="disable", reason="12% slower; banned"))
    assert back == f"decided at step 12: dense instead of {QSGD}; predicted 600 ms per step; 12% slower"
    # While dense ran, to be compared with.
    stays = decision_line(
        decided("dense", "dense", made_by="guard", kind="disable", reason="bf16 was 12% slower; banned")
    )
    assert stays == "decided at step 12: stays dense; predicted 600 ms per step; bf16 was 12% slower"


def test_a_plan_that_was_too_slow_is_named_with_how_slow_it_was() -> None:
    plan = "qsgd 4-bit over sra and 1 other"
    reason = f"{plan} was 3.1 times as slow as dense for the same progress; dense takes 667 ms per step"
    said = decision_line(decided(plan, "dense", made_by="guard", kind="disable", reason=reason), first_step=1234)
    assert said == f"from step 1234 on: dense; {plan} was 3.1 times as slow as dense for the same progress"


def test_the_verdict_names_much_time_between_steps_and_layers_of_overrides() -> None:
    lines = started(), decided("dense", QSGD), progress(1, 20, 0.5, 3.0, between_s=0.05)
    assert "between" not in totals(*lines).verdict()
    paused = totals(*lines, progress(1, 20, 0.5, 3.0, between_s=0.5)).verdict()
    times = "500 ms instead of 1.5 s per step, and 35% of the time passed between steps"
    assert paused.startswith(f"3x faster than dense (on average {times}); ")
    ruled = totals(started() | {"num_ruled_layers": 2}, *lines[1:]).verdict()
    assert "1.5 s per step); both with the codecs of overrides= in 2 layers; " in ruled


def test_what_has_no_room_in_a_line_is_left_out_whole() -> None:
    groups = "qsgd 2-bit bucket_size=64 over allgather and 1 other, every 32 steps"
    said = decision_line(decided("dense", groups, situation={"cause": "bandwidth fell " * 9}))
    assert said == f"decided at step 12: {groups}; predicted 600 ms per step"


def test_a_plan_is_logged_once_with_the_step_from_which_on_it_holds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, NAME)
    run = start(tmp_path)
    run.gbps, run.lag = 0.1, 5
    run.run(7)
    assert run.loop.plans[-1].describe() == QSGD
    assert caplog.messages == [], "it was decided at step 3, and no step had it"
    run.run(30)
    said = f"from step 9 on: {QSGD} instead of dense; predicted "
    assert [text.startswith(said) for text in caplog.messages if QSGD in text] == [True]


def test_measuring_steps_say_what_they_are_for() -> None:
    trials = ("codec_trial", "dense_trial", "return")
    assert not any(is_new_plan(decided("dense", QSGD, made_by=one)) for one in trials)
    assert is_new_plan(decided("dense", QSGD))
    trial = decision_line(decided("dense", "bf16 over sra", made_by="codec_trial"), "bf16")
    assert trial == "decided at step 12: trying bf16 on one layer, to time it"
    compare = decision_line(decided(QSGD, "dense", made_by="dense_trial"))
    assert compare == f"decided at step 12: dense for a few steps, to compare {QSGD} with it"
    back = decision_line(decided("dense", QSGD, made_by="return", reason="dense is measured: back to 2x"))
    assert back == f"decided at step 12: back to {QSGD}: dense is measured"


@pytest.mark.parametrize("length", [10, 60, 200])
def test_no_line_is_longer_than_120_characters(length: int) -> None:
    entry = decided(QSGD, "x" * length, situation={"cause": "y" * length})
    assert len(decision_line(entry)) <= MAX_LINE


def test_decisions_that_keep_the_plan_are_debug_and_new_plans_are_info(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, NAME)
    run = start(tmp_path)
    run.gbps = 0.1
    run.run(80)
    run.loop.end(1e6)
    said = [(one.levelno, one.getMessage()) for one in caplog.records if one.name.startswith(NAME)]
    plans = [text for level, text in said if level == logging.INFO and text.startswith("from step ")]
    assert plans[0].startswith(f"from step 4 on: {QSGD} instead of dense; predicted ")
    kept = [text for level, text in said if "stays with" in text]
    assert len(kept) > 0
    assert all(level == logging.DEBUG for level, text in said if "stays with" in text)
    assert max(len(text) for text in plans) <= MAX_LINE
    level, verdict = said[-1]
    assert level == logging.INFO
    assert "x faster than dense (" in verdict
    assert f"; {QSGD} since step 4; expected loss 1.005 ± 0.006 of dense. Report: cgx-ray report {tmp_path}" in verdict


def test_the_verdict_compares_measured_steps_with_what_dense_took_on_that_network() -> None:
    run = totals(started(), progress(0, 10, 1.8, 1.0), decided("dense", QSGD), progress(1, 90, 0.45, 4.0))
    # 18 s dense and 40.5 s under qsgd, which as dense steps would have taken 162 s.
    assert run.speed_up == pytest.approx(180 / 58.5)
    assert run.verdict() == (
        f"3.1x faster than dense (on average 585 ms instead of 1.8 s per step); {QSGD} since step 13; "
        "expected loss 1.003 ± 0.006 of dense"
    )
    assert run.verdict(beside=(0.5, 2.0)).startswith(
        "4x faster than dense (on average 500 ms instead of 2 s per step); "
    )


def test_dense_steps_and_those_that_none_is_known_for_count_too() -> None:
    # The last dense steps came when the next plan was decided on, and the first under it before any prediction.
    dense = progress(0, 10, 0.5, 1.0), progress(0, 10, 0.4, None)
    run = totals(started(), *dense, decided("dense", QSGD), progress(1, 20, 0.1, None), progress(1, 60, 0.1, 4.5))
    assert run.dense_s == pytest.approx((10 * 0.5 + 10 * 0.4 + 60 * 0.45) / 80)
    assert run.speed_up == pytest.approx(run.dense_s / run.step_s)
    assert run.verdict().startswith("2.6x faster than dense (on average 170 ms instead of 450 ms per step); ")


def test_a_verdict_on_a_network_without_dense_steps_says_that_it_is_predicted() -> None:
    line = progress(0, 100, 0.5, 2.0, is_dense_measured=False)
    run = totals(started(QSGD, "static"), line)
    assert run.verdict() == (
        "500 ms per step on average; dense was not measured, and is predicted to take 1 s over the whole run; "
        f"{QSGD} from the first step on; expected loss 1.003 ± 0.006 of dense"
    )


def test_a_plan_that_no_reported_step_had_is_named_as_decided() -> None:
    late = f"{QSGD}, decided once step 12 was reported, came after the last reported step"
    run = totals(started(), progress(0, 13, 1.8, 1.0), decided("dense", QSGD))
    assert run.verdict() == f"dense 100 % of the time, 1.8 s per step: {late}"
    assert f"; dense from the first step on; {late}" in run.verdict(beside=(0.5, 2.0))
    run.add_line(progress(1, 5, 0.5, 4.0))
    assert "decided" not in run.verdict()
    # Kept for a reason that a later decision no longer has.
    kept = decided("dense", "dense", kind="keep", reason=f"first measurements: {IN_MEMORY}")
    run = totals(started(), progress(0, 13, 1.8, 1.0), kept)
    assert "all ranks are on one machine" in run.verdict()
    run.add_line(decided("dense", QSGD))
    assert run.verdict() == f"dense 100 % of the time, 1.8 s per step: {late}"


def test_a_verdict_over_predicted_dense_steps_names_those_that_ran_elsewhere() -> None:
    rest = progress(1, 90, 0.5, 6.0, is_dense_measured=False)
    run = totals(started(), progress(0, 10, 0.4, 1.0), decided("dense", QSGD), rest)
    assert run.verdict().startswith(
        "490 ms per step on average; dense took 400 ms where it ran, and is predicted to take "
    )


@pytest.mark.parametrize(
    ("speed_up", "says"),
    [
        (1.04, "1.04x faster than dense ("),
        (1.01, "as fast as dense ("),
        (0.99, "as fast as dense ("),
        (0.8, "1.25x slower than dense ("),
    ],
)
def test_a_run_that_gained_nothing_is_told_so(speed_up: float, says: str) -> None:
    assert totals(started(QSGD, "static"), progress(0, 9, 1.0, speed_up)).verdict().startswith(says)


def test_a_dense_run_says_why() -> None:
    both = progress(0, 97, 1.0, 1.0, compute_s=0.98), progress(1, 3, 1.0, 1.1)
    run = totals(started(), both[0], decided("dense", QSGD), both[1])
    said = "dense 97 % of the time, 1 s per step: compute bounds your steps, compression would not pay here"
    assert run.verdict() == said
    waiting = progress(0, 97, 1.0, 1.0, compute_s=0.3), progress(1, 3, 0.3, 3.0, compute_s=0.3)
    run = totals(started(), waiting[0], decided("dense", QSGD), waiting[1])
    assert QSGD in run.verdict(), "a plan did promise enough"
    run = totals(started(), progress(0, 9, 1.0, 1.0))
    assert run.verdict() == "dense 100 % of the time, 1 s per step: no other plan promised enough"
    run = totals(started(kind="static"), progress(0, 9, 1.0, 1.0))
    assert "70% of a step is not compute, so policy adaptive may help" in run.verdict()
    run = totals(started(kind="static") | {"link": "machine"}, progress(0, 9, 1.0, 1.0))
    assert "70% of a step is not compute, but within a machine compression saves little of it" in run.verdict()


def test_a_journal_of_an_old_version_says_nothing_of_the_loss() -> None:
    start = started(QSGD, "static")
    del start["plan"]["expected_loss"]
    assert totals(start, progress(0, 9, 1.0, 2.0)).verdict().endswith(f"{QSGD} from the first step on")


def test_a_run_in_the_same_folder_without_the_history_begins_its_plans_anew() -> None:
    first = started(), progress(0, 9, 1.0, 1.0)
    run = totals(
        *first, decided("dense", QSGD), progress(1, 90, 0.4, 2.5), started(QSGD, "static"), progress(0, 90, 0.4, 2.5)
    )
    assert run.in_dense_s == 9.0


def test_too_few_steps_are_no_verdict() -> None:
    said = f"1 step under {QSGD}, 1 s per step; how fast dense would be is not known"
    assert totals(started(QSGD), progress(0, 1, 1.0, None)).verdict() == said
    assert totals(started(), progress(0, 1, 1.0, None)).verdict() == "1 step under dense, 1 s per step"


def test_a_plan_is_since_the_first_step_under_it_not_since_its_decision() -> None:
    late = started(), progress(0, 40, 1.0, 1.0, step=40), decided("dense", QSGD, step=12)
    assert totals(*late).plan == "dense", "no rank has had it"
    run = totals(*late, progress(1, 30, 0.4, 2.5, step=70), progress(1, 9, 0.4, 2.5, step=79))
    assert (run.plan, run.since) == (QSGD, 41)
    # The lease of the plan has ended, and ranks have returned to its fallback.
    run.add_line(progress(2, 5, 1.0, 1.0, step=84))
    assert (run.plan, run.since) == ("dense", 80)
    # Dense on trial as plan 1, which then stays, as plan 3.
    tried = decided(QSGD, "dense", made_by="dense_trial"), progress(1, 9, 1.0, 1.0, step=49)
    run = totals(started(QSGD), progress(0, 40, 0.4, 2.5, step=40), *tried)
    assert (run.plan, run.since) == (QSGD, 0)
    run.add_line(decided("dense", "dense", made_by="guard", kind="disable", step=49))
    run.add_line(progress(3, 30, 1.0, 1.0, step=79))
    assert (run.plan, run.since) == ("dense", 50)


def test_trials_and_their_fallback_are_no_new_plan() -> None:
    trial = decided(QSGD, "bf16 over sra", step=20, made_by="codec_trial")
    trial |= {"old": {"version": 0, "plan": QSGD}, "new": {"version": 1, "plan": "bf16 over sra"}}
    run = totals(started(QSGD), trial, progress(2, 5, 1.0, 2.0))
    assert (run.plan, run.since, run.in_dense_s) == (QSGD, 0, 0.0)
    run.add_line(progress(1, 5, 1.0, 2.0))
    assert (run.plan, run.since) == (QSGD, 0)
    # The fallback of version 1, which is dense, is version 2; version 3 is the permanent one.
    for version, dense_s in ((2, 5.0), (3, 0.0)):
        run = totals(started(), decided("dense", QSGD), progress(version, 5, 1.0, 2.0))
        assert run.in_dense_s == dense_s


def shown(code: str, **env: str) -> str:
    """Return what a new process shows of three lines, after `code`."""
    lines = "; ".join(f"log.{level}({level!r})" for level in ("debug", "info", "warning"))
    code = f"import logging; from cgx_ray.logs import show_lines; {code}; show_lines(); show_lines(); "
    argv = [sys.executable, "-c", f"{code}log = logging.getLogger('cgx_ray.control.loop'); {lines}"]
    return subprocess.run(argv, capture_output=True, text=True, env={**os.environ, **env}, check=False).stderr


def test_lines_follow_python_s_logging_and_are_shown_from_info_on_where_nothing_is_set_up() -> None:
    assert shown("pass") == "cgx_ray: info\ncgx_ray warning: warning\n"
    assert shown("pass", CGX_LOG_LEVEL="debug") == "cgx_ray: debug\ncgx_ray: info\ncgx_ray warning: warning\n"
    assert shown("logging.basicConfig()") == "WARNING:cgx_ray.control.loop:warning\n"
    late = shown("show_lines(); logging.basicConfig(level='INFO')").splitlines()
    assert late == ["INFO:cgx_ray.control.loop:info", "WARNING:cgx_ray.control.loop:warning"], "each line once"
    assert shown("show_lines(); logging.basicConfig(level='WARNING')") == "WARNING:cgx_ray.control.loop:warning\n"
    own = "show_lines(); logging.basicConfig(); logging.getLogger('cgx_ray').setLevel('INFO')"
    assert shown(own).splitlines() == late
    assert shown("logging.getLogger('cgx_ray').setLevel('ERROR')") == ""
    # As in Ray's workers, with two handlers.
    two = "logging.basicConfig(format='%(message)s', level='INFO', handlers=[logging.StreamHandler() for _ in 'ab'])"
    named = shown(f"from cgx_ray.logs import name_lines; {two}; name_lines(); name_lines()")
    assert named == "cgx_ray: info\n" * 2 + "cgx_ray: warning\n" * 2
    assert "CGX_LOG_LEVEL 'loud' is not allowed; give DEBUG, INFO" in shown("pass", CGX_LOG_LEVEL="loud")


def _engine(codec: str, *steps: dict[str, Any]) -> Any:
    layers = [Layer(name="w", numel=100_000, ndim=2)]
    plan = make_plan(layers, version=0, world_size=4, codec=codec)
    telemetry = Telemetry(0)
    for step, values in enumerate(steps):
        telemetry.add_sample(replace(step_sample(0, step), **values))
    return SimpleNamespace(plan=plan, telemetry=telemetry, layers=layers)


def test_the_end_says_what_the_steps_have_taken() -> None:
    # A round of three steps counts as three.
    round_of_3: dict[str, Any] = {"step_s": 0.2, "compute_s": 0.1, "num_steps": 3}
    assert end_line(_engine("qsgd", {"step_s": 0.4, "compute_s": 0.1}, round_of_3), takes_folder=True) == (
        "4 steps under qsgd 4-bit over sra, 250 ms each, compute is 40% of it; a rank sent 0.0015 MB per step, dense "
        "sends 0.006 MB; attach(folder=) writes a journal for `cgx-ray report`"
    )
    hidden = end_line(_engine("qsgd", {"step_s": 0.1, "compute_s": 0.09}), takes_folder=False)
    assert hidden.endswith("compute is 90% of it; a rank sent 0.0015 MB per step, dense sends 0.006 MB")
    bound = end_line(_engine("none", {"step_s": 0.1, "compute_s": 0.11}), takes_folder=False)
    assert bound == (
        "1 step under dense, 100 ms each, compute is 100% of it; a rank sent 0.0015 MB per step; compute bounds your "
        "steps, compression hardly pays here"
    )
    assert end_line(_engine("none"), takes_folder=False) == "0 steps under dense"


def test_a_folder_is_hinted_at_where_attach_takes_one() -> None:
    settings = Settings(policy="static")
    assert start_line(_engine("qsgd"), settings, None, takes_folder=True).endswith("sra; no journal: give folder=")
    assert start_line(_engine("qsgd"), None, None, takes_folder=False).endswith("sra; no journal")
    assert start_line(_engine("qsgd"), settings, Path("run/j"), takes_folder=True).endswith("sra; journal: run/j")
