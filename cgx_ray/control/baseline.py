"""Dense steps as a ratio to their own prediction, so that they can be compared with steps on another network."""

from __future__ import annotations

from collections import deque

from cgx_ray.control.evidence import MAX_STEPS, Evidence, evidence
from cgx_ray.control.network_change import network_cause
from cgx_ray.planner.cost import Link

# Error of the model (standard deviation of a logarithm) without any dense step, and on another network than the one
# that dense steps were measured on.
UNKNOWN_ERROR, MOVED_ERROR = 0.2, 0.1


class DenseBaseline:
    """Logarithm of measured over predicted seconds of the newest dense steps, all on one network."""

    def __init__(self) -> None:
        self._logs: deque[float] = deque(maxlen=MAX_STEPS)
        self._link: Link | None = None

    @property
    def num_steps(self) -> int:
        return len(self._logs)

    def add(self, log_ratio: float, link: Link) -> None:
        """Add a dense step on `link`; forget those on another network."""
        if self._link is None or network_cause(self._link, link) is not None:
            self._logs.clear()
            self._link = link
        self._logs.append(log_ratio)

    def on(self, link: Link) -> Evidence:
        """Return what is known of dense steps on `link`."""
        if self._link is None:
            return Evidence(0.0, UNKNOWN_ERROR)
        found = evidence(self._logs)
        return found if network_cause(self._link, link) is None else found.also(MOVED_ERROR)
