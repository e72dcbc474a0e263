"""What this node is busy with: its network cards, processors and memory."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from cgx_ray.monitors.sample import HostLoad

# Own bytes are known at the end of a step, the cards' at once: over this long the difference is small.
NEIGHBOUR_WINDOW_S = 30.0
# Headers of TCP, IP and Ethernet on 1448 bytes of payload, and as much again for acknowledgements and Ray.
OVERHEAD = 1.1
_PRESSURE = Path("/proc/pressure")


class NicBytes(NamedTuple):
    """Bytes that one card has sent and received since it came up, and packets that it had to drop or found broken."""

    sent: int
    received: int
    errors: int = 0


def read_nics() -> dict[str, NicBytes]:
    """Counters by card, loopback left out. Empty if the node has nothing but loopback."""
    cards = _speeds()
    return {
        name: NicBytes(count.bytes_sent, count.bytes_recv, count.errin + count.errout + count.dropin + count.dropout)
        for name, count in psutil.net_io_counters(pernic=True).items()
        if name in cards
    }


def nic_speed_bits_per_s() -> float:
    """Of the fastest card that is up, as its driver has it; 0 if none says."""
    return max(_speeds().values(), default=0.0)


def _speeds() -> dict[str, float]:
    """Bits a second by card, loopback left out; 0 of one that is down or does not say."""
    return {
        name: card.speed * 1e6 if card.isup else 0.0
        for name, card in psutil.net_if_stats().items()
        if "loopback" not in card.flags.split(",")
    }


class NicRates:
    """Bytes a second of all cards together, between one `read` and the next.

    num_errors  packets dropped or broken since this object was made
    """

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
        self.num_errors = 0

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
            self.num_errors += max(0, now[name].errors - self._last[name].errors)
        self._last_s, self._last = now_s, now
        return sent / passed_s, received / passed_s


class Neighbours:
    """What others than this run put on the node's link: bytes of its cards less our own, over half a minute."""

    def __init__(self) -> None:
        self._window: deque[tuple[float, float]] = deque()
        self._seconds = 0.0

    def add(self, nic_bytes: float, own_bytes: float | None, seconds: float) -> float | None:
        """Take in an interval, the fuller direction of the cards; returns the rate of the others, 0 or more.

        None while own bytes of the last half minute are.
        """
        # NaN makes every sum that it is in unknown.
        self._window.append((nic_bytes - OVERHEAD * (math.nan if own_bytes is None else own_bytes), seconds))
        self._seconds += seconds
        while self._seconds - self._window[0][1] >= NEIGHBOUR_WINDOW_S:
            self._seconds -= self._window.popleft()[1]
        others = sum(others for others, _ in self._window)
        if math.isnan(others):
            return None
        return max(0.0, others / self._seconds) if self._seconds > 0 else 0.0


class HostMonitor:
    """Load of this node between one `read` and the next."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = clock()
        self._nics = NicRates(clock=clock)
        self._neighbours = Neighbours()
        psutil.cpu_percent()  # the first call has nothing to compare with

    def read(self, own_bytes: int | None) -> HostLoad:
        """`own_bytes`: what this run has sent from the node since the last call, None if that is not known."""
        sent, received = self._nics.read()
        now_s = self._clock()
        passed_s, self._last_s = now_s - self._last_s, now_s
        return HostLoad(
            sent_bytes_per_s=sent,
            received_bytes_per_s=received,
            neighbour_bytes_per_s=self._neighbours.add(max(sent, received) * passed_s, own_bytes, passed_s),
            nic_speed_bits_per_s=nic_speed_bits_per_s(),
            num_nic_errors=self._nics.num_errors,
            cpu_share=psutil.cpu_percent() / 100,
            memory_share=psutil.virtual_memory().percent / 100,
            pressure={name: share for name in ("cpu", "memory") if (share := read_pressure(name)) is not None},
        )


def read_pressure(resource: str, folder: Path = _PRESSURE) -> float | None:
    """Share of the last 10 s in which something waited for cpu or memory; None if the kernel does not say."""
    file = folder / resource
    if not file.exists():
        return None
    first = file.read_text().splitlines()[0]  # some avg10=1.23 avg60=0.45 avg300=0.06 total=789
    return float(dict(field.split("=") for field in first.split()[1:])["avg10"]) / 100
