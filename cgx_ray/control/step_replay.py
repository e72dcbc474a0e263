"""Joined steps of a run, taken by the control loop again: does this version decide the same?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from cgx_ray.control.journal import Journal
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.replay import READ_ERRORS, DecisionSummary, ReplayedDecision
from cgx_ray.control.step_ring import NAME, OLD_NAME, Decided, JoinedReport, RingStart, read_loop, read_ring
from cgx_ray.errors import ConfigError


class _NoJournal(Journal):
    """Writes nothing."""

    def __init__(self) -> None:
        super().__init__(Path())

    def write(self, entry: dict[str, object]) -> None:
        pass


class StepReplay:
    """Runs the loop through the files of a run's folder.

    A loop that has decided otherwise waits for steps of another plan than those that are there. So it goes on with the
    next file, which begins with a recorded state.

    num_steps                            joined steps that were taken again
    num_unusable                         steps after a decision that came out otherwise
    num_again, num_same, num_other_prediction
                                         as in `Replay`
    broken                               ends of files that cannot be read, in words
    """

    def __init__(self) -> None:
        self.num_steps = self.num_unusable = 0
        self.num_again = self.num_same = self.num_other_prediction = 0
        self.broken: list[str] = []

    @property
    def num_different(self) -> int:
        return self.num_again - self.num_same

    def run(self, folder: Path, on_part: Callable[[str, float], None]) -> Iterator[ReplayedDecision]:
        """Yield what became of each decision, oldest first.

        on_part  called with the name of a file and the part of it that is done

        Raises ConfigError if there is no file, or if this version cannot read the state of the loop.
        """
        paths = [path for path in (folder / OLD_NAME, folder / NAME) if path.is_file()]
        if not paths:
            raise ConfigError(
                f"{folder} has no {NAME}; give the folder of a run whose policy decides, with replay_bytes above 0"
            )
        for path in paths:
            yield from self._run_file(path, on_part)

    def _run_file(self, path: Path, on_part: Callable[[str, float], None]) -> Iterator[ReplayedDecision]:
        size = max(path.stat().st_size, 1)
        loop: ControlLoop | None = None
        for record in read_ring(path, lambda place: on_part(path.name, place / size), self.broken.append):
            if isinstance(record, RingStart):
                loop = read_loop(record, _NoJournal())
                continue
            report, decided = record
            if loop is None:
                self.num_unusable += len(report.steps)
                continue
            self.num_steps += len(report.steps)
            found = self._follow(loop, report, decided)
            yield from found
            if any(one.differs for one in found):
                loop = None

    def _follow(self, loop: ControlLoop, report: JoinedReport, recorded: Sequence[Decided]) -> list[ReplayedDecision]:
        try:
            now = loop.follow(report)
        except READ_ERRORS as error:
            step = report.steps[0].step if report.steps else None
            was = _summary(recorded[0]) if recorded else None
            found = [_replayed(step, was, None, f"fails: {type(error).__name__}: {error}")]
        else:
            found = [_compare(was, one) for was, one in zip_longest(recorded, now)]
        for one in found:
            self.num_again += 1
            self.num_same += not one.differs
            self.num_other_prediction += one.has_other_prediction
        return found


def _compare(was: Decided | None, now: Decided | None) -> ReplayedDecision:
    if was is None:
        assert now is not None
        return _replayed(now.step, None, _summary(now), "no decision was recorded")
    if now is None:
        return _replayed(was.step, _summary(was), None, "no decision")
    note = ""
    if _choice(was) != _choice(now):
        note = "in other groups, or after another step" if _phrase(was) == _phrase(now) else "another decision"
    return _replayed(was.step, _summary(was), _summary(now), note)


def _replayed(
    step: int | None, recorded: DecisionSummary | None, now: DecisionSummary | None, note: str
) -> ReplayedDecision:
    """Return what became of a decision. It differs if there is a `note`."""
    return ReplayedDecision(step=step, made_by="loop", recorded=recorded, now=now, differs=bool(note), note=note)


def _choice(one: Decided) -> object:
    return one.step, type(one.decision), one.plan.version, one.plan.groups


def _phrase(one: Decided) -> tuple[str, str]:
    return type(one.decision).__name__.lower(), one.plan.describe()


def _summary(one: Decided) -> DecisionSummary:
    kind, plan = _phrase(one)
    return DecisionSummary(kind=kind, plan=plan, step_s=one.decision.step_s, dense_s=one.decision.dense_s)
