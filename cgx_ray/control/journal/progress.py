"""Where the time of the steps goes, written to the journal in growing intervals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from cgx_ray.control.joined_steps import MEAN_PARTS, JoinedStep
from cgx_ray.control.journal.facts import LoopFacts

# Least seconds that a line stands for, and least share of the training so far: a week gives a thousand lines.
LINE_S, LINE_SHARE = 2.0, 0.01


class _Sums:
    """Sums over steps of one plan. `last_step`: the newest of them.

    What dense steps would take is not known of all, such as those before a plan's first round. `speed_up` is the mean
    dense step of the known ones over the mean step of all.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.last_step = -1
        self._num_steps = 0
        self._parts = dict.fromkeys(("between_s", *MEAN_PARTS), 0.0)
        # A sum, and the number of what is in it.
        self._losses = [0.0, 0.0]
        self._dense_s = [0.0, 0.0]

    def add_step(self, step: JoinedStep, speed_up: float | None) -> None:
        self.last_step = max(self.last_step, step.step)
        self._num_steps += step.num_steps
        for name, mean in {"between_s": step.between_s, **step.means}.items():
            self._parts[name] += step.num_steps * mean
        if step.loss is not None:
            self._losses[0] += step.loss
            self._losses[1] += 1
        if speed_up is not None:
            self._dense_s[0] += step.num_steps * speed_up * step.means["step_s"]
            self._dense_s[1] += step.num_steps

    def fields(self) -> dict[str, Any]:
        """Return the means for a line of the journal."""
        loss, dense_s = (total / num if num else None for total, num in (self._losses, self._dense_s))
        means = {name: total / self._num_steps for name, total in self._parts.items()}
        return {
            "step": self.last_step,
            "num_steps": self._num_steps,
            "version": self.version,
            **means,
            "speed_up": dense_s / means["step_s"] if dense_s is not None and means["step_s"] > 0 else None,
            "loss": loss,
        }


def earlier_losses(journal: Path) -> Iterator[tuple[float, int]]:
    """Yield the mean loss and the number of steps of each progress line, the oldest first; nothing without a journal.

    Lines that are broken, or of steps without a loss, are left out.
    """
    with suppress(OSError), journal.open("rb") as file:
        # Decisions are long lines, and most of the file.
        for line in (line for line in file if b'"progress"' in line):
            with suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                if entry["event"] == "progress":
                    yield float(entry["loss"]), int(entry["num_steps"])


class Progress:
    """Sums over the joined steps since the last line, by plan."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._last_s = 0.0
        self._sums: list[_Sums] = []

    def add_step(self, step: JoinedStep, speed_up: float | None, now_s: float) -> None:
        """Add a step, but for the first: whatever came before training is in it.

        speed_up  as known after it
        now_s     by the controller's clock, which is never set back
        """
        if self._first_s is None:
            self._first_s = self._last_s = now_s
            return
        if not self._sums or self._sums[-1].version != step.plan_version:
            self._sums.append(_Sums(step.plan_version))
        self._sums[-1].add_step(step, speed_up)

    def due_lines(self, now_s: float, time_s: float, facts: Callable[[], LoopFacts]) -> Iterator[dict[str, Any]]:
        """Yield the lines that are due, one at the latest when another plan is in force.

        time_s  by the clock of a node, for the lines
        facts   asked for a line only: they take a prediction, and most reports make no line
        """
        if self._first_s is None:
            return
        due_s = self._last_s + max(LINE_S, LINE_SHARE * (now_s - self._first_s))
        while len(self._sums) > 1 or (self._sums and now_s >= due_s):
            yield self._line(self._sums.pop(0), time_s, facts())
            self._last_s, due_s = now_s, now_s + LINE_S

    def last_lines(self, time_s: float, facts: Callable[[], LoopFacts]) -> Iterator[dict[str, Any]]:
        """Yield the lines of the steps that are in none yet, at the end. Arguments are those of `due_lines`."""
        while self._sums:
            yield self._line(self._sums.pop(0), time_s, facts())

    def _line(self, sums: _Sums, time_s: float, facts: LoopFacts) -> dict[str, Any]:
        rate = facts.bandwidth
        return {
            "event": "progress",
            "time": time_s,
            **sums.fields(),
            "bandwidth_gbps": [8e-9 * value for value in (rate.low, rate.value, rate.high)] if rate else None,
            "latency_ms": facts.latency_s * 1e3 if facts.latency_s is not None else None,
            "is_dense_measured": facts.is_dense_measured,
            "slow_ranks": sorted(facts.slow_ranks),
            "silent_nodes": sorted(facts.silent_nodes),
        }
