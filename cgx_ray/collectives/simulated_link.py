"""A slow link in software, for machines where the real one cannot be shaped: ranks sleep before they send."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from cgx_ray.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLink:
    """Latency and rate of the simulated link between any two ranks.

    Every rank counts as a node of its own, so hierarchical plans run as flat ones.

    latency_s  one way
    schedule   (first step, bit/s) pairs, ascending by step, the first for step 0
    """

    latency_s: float
    schedule: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.schedule]
        rates = [rate for _, rate in self.schedule]
        if self.latency_s < 0 or not math.isfinite(self.latency_s):
            raise ConfigError(f"simulated latency {self.latency_s!r} s is not allowed; give 0 or more")
        if not steps or steps[0] != 0 or steps != sorted(set(steps)):
            raise ConfigError(f"simulated schedule starts at steps {steps}; they must ascend from 0")
        if not all(rate > 0 for rate in rates):
            raise ConfigError(f"simulated rates {rates} bit/s are not allowed; give positive ones")

    def delay_s(self, step: int, num_hops: float, num_bytes: float) -> float:
        """Return the seconds that the link needs at `step` for `num_bytes` in `num_hops` rounds."""
        rate = next(rate for first, rate in reversed(self.schedule) if step >= first)
        return self.latency_s * num_hops + num_bytes * 8 / rate


class LinkDelay:
    """Sleeps for as long as a simulated link would hold this rank's messages back.

    It sleeps before sending, not after receiving: a late sender then also delays its peers, as on a real link.
    """

    def __init__(self, link: SimulatedLink) -> None:
        self._link = link
        self.begin_round()

    def begin_round(self) -> None:
        """Charge one more latency, with the first message that is sent from now on."""
        self._sent_bytes = 0
        self._received_bytes = 0
        self._held_bytes = 0
        self._hops_left = 1

    def hold(self, step: int, num_hops: float, num_bytes: float) -> None:
        """Sleep for `num_hops` latencies and the time that `num_bytes` take."""
        time.sleep(self._link.delay_s(step, num_hops, num_bytes))

    def hold_round(self, step: int, sent_bytes: int, received_bytes: int) -> None:
        """Add messages to the round and sleep for the bytes of its fuller direction that were not yet charged.

        Receives that are posted before the first send are charged with it.
        """
        self._sent_bytes += sent_bytes
        self._received_bytes += received_bytes
        if self._sent_bytes > 0:
            due_bytes = max(self._sent_bytes, self._received_bytes)
            self.hold(step, self._hops_left, due_bytes - self._held_bytes)
            self._hops_left, self._held_bytes = 0, due_bytes
