"""A run's folder as values: steps.jsonl, decisions.jsonl and network.jsonl, read while they grow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One training step as rank 0 saw it. The parts are None in a run without compression."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RateChange:
    """The network's rate from `time` on; `step` was the last one finished before it."""

    time: float
    step: int
    rate_bit_per_s: float


class RunRecord:
    """What is known of a run so far. `poll` reads what was added since the last call.

    end  validation_loss, weights_identical and weights_sha256, once training is over
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.name = run_dir.name
        self.steps: list[StepLine] = []
        self.decisions: list[dict[str, Any]] = []
        self.outcomes: list[dict[str, Any]] = []
        self.changes: list[RateChange] = []
        self.end: dict[str, Any] | None = None
        self._steps_tail = _Tail(run_dir / "steps.jsonl")
        self._decisions_tail = _Tail(run_dir / "decisions.jsonl")
        self._network_tail = _Tail(run_dir / "network.jsonl")

    def poll(self) -> bool:
        """Read new lines; True if there were any."""
        before = self._size()
        for line in self._steps_tail.lines():
            if line["event"] == "step":
                self.steps.append(StepLine(**{field.name: line[field.name] for field in fields(StepLine)}))
            else:
                self.end = line
        for line in self._decisions_tail.lines():
            (self.decisions if line["event"] == "decision" else self.outcomes).append(line)
        self.changes.extend(RateChange(**line) for line in self._network_tail.lines())
        return self._size() != before

    def note_rate(self, change: RateChange) -> None:
        """Append to network.jsonl; the next `poll` reads it."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with (self.run_dir / "network.jsonl").open("a") as file:
            file.write(json.dumps({field.name: getattr(change, field.name) for field in fields(RateChange)}) + "\n")

    def _size(self) -> int:
        counts = (self.steps, self.decisions, self.outcomes, self.changes)
        return sum(len(lines) for lines in counts) + (self.end is not None)


def load_run(run_dir: Path) -> RunRecord:
    """Read a finished run's folder."""
    record = RunRecord(run_dir)
    record.poll()
    return record


class _Tail:
    """Reads the lines that were added to a JSON-lines file since the last call; the file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return  # its writer is in the middle of it
                self._offset += len(raw)
                yield json.loads(raw)
