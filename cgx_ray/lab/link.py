"""The state of a link, as a value and as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypedDict, cast

from cgx_ray.errors import ConfigError, LabConfigError
from cgx_ray.units import compact_rate, parse_bytes, parse_count, parse_rate, parse_seconds, parse_share

Direction = Literal["up", "down"]
DIRECTIONS: tuple[Direction, ...] = ("up", "down")
# Of the hosts: the largest IP packet that they send, and the smallest that IPv4 allows.
MTU_BYTES, _LEAST_MTU_BYTES = 9000, 68


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """One direction of a host's link to the switch.

    A packet passes its sender's uplink and its receiver's downlink. The lab divides latency, jitter and loss between
    the two, so a path between two hosts has the value that is set for all hosts. Where hosts differ, a path has the
    mean of both latencies and the smaller of both rates.

    rate_bit_per_s  rate of IP packets, headers included
    latency_s       one way
    jitter_s        latency varies by up to this, up or down; packets keep their order
    loss            fraction of packets lost, each a segment of `MTU_BYTES`
    queue_bytes     bytes that wait at the link before it drops packets, as behind an access line. None: the sending
                    host waits instead, as behind a network card, and nothing is dropped
    mtu_bytes       larger IP packets are lost and their sender is not told, as behind a wrong switch
    """

    rate_bit_per_s: float
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    queue_bytes: int | None = None
    mtu_bytes: int = MTU_BYTES

    def __post_init__(self) -> None:
        if not 1e5 <= self.rate_bit_per_s <= 1e11:
            raise LabConfigError(
                f"rate {self.rate_bit_per_s:g} bit/s is not allowed; give at least 1e5 (100 kbit/s), at most 1e11"
            )
        if not 0 <= self.latency_s <= 10:
            raise LabConfigError(f"latency {self.latency_s:g} s is not allowed; give 0 to 10 s, one way")
        if not 0 <= self.jitter_s <= self.latency_s:
            raise LabConfigError(
                f"jitter {self.jitter_s:g} s is not allowed; give 0 up to the latency, {self.latency_s:g} s"
            )
        if not 0 <= self.loss < 1:
            raise LabConfigError(f"loss {self.loss:g} is not allowed; give a fraction in [0, 1), such as 0.01 or 1%")
        if self.queue_bytes is not None and self.queue_bytes < MTU_BYTES:
            raise LabConfigError(
                f"a queue of {self.queue_bytes} bytes holds no packet; give {MTU_BYTES} or more, or none"
            )
        if not _LEAST_MTU_BYTES <= self.mtu_bytes <= MTU_BYTES:
            raise LabConfigError(f"mtu {self.mtu_bytes} is not allowed; give {_LEAST_MTU_BYTES} to {MTU_BYTES} bytes")

    @property
    def loss_of_link(self) -> float:
        """Loss of this link alone: two such links in a row lose `loss`."""
        return float(1 - (1 - self.loss) ** 0.5)

    def __str__(self) -> str:
        parts = [compact_rate(self.rate_bit_per_s), f"{self.latency_s * 1e3:g}ms"]
        if self.jitter_s:
            parts.append(f"+-{self.jitter_s * 1e3:g}ms")
        if self.loss:
            parts.append(f"{self.loss:.3g} lost")
        if self.queue_bytes is not None:
            parts.append(f"queue {self.queue_bytes} bytes")
        if self.mtu_bytes != MTU_BYTES:
            parts.append(f"mtu {self.mtu_bytes}")
        return " ".join(parts)


class LinkChange(TypedDict, total=False):
    """Some fields of a `LinkState`."""

    rate_bit_per_s: float
    latency_s: float
    jitter_s: float
    loss: float
    queue_bytes: int | None
    mtu_bytes: int


def _parse_queue(name: str, text: str) -> int | None:
    try:
        return None if text == "none" else parse_bytes(name, text)
    except ConfigError as error:
        raise ConfigError(f"{error}, or none") from None


_PARSERS: dict[str, tuple[str, Callable[[str, str], float | None]]] = {
    "rate": ("rate_bit_per_s", parse_rate),
    "latency": ("latency_s", parse_seconds),
    "jitter": ("jitter_s", parse_seconds),
    "loss": ("loss", parse_share),
    "queue": ("queue_bytes", _parse_queue),
    "mtu": ("mtu_bytes", parse_count),
}
LINK_WORDS = tuple(_PARSERS)


def parse_change(pairs: Iterable[tuple[str, str]]) -> LinkChange:
    """Read words and texts such as ("rate", "1gbit"), ("latency", "5ms"), ("queue", "none"). Raises LabError."""
    change: dict[str, float | None] = {}
    for word, text in pairs:
        if word not in _PARSERS:
            raise LabConfigError(f"{word!r} is not a property of a link; those are {', '.join(LINK_WORDS)}")
        field, parse = _PARSERS[word]
        try:
            change[field] = parse(word, text)
        except ConfigError as error:
            raise LabConfigError(str(error)) from None
    return cast(LinkChange, change)
