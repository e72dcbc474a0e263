"""Rates, durations, sizes, shares and counts: read from text as people write them, and written as text.

Parsers take `name`, what the text means to the user, such as "latency". Every parser raises ConfigError, whose message
begins with that name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from cgx_ray.errors import ConfigError

_NUMBER = r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?)"
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_RATES = {prefix + unit: size for prefix, size in _PREFIXES.items() for unit in ("bit", "bits", "bit/s", "bps")}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6}
_ELEMENTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_SHARES = {"": 1.0, "%": 1e-2}


def parse_rate(name: str, text: str, *, needs_unit: bool = True) -> float:
    """Return the bits per second of "10gbps", "100mbit" or "2.5 Gbit/s"; of "1e6" too if it needs no unit."""
    allowed = "a number and kbit, mbit, gbit or tbit (or kbps, mbps, gbps, tbps), such as 100mbit"
    if needs_unit:
        return _parse(name, text, _RATES, allowed)
    return _parse(name, text, {**_RATES, "": 1.0}, f"{allowed}, or bits per second without a unit")


def parse_seconds(name: str, text: str) -> float:
    """Return the seconds of "4ms", "50us" or "0.1s"."""
    return _parse(name, text, _SECONDS, "a number and s, ms or us, such as 4ms")


def parse_bytes(name: str, text: str) -> int:
    """Return the bytes of "250kb", which are 250,000."""
    return round(_parse(name, text, _BYTES, "a number and b, kb or mb, such as 250kb"))


def parse_elements(name: str, text: str) -> int:
    """Return the elements of "25M", which are 25,000,000, or of "25000000"."""
    return round(_parse(name, text, _ELEMENTS, "a number, or one of k, M or B, such as 25M"))


def parse_share(name: str, text: str) -> float:
    """Return the fraction of "1%" or "0.01"."""
    return _parse(name, text, _SHARES, "a fraction or a percentage, such as 0.01 or 1%")


def parse_count(name: str, text: str) -> int:
    """Return the whole number of "16"."""
    if re.fullmatch(r"[0-9]+", text.strip()) is None:
        raise ConfigError(f"{name} {text!r} is not allowed; give a whole number, such as 8")
    return int(text)


def format_rate(bit_per_s: float) -> str:
    """Return "1 Gbit/s" or "100 Mbit/s", for a reader."""
    value, prefix = _scaled_rate(bit_per_s)
    return f"{value:g} {prefix}bit/s"


def format_measured_rate(bit_per_s: float) -> str:
    """Return a rate as `format_rate`, with three digits, as one that was measured has no more."""
    return format_rate(float(f"{bit_per_s:.3g}"))


def compact_rate(bit_per_s: float) -> str:
    """Return "1gbit" or "100mbit", as options and `tc` write it; for names of rows too."""
    value, prefix = _scaled_rate(bit_per_s)
    return f"{value:g}{prefix.lower()}bit"


def format_seconds(seconds: float) -> str:
    """Return "10 ns", "4.25 ms" or "1.5 s" with three significant digits; "1,234 s" from 1,000 seconds on."""
    if seconds == 0 or seconds >= 999.5:
        return f"{seconds:,.0f} s"
    # Rounded first, so that 0.9996 s is 1 s and not 1,000 ms.
    rounded = float(f"{seconds:.3g}")
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if rounded >= size:
            return f"{rounded / size:.3g} {unit}"
    return f"{rounded * 1e9:.3g} ns"


def format_bytes(num_bytes: int) -> str:
    """Return "64 KiB" (64 x 1,024 bytes) or "256 MiB"."""
    return f"{num_bytes >> 10} KiB" if num_bytes < 1 << 20 else f"{num_bytes >> 20} MiB"


def format_count(count: int, noun: str) -> str:
    """Return "1 thread" or "4 threads"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _parse(name: str, text: str, units: Mapping[str, float], allowed: str) -> float:
    match = re.fullmatch(rf"{_NUMBER}\s*([a-z/%]*)", text.strip().lower())
    # GBps are bytes.
    is_bytes = units.keys() >= _RATES.keys() and "B" in text.replace("Bit", "bit")
    if match is None or match[2] not in units or is_bytes:
        raise ConfigError(f"{name} {text!r} is not allowed; give {allowed}")
    value = float(match[1]) * units[match[2]]
    if math.isinf(value):
        raise ConfigError(f"{name} {text!r} is not allowed, because it is too large; give {allowed}")
    return value


def _scaled_rate(bit_per_s: float) -> tuple[float, str]:
    for prefix, size in (("G", 1e9), ("M", 1e6)):
        if bit_per_s >= size:
            return bit_per_s / size, prefix
    return bit_per_s / 1e3, "k"
