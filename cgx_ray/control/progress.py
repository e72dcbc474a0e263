"""Where the time of the steps goes, written to the journal in growing intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cgx_ray.control.facts import LoopFacts
from cgx_ray.monitors.sample import NodeStep

# Least seconds that a line stands for, and least share of the training so far: a week gives a thousand lines.
LINE_S, LINE_SHARE = 2.0, 0.01
# Values of a rank's sample that a line has the means of.
PARTS = ("step_s", "compute_s", "encode_s", "exchange_s", "decode_s", "wire_bytes", "dense_bytes")


class Progress:
    """Sums over the samples since the last line. They are all of one plan."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._last_s = 0.0
        self._version = -1
        # Newest step of the lines so far.
        self._told_step = -1
        self._start_over()

    def _start_over(self) -> None:
        self._num_samples = 0
        self._steps: set[int] = set()
        self._sums = dict.fromkeys(PARTS, 0.0)
        self._loss_sum, self._num_losses = 0.0, 0

    def add(
        self, parts: Sequence[NodeStep], now_s: float, time_s: float, facts: Callable[[], LoopFacts]
    ) -> Iterator[dict[str, Any]]:
        """Add a node's records; yield the lines that are due, one at the latest when another plan is in force.

        Steps of a plan that is no longer in force are left out.

        now_s   by the controller's clock, which is never set back
        time_s  by the node's, for the lines
        facts   asked for a line only: they take a prediction, and most reports make no line
        """
        if self._first_s is None and parts:
            self._first_s = self._last_s = now_s
        for part in parts:
            if part.plan_version > self._version:
                if self._steps:
                    yield self._line(now_s, time_s, facts())
                self._start_over()
                self._version = part.plan_version
            if part.plan_version == self._version:
                self._num_samples += len(part.ranks)
                # Other nodes may have told it before the last line.
                if part.step > self._told_step:
                    self._steps.add(part.step)
                for name in PARTS:
                    self._sums[name] += sum(getattr(part, name))
                self._loss_sum += sum(part.losses)
                self._num_losses += len(part.losses)
        if self._first_s is not None and self._steps:
            due_s = max(LINE_S, LINE_SHARE * (now_s - self._first_s))
            if now_s - self._last_s >= due_s:
                yield self._line(now_s, time_s, facts())

    def _line(self, now_s: float, time_s: float, facts: LoopFacts) -> dict[str, Any]:
        rate = facts.bandwidth
        self._told_step = max(self._steps)
        line = {
            "event": "progress",
            "time": time_s,
            "step": self._told_step,
            "num_steps": len(self._steps),
            "version": self._version,
            **{part: total / self._num_samples for part, total in self._sums.items()},
            "bandwidth_gbps": [8e-9 * value for value in (rate.low, rate.value, rate.high)] if rate else None,
            "loss": self._loss_sum / self._num_losses if self._num_losses else None,
            "latency_ms": facts.latency_s * 1e3 if facts.latency_s is not None else None,
            "slow_ranks": sorted(facts.slow_ranks),
            "silent_nodes": sorted(facts.silent_nodes),
        }
        self._last_s = now_s
        self._start_over()
        return line
