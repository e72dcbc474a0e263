"""Journals that a disk, a killed process or a stranger has damaged: no command shows a traceback."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.control_runs import start

from cgx_ray.cli import main
from cgx_ray.report.journal_schema import JOURNAL_SCHEMA, journal_problem
from cgx_ray.report.record import LARGEST, SMALLEST, load_run
from cgx_ray.untrusted import parse_json

pytestmark = pytest.mark.long

Entry = dict[str, Any]
# In place of any value: of another type, not finite, or beyond what floats and pictures can hold.
JUNK = [None, True, "x", "\x1b[31m", "9" * 50, [], {}, [None], {"a": 1}, -1, 0, 0.5, 2**62, 2**63, 10**400]
JUNK += [math.nan, math.inf, -math.inf, 1e308, -1e308, 1e200, 5e-324, -0.0]
NUMBERS = [0, 1, 3, 1e14, 1e15, 1e200, 1e308, 1e-300, 5e-324, 2**62]
VALIDATOR = jsonschema.Draft202012Validator(json.loads(JOURNAL_SCHEMA.read_text()))


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[Entry]:
    """Return the journal of a run on a network that becomes slow twice."""
    folder = tmp_path_factory.mktemp("run")
    run = start(folder)
    for gbps, num_steps in ((100.0, 10), (0.1, 15), (0.02, 15)):
        run.gbps = gbps
        run.run(num_steps)
    run.loop.end(1e3)
    return [json.loads(line) for line in (folder / "decisions.jsonl").read_text().splitlines()]


def parts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each part of `value`, as what holds it and the key there."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in list(items):
        yield value, key
        yield from parts(one)


def changed(entry: Entry, chance: random.Random) -> Entry:
    """Return `entry` with one part deleted, or with something else in its place."""
    entry = copy.deepcopy(entry)
    holder, key = chance.choice(list(parts(entry)))
    way = chance.random()
    if way < 0.15:
        del holder[key]
    elif way < 0.5 and isinstance(holder[key], int | float):
        holder[key] = chance.choice(NUMBERS)
    else:
        holder[key] = copy.deepcopy(chance.choice(JUNK))
    return entry


def damaged(lines: list[Entry], folder: Path, chance: random.Random) -> Path:
    """Write a journal in which lines are changed, missing, cut or in another order; return its folder."""
    entries = [changed(line, chance) if chance.random() < 0.4 else line for line in lines]
    if chance.random() < 0.2:
        chance.shuffle(entries)
    texts = [json.dumps(entry) for entry in entries if chance.random() < 0.9]
    if chance.random() < 0.3:
        texts.append(texts[0][: chance.randrange(len(texts[0]))])
    (folder / "decisions.jsonl").write_text("\n".join(texts) + "\n")
    return folder


def check_command(*argv: str) -> str:
    """Return what a command says. It does so without a traceback."""
    done = CliRunner().invoke(main, argv)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert "\x1b" not in done.output
    return done.output


def fuzz(num_journals: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    options = settings(
        max_examples=num_journals,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    return lambda test: options(given(chance=st.randoms(use_true_random=True))(test))


@fuzz(60)
def test_top_and_replay_take_any_journal(lines: list[Entry], tmp_path: Path, chance: random.Random) -> None:
    folder = str(damaged(lines, tmp_path, chance))
    check_command("top", folder, "--once")
    check_command("replay", folder)


@pytest.mark.long
@fuzz(3)
def test_the_report_takes_any_journal(lines: list[Entry], tmp_path: Path, chance: random.Random) -> None:
    check_report(lines, tmp_path, chance)


@pytest.mark.slow
@fuzz(60)
def test_the_report_takes_any_of_many_journals(lines: list[Entry], tmp_path: Path, chance: random.Random) -> None:
    check_report(lines, tmp_path, chance)


def check_report(lines: list[Entry], tmp_path: Path, chance: random.Random) -> None:
    folder, page = damaged(lines, tmp_path, chance), tmp_path / "report.html"
    said = check_command("report", str(folder), "--html", str(page), "--plot", str(tmp_path / "a.png"), "--price", "1")
    record = load_run(folder)
    assert all(name in said for name in record.broken[:1])
    assert (record.clipped in said) or "holds no decision" in said


@fuzz(300)
def test_the_compiled_schema_refuses_what_jsonschema_does(lines: list[Entry], chance: random.Random) -> None:
    entry = changed(chance.choice(lines), chance)
    try:
        parse_json(json.dumps(entry))
    except ValueError:
        return  # the reader has refused it before
    problem = journal_problem(entry)
    if not VALIDATOR.is_valid(entry):
        assert problem
    elif problem:
        # To JSON Schema 3.0 is a whole number too.
        assert problem.endswith(("is not of type 'integer'", "is not of type ['integer', 'null']"))


def test_numbers_beyond_a_picture_are_clipped_and_said(lines: list[Entry], tmp_path: Path) -> None:
    entries = copy.deepcopy(lines)
    (first, second, *_) = [entry for entry in entries if entry["event"] == "progress"]
    first["step_s"], second["step_s"], second["loss"] = 1e300, 1e-300, -1e200
    (tmp_path / "decisions.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    record = load_run(tmp_path)
    assert record.broken == []
    assert [line["step_s"] for line in record.progress[:2]] == [LARGEST, SMALLEST]
    assert record.progress[1]["loss"] == -LARGEST
    place = f"decisions.jsonl, line {entries.index(first) + 1}.step_s 1e+300"
    note = f"clipped to 1e-15 or 1e+15: 3 numbers; first: {place}"
    assert record.clipped == note
    page = tmp_path / "report.html"
    said = check_command("report", str(tmp_path), "--html", str(page), "--plot", str(tmp_path / "a.png"))
    assert note in said
    assert note in page.read_text()


def test_a_broken_line_beyond_those_that_are_named_is_counted(lines: list[Entry], tmp_path: Path) -> None:
    (tmp_path / "decisions.jsonl").write_text(json.dumps(lines[0]) + "\n" + "x\n" * 1500)
    record = load_run(tmp_path)
    assert len(record.broken) == 1001
    assert record.broken[-1] == "500 more lines are broken"
