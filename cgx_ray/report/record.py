"""The files of a run, steps.jsonl, decisions.jsonl and network.jsonl, read while they grow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import jsonschema

from cgx_ray.errors import ConfigError, LabError
from cgx_ray.lab.events import LinkEvent, append_events

# A single step of a small batch is mostly noise.
SMOOTHED_STEPS = 10
# Format of decisions.jsonl that this version reads.
JOURNAL_FORMAT = 1
JOURNAL_SCHEMA = Path(__file__).with_name("journal.schema.json")
_Value = TypeVar("_Value")


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
        self.broken: list[str] = []
        self.network: list[LinkEvent] = []
        self.end: dict[str, Any] | None = None
        self._network_path = network_path or run_dir / "network.jsonl"
        self._steps_tail = _Tail(run_dir / "steps.jsonl", _parse_step, self.broken)
        self._journal_tail = _Tail(run_dir / "decisions.jsonl", _parse_journal, self.broken)
        self._network_tail = _Tail(self._network_path, lambda line: LinkEvent(**line), self.broken)

    @property
    def cut(self) -> list[str]:
        """The files that end in half a line, in words. It is being written, or its writer was killed."""
        tails = (self._steps_tail, self._journal_tail, self._network_tail)
        return [
            f"{tail.path}: the last line is cut, and left out: it is being written, or the run was killed, or its disk "
            "was full"
            for tail in tails
            if tail.is_cut
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

    def poll(self) -> bool:
        """Read new lines and return True if there were any; an unfinished last line is left for the next call.

        Raises ConfigError for a journal of a later format.
        """
        before = self._size()
        for line in self._steps_tail.lines():
            if isinstance(line, StepLine):
                self.steps.append(line)
            else:
                self.end = line
        for entry in self._journal_tail.lines():
            self._add(entry)
        self.network.extend(self._network_tail.lines())
        return self._size() != before

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


def _parse_step(line: dict[str, Any]) -> StepLine | dict[str, Any]:
    if line["event"] == "end":
        return line
    return StepLine(**{field.name: line[field.name] for field in fields(StepLine)})


@cache
def _journal_lines() -> Any:
    """Return the validator of the journal's lines.

    What only a replay reads is checked by its reader: validating its thousand numbers takes 10 ms per decision.
    """
    schema = json.loads(JOURNAL_SCHEMA.read_text())
    schema["$defs"] |= {"situation": {"type": "object"}, "groups": {"type": "array"}}
    return jsonschema.Draft202012Validator(schema)


def _parse_journal(line: dict[str, Any]) -> dict[str, Any]:
    """Return `line`. Raises ValueError if it is none of a journal."""
    problem = jsonschema.exceptions.best_match(_journal_lines().iter_errors(line))
    if problem is not None:
        raise ValueError(f"{problem.json_path}: {problem.message}")
    return line


class _Tail(Generic[_Value]):
    """The end of a JSON-lines file: each call reads the lines added since the last one. The file may not exist yet.

    A line that is broken is skipped, and named in `broken`.
    """

    def __init__(self, path: Path, parse: Callable[[dict[str, Any]], _Value], broken: list[str]) -> None:
        self.path, self._parse, self._broken = path, parse, broken
        self.is_cut = False
        self._offset = self._num_lines = 0

    def lines(self) -> Iterator[_Value]:
        self.is_cut = False
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    self.is_cut = True  # or still being written
                    return
                self._offset += len(raw)
                self._num_lines += 1
                try:
                    value = self._parse(json.loads(raw))
                except (LookupError, TypeError, ValueError, LabError, RecursionError) as error:
                    reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                    self._broken.append(f"{self.path}, line {self._num_lines} is broken ({reason:.200})")
                    continue
                yield value
