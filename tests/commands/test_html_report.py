"""The report as a page, opened in Chromium as a person would read it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support.browser import Browser, open_browser
from support.control_runs import start

from cgx_ray.cli import main
from cgx_ray.commands.report import speed_up
from cgx_ray.control.live_state import LiveState
from cgx_ray.report.live_view import view_of_controller, view_of_record
from cgx_ray.report.record import load_run
from cgx_ray.report.run_facts import (
    between_share,
    mean_parts,
    next_step,
    options_by_version,
    shares_by,
    spans,
    steps_s,
)
from cgx_ray.untrusted import printable

# Names of folders, and so of runs, that would be code in a page, a formula in a picture, or an order to a terminal.
HOSTILE_NAMES = [
    "<img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>&amp;",
    "$\\frac{1}{",
    "_hidden $x$",
    "\x1b[31mred\x07\u202e rocket \U0001f680 \u65e5\u672c",
    os.fsdecode(b"bytes \xff\xfe"),
    "x" * 200,
]
# A reader who zooms no further: smallest height of text in pictures, in px.
SMALLEST_TEXT = 6.5


def train(folder: Path) -> None:
    """Write the journal of a run on a network that becomes slow twice. A sparse codec then loses less than before."""
    run = start(folder)
    for gbps, num_steps in ((100.0, 15), (0.1, 30), (0.02, 75)):
        run.gbps = gbps
        run.gain["topk:density=0.01"] = 0.95 if gbps < 0.1 else 0.3
        run.run(num_steps)
    run.loop.end(1e3)


def write_steps(folder: Path, *, step_s: float, parts: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for step in range(60):
        line: dict[str, Any] = {"event": "step", "time": 100.0 + step * step_s, "step": step, "loss": 5.0 - step / 20}
        line["step_s"] = step_s
        for part, share in (("compute_s", 0.5), ("encode_s", 0.1), ("exchange_s", 0.7), ("decode_s", 0.2)):
            line[part] = share * step_s if parts else None
        lines.append({**line, "plan_version": 0 if parts else None, "plan": "dense"})
    end = {"event": "end", "time": 160.0, "validation_loss": 2.5, "weights_identical": True, "weights_sha256": ["a"]}
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, end]))


def report(run: Path, out: Path, *words: str) -> tuple[Path, str]:
    """Return the page, and what the command printed."""
    page = out / "report.html"
    argv = ["report", str(run), "--html", str(page), "--plot", str(out / "report.png"), *words]
    done = CliRunner().invoke(main, argv, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert f"report: {page}" in done.output.replace("\n", "")
    return page, done.output


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "my run"
    train(folder)
    return folder


def check_as_a_reader(browser: Browser, page: Path) -> None:
    """Assert what holds for every report: it loads nothing, complains about nothing, and fits a phone."""
    for width, dark in ((1280, False), (390, False), (390, True)):
        browser.open(page, width=width, dark=dark)
        assert browser.console == []
        assert browser.requests == [page.resolve().as_uri()]
        assert browser.run("document.documentElement.scrollWidth") <= width
        beyond = "[...document.querySelectorAll('main *')].filter(e => !e.closest('svg')).map(e => "
        beyond += f"[e.tagName, e.getBoundingClientRect().right]).filter(e => e[1] > {width + 1})"
        assert browser.run(beyond) == []
        levels = browser.run("[...document.querySelectorAll('h1,h2,h3,h4')].map(e => +e.tagName[1])")
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(levels)), levels
        pictures = browser.run(
            "[...document.querySelectorAll('figure')].map(f => { const s = f.querySelector('svg'), "
            "b = s.getBoundingClientRect(), t = [...s.querySelectorAll('text')].map("
            "x => parseFloat(getComputedStyle(x).fontSize) * s.getScreenCTM().a); "
            "return [f.querySelector('[role=img]').ariaLabel, f.querySelector('figcaption').innerText, "
            "b.width, b.height, Math.min(...t)] })"
        )
        assert pictures
        for alt, caption, wide, high, text_px in pictures:
            assert len(alt) > 40, alt
            assert len(caption) > 15, caption
            assert min(wide, high) > 100
            assert text_px > SMALLEST_TEXT, f"{text_px} px in: {caption}"
        assert len({alt for alt, *_ in pictures}) == len(pictures)
        ids = browser.run("[...document.querySelectorAll('[id]')].map(e => e.id)")
        assert len(ids) == len(set(ids))
        ink, paper = (browser.run(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
        assert (brightness(ink) > brightness(paper)) == dark


def brightness(color: str) -> float:
    return sum(float(part) for part in color.removeprefix("rgb(").removesuffix(")").split(","))


def test_a_run_is_explained_from_top_to_bottom(browser: Browser, run: Path, tmp_path: Path) -> None:
    page, _ = report(run, tmp_path, "--price", "3")
    check_as_a_reader(browser, page)
    text = browser.run("document.body.innerText")
    assert browser.run("document.title") == "my run: cgx_ray report"
    headings = browser.run("[...document.querySelectorAll('h1,h2,h3')].map(e => e.innerText)")
    expected = ["my run", "Summary", "Over the run", "Decisions", "Steps before and after", "Plan at the end"]
    assert headings == expected
    assert "3 layers with 5 million parameters (float32), trained by 4 ranks" in text
    assert "Dense steps are predicted by the model of the measured link, so no speed-up is named." in text
    assert "What to try next: " in text
    assert "cost so far" in text
    captions = browser.run("[...document.querySelectorAll('figcaption')].map(e => e.innerText)")
    for words in ("Where the time of a step goes", "Bandwidth of", "Each decision's prediction", "Density and size"):
        assert any(caption.startswith(words) for caption in captions), words
    record = load_run(run)
    changes = [line for line in record.decisions if line["kind"] != "keep"]
    assert sum(caption.startswith("After step") for caption in captions) == len(changes) >= 2
    rows = browser.run("[...document.querySelectorAll('table')].map(t => t.querySelectorAll('tbody tr').length)")
    assert rows == [len(record.decisions), len(changes[-1]["new"]["options"])]


def test_runs_of_a_folder_are_compared(browser: Browser, tmp_path: Path) -> None:
    write_steps(tmp_path / "dense", step_s=2.0, parts=False)
    for name in ("one", "two"):
        train(tmp_path / name)
        write_steps(tmp_path / name, step_s=0.5, parts=True)
    run = start(tmp_path / "two")
    run.run(3)
    page, said = report(tmp_path, tmp_path, "--price", "3.6")
    check_as_a_reader(browser, page)
    num_decisions = [len(load_run(tmp_path / name).decisions) for name in ("one", "two")]
    assert f"2 runs with {sum(num_decisions)} decisions, " in said.replace("\n", " ")
    text = browser.run("document.body.innerText")
    assert "measured: the mean step of the run 'dense' took 2 s" in text
    headings = browser.run("[...document.querySelectorAll('h1,h2')].map(e => e.innerText)")
    assert headings == [tmp_path.name, "All runs", "Run one", "Run two"]
    browser.open(page)
    cells = "[...document.querySelectorAll('table')][0].querySelectorAll('tbody tr')"
    rows = browser.run(f"[...{cells}].map(r => [...r.children].map(c => c.innerText))")
    assert [row[0] for row in rows] == ["dense", "one", "two"]
    # 60 steps of 2 s, of which the first is not counted: 2 minutes of 4 workers at 3.6 dollars an hour.
    assert rows[0][1:4] == ["59", "120 s", "2 s"]
    assert float(rows[0][-1]) == pytest.approx(4 * 3.6 * 120 / 3600, rel=0.02)
    assert rows[1][4] == "4.00x"


@pytest.mark.parametrize("has_steps", [False, True])
def test_many_runs_have_short_lines_and_pictures_with_room(tmp_path: Path, has_steps: bool) -> None:
    for number in range(27 if has_steps else 8):
        folder = tmp_path / f"a run with a long name {number}"
        if has_steps:
            write_steps(folder, step_s=0.5, parts=True)
            continue
        folder.mkdir()
        run = start(folder)
        run.run(8)
    # A warning of matplotlib is an error here.
    _, said = report(tmp_path, tmp_path)
    lines = said.replace(str(tmp_path), "").splitlines()
    assert max(map(len, lines)) < 200, lines
    if has_steps:
        assert lines[-1].startswith("picture: ")
    else:
        names = ", ".join(f"a run with a long name {number}" for number in range(3))
        assert any(line.startswith(f"no loss was reported of {names} and 5 more; ") for line in lines), lines
        assert lines[-1].startswith("8 runs with ")


# All runs in one folder take the time of one.
@pytest.mark.parametrize(
    ("folder", "runs"),
    [
        (HOSTILE_NAMES[0], HOSTILE_NAMES),
        *(pytest.param(name, [name], marks=pytest.mark.slow) for name in HOSTILE_NAMES[1:]),
    ],
)
def test_names_of_runs_are_text_and_nothing_else(
    browser: Browser, run: Path, tmp_path: Path, folder: str, runs: list[str]
) -> None:
    for name in runs:
        shutil.copytree(run, tmp_path / folder / name)
        write_steps(tmp_path / folder / name, step_s=0.5, parts=True)
    write_steps(tmp_path / folder / "dense", step_s=1.0, parts=False)
    page, output = report(tmp_path / folder, tmp_path)
    assert "\x1b" not in output
    check_as_a_reader(browser, page)
    assert browser.run("document.querySelector('h1').textContent") == printable(folder)
    text = browser.run("document.body.textContent")
    assert all(printable(name) in text for name in runs)
    assert browser.run("document.querySelectorAll('img, script, [onload], [onerror]').length") == 0


def test_broken_lines_are_counted_and_named(browser: Browser, run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    text = (run / "decisions.jsonl").read_text().splitlines()
    text[5] = text[5][: len(text[5]) // 2]
    (folder / "decisions.jsonl").write_text("\n".join([*text, "<script>alert(1)</script>"]) + "\n")
    page, output = report(folder, tmp_path)
    flat = output.replace("\n", "")
    assert "decisions.jsonl, line 6 is broken (" in flat
    assert "and 1 more" in flat
    check_as_a_reader(browser, page)
    text = browser.run("document.body.innerText")
    assert "Skipped: 2 broken lines" in text
    assert "line 6 is broken" in text


def test_a_dense_run_alone_and_an_old_journal_are_shown_as_far_as_they_go(browser: Browser, tmp_path: Path) -> None:
    from cgx_ray.commands.report import write_page

    write_steps(tmp_path / "dense", step_s=2.0, parts=False)
    write_page(tmp_path / "dense.html", "dense only", [load_run(tmp_path / "dense")])
    check_as_a_reader(browser, tmp_path / "dense.html")
    assert "Train with CGXConfig(policy='adaptive')" in browser.run("document.body.innerText")
    old = tmp_path / "old"
    train(old)
    lines = [json.loads(line) for line in (old / "decisions.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["event"] in ("decision", "outcome")]
    for line in kept:
        for name in ("situation", "new_groups", "made_by"):
            line.pop(name, None)
        for plan in ("old", "new"):
            for option in line.get(plan, {}).get("options", {}).values():
                for field in set(option) - {"groups", "layers"}:
                    del option[field]
    (old / "decisions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    page, _ = report(old, tmp_path)
    check_as_a_reader(browser, page)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("banned", ["nothing"]),
        ("groups", [{"layers": [99], "option": "dense", "device": "auto"}]),
        ("backward_s", [1e300]),
    ],
)
def test_inputs_of_a_decision_that_make_no_sense_cost_a_picture_only(
    run: Path, tmp_path: Path, name: str, value: object
) -> None:
    lines = [json.loads(line) for line in (run / "decisions.jsonl").read_text().splitlines()]
    change = next(line for line in lines if line.get("new_groups"))
    change["situation"][name] = value
    (tmp_path / "decisions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page, _ = report(tmp_path, tmp_path)
    text = page.read_text()
    assert f"the decision after step {change['step']} cannot be drawn" in text
    assert text.count("After step") == sum(bool(line.get("new_groups")) for line in lines) - 1


def test_parts_of_a_step_add_up_to_it_and_shares_to_one(run: Path) -> None:
    record = load_run(run)
    found = spans(record)
    for span in found:
        assert span.parts_s is not None
        assert sum(span.parts_s) == pytest.approx(span.step_s)
    parts = mean_parts(found)
    assert parts is not None
    for kind in ("codec", "scheme", "density"):
        shares = shares_by(kind, record, found)
        assert sum(shares.values()) == pytest.approx(1.0)
    assert {"dense", "qsgd"} <= shares_by("codec", record, found).keys()
    assert len(options_by_version(record)) >= 3


def test_the_speed_up_against_predicted_dense_steps_is_that_of_the_fake_network(run: Path) -> None:
    record = load_run(run)
    gained = speed_up(record, None)
    assert gained is not None
    # Dense takes 0.3 s at 100 Gbit/s, 0.3 + 2.4 s at 0.1 Gbit/s, and 0.3 + 12 s at 0.02 Gbit/s.
    found = spans(record)
    seconds = sum(span.num_steps * span.step_s for span in found)
    assert gained.ratio == pytest.approx((15 * 0.3 + 30 * 2.7 + 75 * 12.3) / seconds, rel=0.15)


def test_pauses_make_no_run_slower_than_dense_and_are_no_compute(tmp_path: Path) -> None:
    # 600 steps of 13 ms, dense but for three that time a codec in one layer. Every 50 steps all ranks report; rank 0
    # evaluates every 30 and saves every 200.
    def pause_s(step: int, rank: int) -> float:
        alone_s = (0.4 if step % 30 == 0 else 0.0) + (3.0 if step % 200 == 0 else 0.0)
        return (1.2 if step % 50 == 0 else 0.0) + (alone_s if rank == 0 else 0.0)

    quiet, paused = start(tmp_path / "quiet"), start(tmp_path / "paused")
    for run in (quiet, paused):
        run.gbps, run.compute_s = 1e3, 0.013
    paused.pause_s = pause_s
    for run in (quiet, paused):
        run.run(600)
        run.loop.end(1e3)
        assert run.loop.facts().speed_up == 1.0
    plain, record = load_run(tmp_path / "quiet"), load_run(tmp_path / "paused")
    assert [line["reason"] for line in record.decisions] == [line["reason"] for line in plain.decisions]
    found = spans(record)
    for other in (None, plain):
        gained = speed_up(record, other)
        assert gained is not None
        assert f"{gained.ratio:.2f}x" == "1.00x"
    assert mean_parts(found) == pytest.approx(mean_parts(spans(plain)))
    last_step = max(line["step"] for line in record.progress)
    total_s = sum(max(pause_s(step, rank) for rank in range(4)) for step in range(1, last_step + 1))
    assert sum(span.num_steps * span.between_s for span in found) == pytest.approx(total_s)
    assert between_share(found) == pytest.approx(total_s / (total_s + steps_s(found)))
    assert "passed between steps, where no codec helps" in next_step(record, None)


def test_a_little_time_between_steps_is_late_steps_and_not_named(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps, run.compute_s = 1e3, 0.3
    run.pause_s = lambda step, rank: 0.3 if step % 30 == 0 else 0.0
    run.run(100)
    record = load_run(tmp_path)
    assert sum(line["between_s"] for line in record.progress) > 0
    assert between_share(spans(record)) == 0.0
    assert "between steps" not in (view_of_record(record).speed or "")


def test_top_the_report_and_the_metrics_have_the_same_speed_up(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps = 0.1
    run.pause_s = lambda step, rank: 20.0
    run.run(300)
    record = load_run(tmp_path)
    facts = run.loop.facts()
    gained, newest = speed_up(record, None), record.progress[-1]["speed_up"]
    assert gained is not None
    # Dense takes 0.3 + 2.4 s, the plan 0.62 s.
    assert newest == pytest.approx(facts.speed_up) == pytest.approx(2.7 / 0.62, rel=0.02)
    assert gained.ratio == pytest.approx(newest, rel=0.05)
    assert view_of_record(record).speed == f"newest steps {newest:.2f}x as fast as dense, 97% of the time between steps"
    found = LiveState("run", []).fields(run.loop.facts(), run.loop.plans, record.progress)
    assert view_of_controller(found).speed == view_of_record(record).speed


def test_a_plan_that_fails_again_and_again_is_what_to_look_at_next(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.gbps, run.slowdown = 0.3, 8.0
    run.run(900)
    record = load_run(tmp_path)
    assert sum(line["kind"] == "disable" for line in record.decisions) >= 2
    assert "were slower than dense and taken back: run `cgx-ray profile`" in next_step(record, None)
