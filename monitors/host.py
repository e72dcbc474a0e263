"""What the network cards of this node carry."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import psutil


class NicBytes(NamedTuple):
    """Bytes that one card has sent and received since it came up."""

    sent: int
    received: int


def read_nics() -> dict[str, NicBytes]:
    """Counters by card, loopback left out. Empty if the node has nothing but loopback."""
    stats = psutil.net_if_stats()
    return {
        name: NicBytes(count.bytes_sent, count.bytes_recv)
        for name, count in psutil.net_io_counters(pernic=True).items()
        if name in stats and "loopback" not in stats[name].flags.split(",")
    }


class NicRates:
    """Bytes a second of all cards together, between one `read` and the next."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        read_nics: Callable[[], Mapping[str, NicBytes]] = read_nics,
    ) -> None:
        self._clock = clock
        self._read_nics = read_nics
        self._last_s = clock()
        self._last = read_nics()

    def read(self) -> tuple[float, float]:
        """Sent and received bytes a second since the last call; 0 if no time has passed."""
        now_s, now = self._clock(), self._read_nics()
        passed_s = now_s - self._last_s
        if passed_s <= 0:
            return 0.0, 0.0
        sent = received = 0
        for name in now.keys() & self._last.keys():
            # A card that was replaced or reset starts at 0 again: that is no negative traffic.
            sent += max(0, now[name].sent - self._last[name].sent)
            received += max(0, now[name].received - self._last[name].received)
        self._last_s, self._last = now_s, now
        return sent / passed_s, received / passed_s
