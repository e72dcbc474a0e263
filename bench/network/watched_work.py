"""The work of a control loop that `bench network` watches."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from cgx_ray.control.journal.facts import LoopFacts
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.loop_work import LoopWork

# Speed of the clock by which probes are due. In a training one is due per minute: the bench must not wait for minutes.
_FAST_PROBES = 12


class Watched(NamedTuple):
    """Facts that the loop knows; steps since it has started; traffic of other programs that host 0 sees."""

    facts: LoopFacts
    num_steps: int
    neighbour_bytes_per_s: float | None


class WatchedWork(LoopWork):
    """Can be asked what the loop knows, and to start it again."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._num_steps = 0
        self._neighbour_bytes_per_s: float | None = None

    def add_report(self, node_id: str, data: bytes, now_s: float) -> str | None:
        sample = pickle.loads(data)
        if any(0 in step.ranks for step in sample.steps):
            self._num_steps += len(sample.steps)
            self._neighbour_bytes_per_s = sample.host.neighbour_bytes_per_s
        self._add(sample, now_s)
        return self._loop.next_probe(node_id, _FAST_PROBES * now_s)

    def start_over(self) -> None:
        """Go on with another loop, as after a crash of this process."""
        self._loop = ControlLoop(self._loop._policy, self._journal, self._loop.history())
        self._loop.resume()
        self._num_steps = 0

    def watched(self) -> Watched:
        return Watched(self._loop.facts(), self._num_steps, self._neighbour_bytes_per_s)
