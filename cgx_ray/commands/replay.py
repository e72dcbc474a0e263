"""`cgx-ray replay`: the decisions of a journal, made again by this version, or with another policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from cgx_ray.commands.options import console_for, json_option
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.replay import OF_SHARDED, DecisionSummary, Replay, ReplayedDecision, WhatIf
from cgx_ray.errors import CGXError, ConfigError
from cgx_ray.planner.fidelity import Fidelity
from cgx_ray.report.journal_schema import journal_problem
from cgx_ray.report.show import new_table, print_line, progress_bar, write_json
from cgx_ray.untrusted import BrokenLine, JsonLines, printable

# Decisions of each result that are listed, the first ones: a journal may have any size, memory may not.
MAX_LISTED = 1000
# Exit status if something differs, and for a journal that cannot be replayed.
DIFFERS, UNUSABLE = 1, 2
_START = b'{"event": "start"'


class BrokenLines:
    """Lines that were skipped: their number, and the first in words."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""

    def add_line(self, line: BrokenLine) -> None:
        self.count += 1
        self.first = self.first or f"line {line.number}: {line.reason:.200}"


class _UnusableJournal(click.ClickException):
    exit_code = UNUSABLE


@click.command()
@click.argument("journal", type=click.Path(exists=True, readable=True, path_type=Path))
@click.option("--all", "lists_all", is_flag=True, help="List the decisions that are the same too.")
@click.option("--min-gain", type=click.FloatRange(0, 1), help="What if: least gain that a codec must have.")
@click.option(
    "--candidates", multiple=True, metavar="CODEC", help="What if: a codec that may be chosen; may be repeated."
)
@click.option(
    "--fidelity",
    type=click.Choice([level.value for level in Fidelity]),
    help="What if: the policy of this level, as in CGXConfig.",
)
@json_option("every count and the listed decisions")
@click.pass_context
def replay(
    context: click.Context,
    journal: Path,
    lists_all: bool,
    min_gain: float | None,
    candidates: tuple[str, ...],
    fidelity: str | None,
    json_path: str | None,
) -> None:
    """Decide again from a journal, and list where this version decides otherwise.

    JOURNAL is the decisions.jsonl of an adaptive run, or its folder. Each decision of the policy is made again from the
    inputs that the journal holds of it. With --min-gain, --candidates or --fidelity it is made by that policy instead:
    what would have been decided in the same situations?

    Exit status: 0 if nothing differs, or with a "what if"; 1 if something differs; 2 if the journal cannot be replayed.
    """
    console = console_for(json_path)
    path = journal / "decisions.jsonl" if journal.is_dir() else journal
    try:
        if not path.is_file():
            raise ConfigError(f"{path} is no file; give the decisions.jsonl of a run, or the folder that it lies in")
        what_if = WhatIf(other=_policy(candidates, fidelity), min_gain=min_gain)
        run, broken, listed = _replay(path, what_if, lists_all, console)
    except CGXError as error:
        raise _UnusableJournal(str(error)) from error
    _show(listed, _summary(run, broken, listed), console)
    if json_path is not None:
        write_json(json_path, _fields(path, run, broken, listed, what_if))
    if run.num_different and not what_if:
        context.exit(DIFFERS)


def _policy(candidates: Sequence[str], fidelity: str | None) -> Adaptive | None:
    """Return the policy of a "what if"; None for that of the run."""
    if candidates and fidelity is not None:
        raise ConfigError(
            "--candidates and --fidelity are both given, and both say which codecs may be chosen; give one of them"
        )
    if fidelity is not None:
        return Adaptive(fidelity=fidelity)
    return Adaptive(candidates=candidates) if candidates else None


def _replay(
    path: Path, what_if: WhatIf, lists_all: bool, console: Console
) -> tuple[Replay, BrokenLines, list[ReplayedDecision]]:
    """Return what became of all decisions, the broken lines, and the decisions to list."""
    run, broken = Replay(what_if), BrokenLines()
    listed: list[ReplayedDecision] = []
    num_listed: Counter[str] = Counter()
    size = path.stat().st_size
    with progress_bar(console) as on_part:
        lines = JsonLines(path, journal_problem)
        for line in lines.new(is_finished=True):
            on_part(path.name, lines.num_bytes / max(size, 1))
            if isinstance(line, BrokenLine):
                broken.add_line(line)
                # The decisions after a broken start are not of the start before it.
                found = run.add_line({"event": "start"}) if line.start.startswith(_START) else None
            else:
                found = run.add_line(line[1])
            if found is None or (_result(found) == "same" and not lists_all):
                continue
            num_listed[_result(found)] += 1
            if num_listed[_result(found)] <= MAX_LISTED:
                listed.append(found)
    if run.num_again == 0:
        raise ConfigError(f"{path} {_nothing_to_replay(run, broken, listed, size)}")
    return run, broken, listed


def _result(found: ReplayedDecision) -> str:
    if not found.is_made_again:
        return "not re-decided"
    return "differs" if found.differs else "same"


def _nothing_to_replay(run: Replay, broken: BrokenLines, listed: Sequence[ReplayedDecision], size: int) -> str:
    give = "give the decisions.jsonl of a run with CGXConfig(policy='adaptive')"
    if size == 0:
        return f"is empty; {give}"
    if run.kinds == {"static"}:
        return f"is of a run with policy 'static', which keeps the plan that the user chose and decides nothing; {give}"
    note = f" (broken lines: {broken.count}; the first is {broken.first})" if broken.count else ""
    if listed and listed[0].note == OF_SHARDED:
        return f"is of a sharded model: {OF_SHARDED}; `cgx-ray report` shows what was tried"
    if listed:
        first = f"the first of {run.not_again.total()}, after step {listed[0].step}: {listed[0].note}"
        return f"holds no decision that can be made again{note}; {first}; {give}"
    if run.kinds and note:
        return f"holds no decision{note}; {give}"
    if run.kinds:
        return "holds no decision yet: a run decides after its first steps; wait for them"
    return f"is no journal: it holds no start and no decision{note}; {give}"


def _show(listed: Sequence[ReplayedDecision], summary: Iterable[str], console: Console) -> None:
    if listed:
        table = new_table(None, "step", "decided", "now", "predicted", "predicted now", num_left=3, wrap=True)
        for found in listed:
            table.add_row(
                "?" if found.step is None else str(found.step),
                printable(_phrase(found.recorded)),
                printable(_now(found)),
                _seconds(found.recorded),
                _seconds(found.now),
            )
        console.print(table, markup=False)
    for line in summary:
        print_line(console, printable(line))


def _counted(run: Replay) -> Iterable[str]:
    share = run.num_same / max(run.num_again, 1)
    # 100 % is all of them, never a rounded 99.96 %.
    text = f" ({f'{share:.0%}' if share in (0.0, 1.0) else f'{min(share, 0.999):.1%}'})" if run.num_again else ""
    yield f"decisions made again: {run.num_again}; the same: {run.num_same}{text}; otherwise: {run.num_different}"
    if run.num_other_prediction:
        yield f"the same decision, but another prediction: {run.num_other_prediction}"


def _summary(run: Replay, broken: BrokenLines, listed: Sequence[ReplayedDecision]) -> Iterable[str]:
    yield from _counted(run)
    if run.not_again:
        yield f"not re-decided: {run.not_again.total()} ({_counts(run.not_again)})"
    if run.unmeasured:
        yield f"never chosen, since the run measured no gain of them: {', '.join(run.unmeasured)}"
    if broken.count:
        yield f"broken lines that were skipped: {broken.count}; the first is {broken.first}"
    num_unlisted = run.num_different + run.not_again.total() - sum(_result(found) != "same" for found in listed)
    if num_unlisted:
        yield f"{num_unlisted} more are not listed: a list ends after {MAX_LISTED} of each kind"


def _counts(reasons: Counter[str]) -> str:
    return ", ".join(f"{count}x {reason}" for reason, count in reasons.most_common(5))


def _phrase(summary: DecisionSummary | None) -> str:
    return "?" if summary is None else f"{summary.kind}: {summary.plan}"


def _now(found: ReplayedDecision) -> str:
    if not found.is_made_again:
        return f"not re-decided: {found.note}"
    if found.now is None:
        return found.note
    return f"{_phrase(found.now)} {found.note}".strip() if found.differs else "the same"


def _seconds(summary: DecisionSummary | None) -> str:
    return "" if summary is None else f"{summary.step_s:.4g} s"


def _fields(
    path: Path, run: Replay, broken: BrokenLines, listed: Sequence[ReplayedDecision], what_if: WhatIf
) -> dict[str, Any]:
    return {
        "journal": str(path),
        "what_if": {
            "min_gain": what_if.min_gain,
            "options": None if what_if.other is None else list(map(str, what_if.other.options)),
        },
        "num_made_again": run.num_again,
        "num_same": run.num_same,
        "num_different": run.num_different,
        "num_other_prediction": run.num_other_prediction,
        "not_re_decided": dict(run.not_again),
        "unmeasured": run.unmeasured,
        "num_broken_lines": broken.count,
        "first_broken_line": broken.first or None,
        "decisions": [{"result": _result(found), **asdict(found)} for found in listed],
    }
