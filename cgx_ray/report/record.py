"""The files of a run, steps.jsonl, decisions.jsonl and network.jsonl, read while they grow."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cgx_ray.errors import ConfigError, LabError
from cgx_ray.json_schema import compile_check
from cgx_ray.lab.events import LinkEvent, append_events
from cgx_ray.report.journal_schema import JOURNAL_FORMAT, TIME, journal_problem
from cgx_ray.units import format_count
from cgx_ray.untrusted import BrokenLine, JsonLines

# A single step of a small batch is mostly noise.
SMOOTHED_STEPS = 10
_PARTS = ("compute_s", "encode_s", "exchange_s", "decode_s")
# Numbers that pictures show, either way: with others the limits of an axis overflow.
SMALLEST, LARGEST = 1e-15, 1e15
# Fields that no picture shows, and that a decision is made again from.
_NOT_DRAWN = frozenset({"time", "situation", "told_codec_s"})
# Broken lines that are named. All are counted.
MAX_NAMED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One training step as rank 0 saw it. The parts of its time are None in a run without compression."""

    time: float
    step: int
    loss: float
    step_s: float
    compute_s: float | None
    encode_s: float | None
    exchange_s: float | None
    decode_s: float | None
    plan_version: int | None
    plan: str


_STEP_FIELDS = tuple(field.name for field in fields(StepLine))
_SECONDS = {"type": ["number", "null"], "minimum": 0}
_STEP_CHECKS = {
    "step": compile_check(
        {
            "type": "object",
            "required": ["event", *_STEP_FIELDS],
            "properties": {
                "event": {"enum": ["step"]},
                "time": TIME,
                "step": {"type": "integer", "minimum": 0},
                "loss": {"type": ["number", "null"]},
                "step_s": {"type": "number", "minimum": 0},
                **dict.fromkeys(_PARTS, _SECONDS),
                "plan_version": {"type": ["integer", "null"]},
                "plan": {"type": "string"},
            },
        }
    ),
    "end": compile_check(
        {
            "type": "object",
            "required": ["validation_loss", "weights_identical"],
            "properties": {"validation_loss": {"type": ["number", "null"]}, "weights_identical": {"type": "boolean"}},
        }
    ),
}
_EVENT_CHECK = compile_check({"type": "object", "required": ["time", "change"], "properties": {"time": TIME}})


class RunRecord:
    """A run's files, as far as they were read. `poll` reads the lines added since its last call.

    steps     empty for runs that do not write them; the demo's do
    decisions, outcomes, progress
              lines of the journal
    faults    lines of the journal about errors that ended the training on a rank
    drifts    lines of the journal about weights that differ between ranks by rounding
    starts    first lines of the journal's worker groups; none in a journal of an old version
    network   links at the start, and each change
    end       validation_loss, weights_identical and weights_sha256, once training is over
    is_ended  the journal's last worker group has ended
    newest_step
              last one that any rank has reported, None until the end and in older journals
    broken    lines that were skipped, in words: a full disk or a killed process leaves half a line
    """

    def __init__(self, run_dir: Path, network_path: Path | None = None) -> None:
        """network_path  default: `network.jsonl` in `run_dir`"""
        self.run_dir = run_dir
        self.name = run_dir.name
        self.steps: list[StepLine] = []
        self.decisions: list[dict[str, Any]] = []
        self.outcomes: list[dict[str, Any]] = []
        self.progress: list[dict[str, Any]] = []
        self.starts: list[dict[str, Any]] = []
        self.faults: list[dict[str, Any]] = []
        self.drifts: list[dict[str, Any]] = []
        self.is_ended = False
        self.newest_step: int | None = None
        self.broken: list[str] = []
        self.network: list[LinkEvent] = []
        self.end: dict[str, Any] | None = None
        self._network_path = network_path or run_dir / "network.jsonl"
        self._steps_file = JsonLines(run_dir / "steps.jsonl", _step_problem)
        self._journal_file = JsonLines(run_dir / "decisions.jsonl", journal_problem)
        self._network_file = JsonLines(self._network_path, _event_problem)
        self._num_unnamed = 0
        self._clip = _Clip()

    @property
    def has_journal(self) -> bool:
        """True if the run has told of itself in decisions.jsonl."""
        return bool(self.starts or self.decisions)

    @property
    def clipped(self) -> str:
        """Return in words how many numbers were clipped, "" if none was."""
        count, first = self._clip.count, self._clip.first
        return (
            f"clipped to {SMALLEST:g} or {LARGEST:g}: {format_count(count, 'number')}; first: {first}" if count else ""
        )

    @property
    def cut(self) -> list[str]:
        """The files that end in half a line, in words. It is being written, or its writer was killed."""
        files = (self._steps_file, self._journal_file, self._network_file)
        return [
            f"{file.path}: the last line is cut, and left out: it is being written, or the run was killed, or its disk "
            "was full"
            for file in files
            if file.is_cut
        ]

    @property
    def changes(self) -> list[LinkEvent]:
        """Changes of links after the start."""
        return [event for event in self.network if event.event == "change"]

    @property
    def start_time(self) -> float:
        """Time at which the first step began; without steps, the first time that is known."""
        if self.steps:
            return self.steps[0].time - self.steps[0].step_s
        times: list[float] = [line["time"] for line in (*self.decisions, *self.starts, *self.progress)]
        return min([*times, *(event.time for event in self.network)])

    @property
    def duration_s(self) -> float:
        """Seconds from the first to the last line of each worker group, together: without the time between them."""
        lines: list[float] = [line["time"] for line in (*self.decisions, *self.outcomes, *self.progress)]
        times = sorted([*lines, *(line.time for line in self.steps)])
        if not times:
            return 0.0
        begins: list[float] = [self.start_time, *(start["time"] for start in self.starts[1:]), math.inf]
        ends = [times[: bisect_left(times, later)][-1:] or [begin] for begin, later in itertools.pairwise(begins)]
        return sum(max(0.0, end - begin) for begin, [end] in zip(begins, ends, strict=False))

    def poll(self) -> bool:
        """Read new lines and return True if there were any; an unfinished last line is left for the next call.

        Raises ConfigError for a journal of a later format.
        """
        before = self._size()
        for line in self._read(self._steps_file):
            if line["event"] == "end":
                self.end = line | {"validation_loss": _or_nan(line["validation_loss"])}
            else:
                self.steps.append(
                    StepLine(**{name: line[name] for name in _STEP_FIELDS} | {"loss": _or_nan(line["loss"])})
                )
        for entry in self._read(self._journal_file):
            self._add(entry)
        self.network.extend(LinkEvent(**line) for line in self._read(self._network_file))
        return self._size() != before

    def _read(self, file: JsonLines) -> Iterator[dict[str, Any]]:
        """Yield the new lines of a file, clipped. Broken ones are named."""
        for line in file.new():
            if isinstance(line, BrokenLine):
                self.name_broken(f"{file.path}, line {line.number} is broken ({line.reason:.200})")
            else:
                yield self._clip.clip(line[1], f"{file.path.name}, line {line[0]}")

    def name_broken(self, text: str) -> None:
        """Add `text` to `broken`, or count it there if many are named already."""
        if len(self.broken) < MAX_NAMED:
            self.broken.append(text)
        else:
            self._num_unnamed += 1
            self.broken[MAX_NAMED:] = [f"{self._num_unnamed} more lines are broken"]

    def _add(self, entry: dict[str, Any]) -> None:
        """Add a line of the journal; one of an unknown event is from a later version, and of no use here."""
        lists = {
            "start": self.starts,
            "decision": self.decisions,
            "outcome": self.outcomes,
            "progress": self.progress,
            "fault": self.faults,
            "drift": self.drifts,
        }
        self.is_ended = entry["event"] == "end"
        self.newest_step = entry.get("newest_step")
        if entry["event"] in lists:
            lists[entry["event"]].append(entry)
        if entry["event"] == "start" and entry["format"] > JOURNAL_FORMAT:
            raise ConfigError(
                f"{self.run_dir / 'decisions.jsonl'} has format {entry['format']}, this version of cgx_ray reads "
                f"{JOURNAL_FORMAT}; update it"
            )

    def note(self, event: LinkEvent) -> None:
        """Append `event` to the network's file; the next `poll` reads it."""
        self._network_path.parent.mkdir(parents=True, exist_ok=True)
        append_events(self._network_path, [event])

    def _size(self) -> int:
        journal = (self.decisions, self.outcomes, self.progress, self.starts, self.faults, self.drifts)
        counts = (self.steps, *journal, self.network, self.broken)
        return sum(len(lines) for lines in counts) + (self.end is not None) + self.is_ended


def load_run(run_dir: Path, network_path: Path | None = None) -> RunRecord:
    """Read a run's folder as it is now. Raises ConfigError for a journal of a later format."""
    record = RunRecord(run_dir, network_path)
    record.poll()
    return record


def smooth_losses(lines: Sequence[StepLine]) -> list[float]:
    """Return, per step, the mean loss of that step and of up to `SMOOTHED_STEPS` - 1 before it."""
    losses = [line.loss for line in lines]
    windows = [losses[max(0, end - SMOOTHED_STEPS) : end] for end in range(1, len(losses) + 1)]
    return [sum(window) / len(window) for window in windows]


def _or_nan(loss: float | None) -> float:
    """Return `loss`; NaN, which JSON lacks, for null."""
    return math.nan if loss is None else loss


def _step_problem(line: Any) -> str:
    is_end = isinstance(line, dict) and line.get("event") == "end"
    return _STEP_CHECKS["end" if is_end else "step"](line)


def _event_problem(line: Any) -> str:
    try:
        LinkEvent(**line)
    except (TypeError, LabError) as error:
        return f"{type(error).__name__}: {error}"
    return _EVENT_CHECK(line)


class _Clip:
    """Brings numbers into the range that a picture can show, and counts those that were outside."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""

    def clip(self, value: Any, where: str) -> Any:
        """Return `value` with all its numbers, except those of `_NOT_DRAWN`, clipped. `where`: for `first`."""
        if isinstance(value, dict):
            return {key: one if key in _NOT_DRAWN else self.clip(one, f"{where}.{key}") for key, one in value.items()}
        if isinstance(value, list):
            return [self.clip(one, where) for one in value]
        if not isinstance(value, int | float) or SMALLEST <= abs(value) <= LARGEST or value == 0:
            return value
        self.count += 1
        self.first = self.first or f"{where} {value:.3g}"
        shown = type(value)(LARGEST if abs(value) > 1 else SMALLEST)
        return shown if value > 0 else -shown
