"""The control loop that `bench network` watches."""

from __future__ import annotations

from typing import Any, NamedTuple

from cgx_ray.control.journal.facts import LoopFacts
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.policy import Decision
from cgx_ray.monitors.sample import NodeSample

# Speed of the clock by which probes are due. In a training one is due per minute: the bench must not wait for minutes.
_FAST_PROBES = 12


class Watched(NamedTuple):
    """Facts that the loop knows; steps since it has started; traffic of other programs that host 0 sees."""

    facts: LoopFacts
    num_steps: int
    neighbour_bytes_per_s: float | None


class WatchedLoop(ControlLoop):
    """Can be asked what it knows, and to start again."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._num_steps = 0
        self._neighbour_bytes_per_s: float | None = None

    def observe(self, sample: NodeSample, now_s: float) -> list[Decision]:
        if any(0 in step.ranks for step in sample.steps):
            self._num_steps += len(sample.steps)
            self._neighbour_bytes_per_s = sample.host.neighbour_bytes_per_s
        return super().observe(sample, now_s)

    def next_probe(self, node_id: str, now_s: float) -> str | None:
        return super().next_probe(node_id, _FAST_PROBES * now_s)

    def start_over(self) -> None:
        """Begin again with what has been learned, as after a crash of this process."""
        WatchedLoop.__init__(self, self._policy, self._journal, self.history())
        self.resume()

    def watched(self) -> Watched:
        return Watched(self.facts(), self._num_steps, self._neighbour_bytes_per_s)
