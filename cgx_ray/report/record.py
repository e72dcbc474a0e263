"""A run's folder as values: steps.jsonl, decisions.jsonl and network.jsonl, read while they grow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, Generic, TypeVar

from cgx_ray.errors import ConfigError, LabError
from cgx_ray.lab.events import LinkEvent, append_events

_NUMBER = (int | float, "a number")
_WHOLE = (int, "a whole number")
_TEXT = (str, "a text")
_JOURNAL_FIELDS: dict[str, dict[str, tuple[type | UnionType, str]]] = {
    "decision": {
        "time": _NUMBER,
        "step": _WHOLE,
        "kind": _TEXT,
        "old": (dict, "an object"),
        "new.plan": _TEXT,
        "reason": _TEXT,
        "inputs.world_size": _WHOLE,
        "inputs.bandwidth_gbps": _NUMBER,
        "inputs.latency_ms": _NUMBER,
        "predicted_step_s": _NUMBER,
        "predicted_dense_s": _NUMBER,
    },
    "outcome": {"time": _NUMBER, "step": _WHOLE, "measured_step_s": _NUMBER},
}
_Value = TypeVar("_Value")


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


class RunRecord:
    """What is known of a run so far. `poll` reads what was added since the last call, and raises ConfigError on a
    line that is broken; a last one without its end is left for later.

    steps    only of runs that write them, as the demo's
    network  links at the start, and each change
    end      validation_loss, weights_identical and weights_sha256, once training is over
    """

    def __init__(self, run_dir: Path, network_path: Path | None = None) -> None:
        """network_path  if it is not `network.jsonl` in the folder"""
        self.run_dir = run_dir
        self.name = run_dir.name
        self.steps: list[StepLine] = []
        self.decisions: list[dict[str, Any]] = []
        self.outcomes: list[dict[str, Any]] = []
        self.network: list[LinkEvent] = []
        self.end: dict[str, Any] | None = None
        self._network_path = network_path or run_dir / "network.jsonl"
        self._steps_tail = _Tail(run_dir / "steps.jsonl", _parse_step)
        self._journal_tail = _Tail(run_dir / "decisions.jsonl", _parse_journal)
        self._network_tail = _Tail(self._network_path, lambda line: LinkEvent(**line))

    @property
    def changes(self) -> list[LinkEvent]:
        """What became of links after the start."""
        return [event for event in self.network if event.event == "change"]

    def poll(self) -> bool:
        """Read new lines; True if there were any."""
        before = self._size()
        for line in self._steps_tail.lines():
            if isinstance(line, StepLine):
                self.steps.append(line)
            else:
                self.end = line
        for entry in self._journal_tail.lines():
            (self.decisions if entry["event"] == "decision" else self.outcomes).append(entry)
        self.network.extend(self._network_tail.lines())
        return self._size() != before

    def note(self, event: LinkEvent) -> None:
        """Append to the network's lines; the next `poll` reads it."""
        self._network_path.parent.mkdir(parents=True, exist_ok=True)
        append_events(self._network_path, [event])

    def _size(self) -> int:
        counts = (self.steps, self.decisions, self.outcomes, self.network)
        return sum(len(lines) for lines in counts) + (self.end is not None)


def load_run(run_dir: Path, network_path: Path | None = None) -> RunRecord:
    """Read a run's folder as it is now. Raises ConfigError on a line that is broken."""
    record = RunRecord(run_dir, network_path)
    record.poll()
    return record


def _parse_step(line: dict[str, Any]) -> StepLine | dict[str, Any]:
    if line["event"] == "end":
        return line
    return StepLine(**{field.name: line[field.name] for field in fields(StepLine)})


def _parse_journal(line: dict[str, Any]) -> dict[str, Any]:
    for name, (kind, allowed) in _JOURNAL_FIELDS[line["event"]].items():
        value: Any = line
        for key in name.split("."):
            if not isinstance(value, dict) or key not in value:
                raise KeyError(name)
            value = value[key]
        if not isinstance(value, kind):
            raise TypeError(f"{name} {value!r} is not allowed; it is {allowed}")
    return line


class _Tail(Generic[_Value]):
    """Reads the lines that were added to a JSON-lines file since the last call; the file may not exist yet."""

    def __init__(self, path: Path, parse: Callable[[dict[str, Any]], _Value]) -> None:
        self._path, self._parse = path, parse
        self._offset = self._num_lines = 0

    def lines(self) -> Iterator[_Value]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return  # its writer is in the middle of it
                self._offset += len(raw)
                self._num_lines += 1
                try:
                    value = self._parse(json.loads(raw))
                except (LookupError, TypeError, ValueError, LabError) as error:
                    reason = f"{type(error).__name__}: {error}"
                    raise ConfigError(
                        f"{self._path}, line {self._num_lines} is broken ({reason}); remove it"
                    ) from error
                yield value
