"""Cost of one exchange by scheme, for `cgx-ray collective`; and parsers of links."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from cgx_ray.errors import ConfigError
from cgx_ray.plan import CodecSpec, Scheme
from cgx_ray.planner.cost import Link, exchange_s
from cgx_ray.planner.papers.flexible import allgather_tree_s, artopk_tree_s

_BITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def parse_link(latency: str, bandwidth: str) -> Link:
    """A link of `"4ms"` and `"10gbps"`. Raises ConfigError for anything else."""
    return Link.from_rates(bandwidth_gbps=parse_gbps(bandwidth), latency_ms=1e3 * parse_seconds("latency", latency))


def parse_seconds(name: str, text: str) -> float:
    """Seconds of `"4ms"`, `"50us"` or `"0.1s"`. Raises ConfigError, which begins with `name`, for anything else."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) *(s|ms|us)", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{name} {text!r} is not allowed; give a number and s, ms or us, such as 4ms")
    return float(match[1]) * _SECONDS[match[2].lower()]


def parse_gbps(text: str) -> float:
    """Gigabits a second of `"10gbps"`; also kbit, mbit/s, tbps. Raises ConfigError for anything else."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) *([kmgt])(bps|bit|bit/s|bits)", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(
            f"bandwidth {text!r} is not allowed; give a number and kbps, mbps, gbps or tbps, such as 10gbps"
        )
    return float(match[1]) * _BITS[match[2].lower()] / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Milliseconds of one exchange by scheme, without codec time, and the fastest scheme.

    costs_ms  with 4 bytes of value and 4 of index per element, and the collectives of the literature (Flexible
              Communication, table 6): allgather by recursive doubling, artopk_tree with all values at each level, dense
              over a ring
    ours_ms   as this package sends top-k: indices packed, all pairs at once, trees by halving
    """

    scheme: str
    costs_ms: Mapping[str, float]
    ours_ms: Mapping[str, float]


def compare_schemes(*, numel: int, density: float, num_workers: int, link: Link) -> Comparison:
    """Compare schemes that average `numel` float32, of which each worker sends the share `density`.

    With one worker all cost nothing, and the fastest is dense. Raises ConfigError for a value that is not allowed.
    """
    if numel < 1:
        raise ConfigError(f"numel {numel!r} is not allowed; give the number of elements, 1 or more")
    codec = CodecSpec(name="topk", density=density)
    dense_bytes, wire_bytes = 4 * numel, 8 * numel * density

    def cost_s(scheme: Scheme, wire_bytes: float, index_bytes: float) -> float:
        return exchange_s(
            scheme,
            num_workers=num_workers,
            dense_bytes=dense_bytes,
            wire_bytes=wire_bytes,
            index_bytes=index_bytes,
            link=link,
        )

    costs_s = {
        "dense": cost_s(Scheme.DENSE, dense_bytes, 0),
        "allgather": allgather_tree_s(num_workers, wire_bytes, link),
        "artopk_ring": cost_s(Scheme.ARTOPK_RING, wire_bytes, wire_bytes / 2),
        "artopk_tree": artopk_tree_s(num_workers, wire_bytes, link, wire_bytes / 2),
    }
    ours = (Scheme.DENSE, Scheme.ALLGATHER, Scheme.ARTOPK_RING, Scheme.ARTOPK_TREE)
    return Comparison(
        scheme=min(costs_s, key=lambda scheme: costs_s[scheme]),
        costs_ms={scheme: 1e3 * seconds for scheme, seconds in costs_s.items()},
        ours_ms={
            str(scheme): 1e3 * cost_s(scheme, codec.payload_bytes(numel), codec.index_bytes(numel)) for scheme in ours
        },
    )
