"""Load of this node: network cards, processors and memory."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil

from cgx_ray.monitors.sample import HostLoad

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds over which a neighbour's rate is averaged. Own bytes are known at the end of a step, the cards' bytes at once;
# over a long window this difference is small.
NEIGHBOUR_WINDOW_S = 30.0
# Bytes on the card per byte of payload: headers of TCP, IP and Ethernet on 1448 bytes of payload are 5 %, and as much
# again is allowed for acknowledgements and Ray.
OVERHEAD = 1.1
# Bytes on the card per byte of a long message's payload: Ethernet, IP and TCP.
HEADERS = 1.05
# Seconds for which a monitor keeps the list of cards and their speeds. They rarely change, and asking their drivers
# takes half of the time of all readings.
CARDS_HOLD_S = 10.0
_PRESSURE = Path("/proc/pressure")


class NicBytes(NamedTuple):
    """Counters of one card since it came up: bytes sent and received, packets dropped or broken."""

    sent: int
    received: int
    errors: int = 0


def read_nics() -> dict[str, NicBytes]:
    """Return counters by card, without loopback. Empty if the node has only loopback."""
    return _counters(_speeds())


def _counters(cards: Collection[str]) -> dict[str, NicBytes]:
    return {
        name: NicBytes(count.bytes_sent, count.bytes_recv, count.errin + count.errout + count.dropin + count.dropout)
        for name, count in psutil.net_io_counters(pernic=True).items()
        if name in cards
    }


def _speeds() -> dict[str, float]:
    """Return bits per second by card, without loopback; 0 for a card that is down or whose speed is unknown."""
    return {
        name: card.speed * 1e6 if card.isup else 0.0
        for name, card in psutil.net_if_stats().items()
        if "loopback" not in card.flags.split(",")
    }


class Readings:
    """Readings that a kernel, a container or a card's driver may refuse, each by itself."""

    def __init__(self) -> None:
        self._refused: set[str] = set()

    def take(self, name: str, read: Callable[[], T], otherwise: T) -> T:
        """Return what `read` returns, or `otherwise` if it fails. The first error of each name is logged."""
        try:
            return read()
        except (OSError, psutil.Error, ValueError, LookupError) as error:
            if name not in self._refused:
                self._refused.add(name)
                logger.warning("this node does not report its %s (%r): it is left out from the metrics", name, error)
            return otherwise


class NicRates:
    """Bytes per second through all cards together, between two calls of `read`.

    num_errors  packets dropped or broken since this object was created
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
        """Return sent and received bytes per second since the last call; 0 if no time has passed."""
        now_s, now = self._clock(), self._read_nics()
        passed_s = now_s - self._last_s
        if passed_s <= 0:
            return 0.0, 0.0
        sent = received = 0
        for name in now.keys() & self._last.keys():
            # A card that was replaced or reset starts at 0 again, which must not count as negative traffic.
            sent += max(0, now[name].sent - self._last[name].sent)
            received += max(0, now[name].received - self._last[name].received)
            self.num_errors += max(0, now[name].errors - self._last[name].errors)
        self._last_s, self._last = now_s, now
        return sent / passed_s, received / passed_s


# Of all meters, so that an error is logged once.
_readings = Readings()


def card_with(address: str) -> str | None:
    """Return the name of the card that has an address; None if none has, or only loopback."""
    cards = _speeds()
    return next(
        (
            name
            for name, addresses in psutil.net_if_addrs().items()
            if name in cards and any(one.address.partition("%")[0] == address for one in addresses)
        ),
        None,
    )


class CardMeter(NicRates):
    """Payload bytes per second through the card with `address`, between two calls of `read`."""

    def __init__(
        self,
        address: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        read_nics: Callable[[], Mapping[str, NicBytes]] = read_nics,
    ) -> None:
        card: str | None = _readings.take("network cards", partial(card_with, address), None)

        def read_card() -> Mapping[str, NicBytes]:
            nothing: Mapping[str, NicBytes] = {}
            counts = _readings.take("network counters", read_nics, nothing)
            return {name: count for name, count in counts.items() if name == card}

        super().__init__(clock=clock, read_nics=read_card)

    def read(self) -> tuple[float, float]:
        """Return what was sent and received since the last call; 0 if the node does not report it."""
        sent, received = super().read()
        return sent / HEADERS, received / HEADERS


class Neighbours:
    """Traffic on the node's link that is not from this training: bytes of its cards less our own, for half a minute."""

    def __init__(self) -> None:
        self._window: deque[tuple[float, float]] = deque()
        self._seconds = 0.0

    def add_interval(self, nic_bytes: float, own_bytes: float | None, seconds: float) -> float | None:
        """Add an interval; return the neighbours' bytes per second, or None if own bytes of the window are unknown.

        nic_bytes  bytes through the cards in the busier direction
        own_bytes  bytes that this training sent, None if unknown
        """
        # NaN stands for unknown: every sum with it is NaN.
        self._window.append((nic_bytes - OVERHEAD * (math.nan if own_bytes is None else own_bytes), seconds))
        self._seconds += seconds
        while self._seconds - self._window[0][1] >= NEIGHBOUR_WINDOW_S:
            self._seconds -= self._window.popleft()[1]
        others = sum(others for others, _ in self._window)
        if math.isnan(others):
            return None
        return max(0.0, others / self._seconds) if self._seconds > 0 else 0.0


class HostMonitor:
    """Load of this node between two calls of `read`."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = clock()
        self._readings = Readings()
        # As of `_speeds`, and the time at which they were read.
        self._cards: Mapping[str, float] = {}
        self._cards_s = -math.inf
        self._nics = NicRates(clock=clock, read_nics=self._read_nics)
        self._neighbours = Neighbours()
        # The first call only sets the start of the interval.
        self._readings.take("processor load", psutil.cpu_percent, 0.0)

    def read(self, own_bytes: int | None) -> HostLoad:
        """Return the load, without what this node does not report.

        own_bytes  that this training sent from the node since the last call, None if unknown
        """
        take = self._readings.take
        sent, received = self._nics.read()
        pressure = {name: take(f"{name} pressure", partial(read_pressure, name), None) for name in ("cpu", "memory")}
        now_s = self._clock()
        passed_s, self._last_s = now_s - self._last_s, now_s
        return HostLoad(
            sent_bytes_per_s=sent,
            received_bytes_per_s=received,
            neighbour_bytes_per_s=self._neighbours.add_interval(max(sent, received) * passed_s, own_bytes, passed_s),
            nic_speed_bits_per_s=max(self._cards.values(), default=0.0),
            num_nic_errors=self._nics.num_errors,
            cpu_share=take("processor load", psutil.cpu_percent, 0.0) / 100,
            memory_share=take("memory in use", lambda: psutil.virtual_memory().percent, 0.0) / 100,
            pressure={name: share for name, share in pressure.items() if share is not None},
        )

    def _read_nics(self) -> Mapping[str, NicBytes]:
        """Return counters of the cards of at most CARDS_HOLD_S ago."""
        now_s = self._clock()
        if now_s - self._cards_s >= CARDS_HOLD_S:
            self._cards_s, self._cards = now_s, self._readings.take("network cards", _speeds, self._cards)
        return self._readings.take("network counters", partial(_counters, self._cards), {})


def read_pressure(resource: str, folder: Path = _PRESSURE) -> float | None:
    """Return the fraction of the last 10 s in which a process waited for `resource`, cpu or memory.

    None if the kernel does not report it.
    """
    try:
        with open(f"{folder}/{resource}") as file:
            first = file.readline()  # some avg10=1.23 avg60=0.45 avg300=0.06 total=789
    except FileNotFoundError:
        return None
    return float(dict(field.split("=") for field in first.split()[1:])["avg10"]) / 100
