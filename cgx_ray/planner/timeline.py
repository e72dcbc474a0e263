"""One training step as the engine runs it: backward makes groups ready, one thread encodes and sends them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cgx_ray.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpan:
    """When one group went through the communication thread, in seconds from the start of the step."""

    ready_s: float
    start_s: float
    encoded_s: float
    exchanged_s: float
    decoded_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A predicted step.

    step_s     until backward is over and the last group is decoded
    exposed_s  the part of step_s after the last group was ready: communication that compute did not hide
    bound_by   largest part of the critical path, which is the wait for the first group of the last busy
               period (compute), then that period's exchanges (network) and encoding and decoding (codec)
    """

    step_s: float
    exposed_s: float
    bound_by: Literal["compute", "network", "codec"]
    spans: tuple[GroupSpan, ...]


def predict_step(
    ready_s: Sequence[float],
    encode_s: Sequence[float],
    exchange_s: Sequence[float],
    decode_s: Sequence[float],
) -> Timeline:
    """Play the step through; one entry a group in plan order, which is the order they are sent in.

    A group starts when it is ready and the group before it is decoded, even if a later one is ready earlier.
    Raises ConfigError if there is no group, lengths differ or a time is negative or not finite.
    """
    _check_times(ready_s=ready_s, encode_s=encode_s, exchange_s=exchange_s, decode_s=decode_s)
    spans: list[GroupSpan] = []
    free_s, busy_since = 0.0, 0
    for index, ready in enumerate(ready_s):
        if ready > free_s:
            busy_since = index
        start = max(ready, free_s)
        encoded = start + encode_s[index]
        exchanged = encoded + exchange_s[index]
        free_s = exchanged + decode_s[index]
        spans.append(
            GroupSpan(ready_s=ready, start_s=start, encoded_s=encoded, exchanged_s=exchanged, decoded_s=free_s)
        )
    network_s = math.fsum(exchange_s[busy_since:])
    codec_s = math.fsum(encode_s[busy_since:]) + math.fsum(decode_s[busy_since:])
    parts: dict[Literal["compute", "network", "codec"], float] = {
        "compute": spans[busy_since].start_s,
        "network": network_s,
        "codec": codec_s,
    }
    return Timeline(
        step_s=free_s,
        exposed_s=free_s - max(ready_s),
        bound_by=max(parts, key=lambda part: parts[part]),
        spans=tuple(spans),
    )


def _check_times(**times_s: Sequence[float]) -> None:
    lengths = {name: len(times) for name, times in times_s.items()}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        given = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise ConfigError(f"{given}; give one time a group in each, for at least one group")
    for name, times in times_s.items():
        for index, time_s in enumerate(times):
            if not (math.isfinite(time_s) and time_s >= 0):
                raise ConfigError(f"{name} of group {index} is {time_s!r}; give finite seconds, 0 or more")
