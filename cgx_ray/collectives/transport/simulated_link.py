"""A slow link in software, for machines where the real one cannot be shaped: ranks hold back what they send."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from cgx_ray.errors import ConfigError, names_arguments

# Bit/s. Less is most likely a rate in Mbit/s.
LEAST_RATE = 1e4


@names_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLink:
    """Latency and rate of the simulated link between any two ranks.

    For `CGXConfig(simulated_link=)`, and without Ray `attach(..., simulated_link=)`.
    Every rank counts as a node of its own, so hierarchical plans run as flat ones.

    latency_s  one way
    schedule   (first step, bit/s) pairs, ascending by step, the first for step 0; 10,000 bit/s or more
    """

    latency_s: float
    schedule: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        pairs = self.schedule if isinstance(self.schedule, tuple | list) else [()]
        if not all(isinstance(entry, tuple | list) and len(entry) == 2 for entry in pairs):
            raise ConfigError(
                f"simulated schedule {self.schedule!r} is not allowed; give pairs of first step and bit/s, such as "
                "((0, 1e8),)"
            )
        steps = [step for step, _ in self.schedule]
        rates = [rate for _, rate in self.schedule]
        if not isinstance(self.latency_s, int | float) or not 0 <= self.latency_s < math.inf:
            raise ConfigError(f"simulated latency {self.latency_s!r} is not allowed; give seconds, 0 or more")
        if not all(isinstance(number, int | float) for number in (*steps, *rates)):
            raise ConfigError(f"simulated schedule {self.schedule!r} is not allowed; give numbers, such as ((0, 1e8),)")
        if not steps or steps[0] != 0 or steps != sorted(set(steps)):
            raise ConfigError(f"simulated schedule starts at steps {steps}; they must ascend from 0")
        if not all(LEAST_RATE <= rate < math.inf for rate in rates):
            raise ConfigError(
                f"simulated rates {rates} bit/s are not allowed; give finite ones, {LEAST_RATE:g} or more, such as "
                "1e8 for 100 Mbit/s"
            )

    def rate_at(self, step: int) -> float:
        """Return the rate at `step`, in bit/s."""
        return next(rate for first, rate in reversed(self.schedule) if step >= first)


class LinkDelay:
    """The sending side of a rank's simulated link: when it would have carried messages.

    Bytes follow each other, and latencies overlap, as on a real link. Messages are held back before they are sent, not
    after they are received: a late sender then also delays its peers.
    """

    def __init__(self, link: SimulatedLink) -> None:
        self._link = link
        self._free_s = 0.0
        self._carried_bytes, self._carried_s = 0.0, 0.0

    @property
    def latency_s(self) -> float:
        """That of the link, one way."""
        return self._link.latency_s

    def due_s(self, step: int, num_hops: float, num_bytes: float) -> float:
        """Return the time, by `time.perf_counter`, when `num_bytes` that are sent now have made `num_hops` hops."""
        seconds = 8 * num_bytes / self._link.rate_at(step)
        self._free_s = max(time.perf_counter(), self._free_s) + seconds
        self._carried_bytes += num_bytes
        self._carried_s += seconds
        return self._free_s + num_hops * self._link.latency_s

    def take_bursts(self) -> list[tuple[int, int, float]]:
        """Return and forget all that was sent as one burst, in place of those received (`Mesh.take_bursts`).

        Bytes that were held back arrive at full speed, so no receiver sees the rate of the link.
        """
        num_bytes, seconds = round(self._carried_bytes), self._carried_s
        self._carried_bytes, self._carried_s = 0.0, 0.0
        return [(-1, num_bytes, seconds)] if num_bytes else []
