"""What a link is like, as a value and as text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypedDict, cast

from cgx_ray.errors import LabError

Direction = Literal["up", "down"]
DIRECTIONS: tuple[Direction, ...] = ("up", "down")
MTU_BYTES = 9000


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkState:
    """One direction of a host's link to the switch.

    A packet passes its sender's uplink and its receiver's downlink. The lab divides latency, jitter and loss between
    the two, so that a value set for all hosts is what a path between two of them has; else a path has the mean
    of both latencies, and the smaller of both rates.

    rate_bit_per_s  of IP packets, headers included
    latency_s       one way
    jitter_s        latency varies in +- this; packets keep their order all the same
    loss            share of the packets that are lost, segments of `MTU_BYTES`
    queue_bytes     what the link holds before it drops packets (a line behind the host). None: the sender is paced
                    (a network card) and nothing is dropped
    """

    rate_bit_per_s: float
    latency_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    queue_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 1e5 <= self.rate_bit_per_s <= 1e11:
            raise LabError(
                f"rate {self.rate_bit_per_s:g} bit/s is not allowed; give at least 1e5 (100 kbit/s), at most 1e11"
            )
        if not 0 <= self.latency_s <= 10:
            raise LabError(f"latency {self.latency_s:g} s is not allowed; give 0 to 10 s, one way")
        if not 0 <= self.jitter_s <= self.latency_s:
            raise LabError(f"jitter {self.jitter_s:g} s is not allowed; give 0 to the latency, {self.latency_s:g} s")
        if not 0 <= self.loss < 1:
            raise LabError(f"loss {self.loss:g} is not allowed; give a share in [0, 1), as 0.01 or 1%")
        if self.queue_bytes is not None and self.queue_bytes < MTU_BYTES:
            raise LabError(f"a queue of {self.queue_bytes} bytes holds no packet; give {MTU_BYTES} or more, or none")

    @property
    def loss_of_link(self) -> float:
        """Of this link alone: two of them in a row lose `loss`."""
        return float(1 - (1 - self.loss) ** 0.5)

    def __str__(self) -> str:
        parts = [format_rate(self.rate_bit_per_s), f"{self.latency_s * 1e3:g}ms"]
        if self.jitter_s:
            parts.append(f"+-{self.jitter_s * 1e3:g}ms")
        if self.loss:
            parts.append(f"{self.loss:.3g} lost")
        if self.queue_bytes is not None:
            parts.append(f"queue {self.queue_bytes} bytes")
        return " ".join(parts)


class LinkChange(TypedDict, total=False):
    """Some fields of a `LinkState`."""

    rate_bit_per_s: float
    latency_s: float
    jitter_s: float
    loss: float
    queue_bytes: int | None


_UNITS = {
    "rate": ("rate_bit_per_s", {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "bit": 1.0}, "1gbit"),
    "latency": ("latency_s", {"us": 1e-6, "ms": 1e-3, "s": 1.0}, "5ms"),
    "jitter": ("jitter_s", {"us": 1e-6, "ms": 1e-3, "s": 1.0}, "1ms"),
    "loss": ("loss", {"%": 1e-2, "": 1.0}, "1%"),
    "queue": ("queue_bytes", {"kb": 1e3, "mb": 1e6, "b": 1.0}, "250kb or none"),
}
LINK_WORDS = tuple(_UNITS)
_QUANTITY = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)([a-z%]*)")


def parse_change(pairs: Iterable[tuple[str, str]]) -> LinkChange:
    """From words and texts as ("rate", "1gbit"), ("latency", "5ms"), ("queue", "none"). Raises LabError."""
    change: dict[str, float | int | None] = {}
    for word, text in pairs:
        if word not in _UNITS:
            raise LabError(f"{word!r} is not a property of a link; those are {', '.join(LINK_WORDS)}")
        field, units, example = _UNITS[word]
        match = _QUANTITY.fullmatch(text.lower())
        if word == "queue" and text == "none":
            change[field] = None
        elif match is None or match[2] not in units or match[1].count(".") > 1:
            raise LabError(f"{word} {text!r} is not understood; write {example}; units are {', '.join(units)}")
        else:
            value = float(match[1]) * units[match[2]]
            change[field] = round(value) if word == "queue" else value
    return cast(LinkChange, change)


def format_rate(bit_per_s: float) -> str:
    for unit, size in (("gbit", 1e9), ("mbit", 1e6)):
        if bit_per_s >= size:
            return f"{bit_per_s / size:g}{unit}"
    return f"{bit_per_s / 1e3:g}kbit"
