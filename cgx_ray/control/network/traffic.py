"""Observations of the network by all ranks in one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cgx_ray.monitors.sample import Burst


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedExchange:
    """One group's exchange without the wait for late ranks.

    seconds  hops * alpha + num_bytes * beta, and delays by busy processors
    """

    hops: float
    num_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """Network observations of one step, which took `seconds`.

    bursts        by rank that received them; over a simulated link, by rank that sent them
    pair_rate     bytes per second by (sender, receiver), for pairs that sent long messages
    round_trip_s  by pair of ranks (a, b)
    """

    seconds: float
    exchanges: Sequence[ObservedExchange] = ()
    bursts: Mapping[int, Sequence[Burst]] = field(default_factory=dict)
    pair_rate: Mapping[tuple[int, int], float] = field(default_factory=dict)
    round_trip_s: Mapping[tuple[int, int], float] = field(default_factory=dict)


def gather_rates(
    steps: Iterable[StepTraffic],
) -> tuple[dict[int, list[Burst]], dict[tuple[int, int], list[float]]]:
    """Return all bursts by receiving rank, and the rates of each pair, without ranks and pairs that have none."""
    bursts: dict[int, list[Burst]] = defaultdict(list)
    pairs: dict[tuple[int, int], list[float]] = defaultdict(list)
    for step in steps:
        for rank, new in step.bursts.items():
            if new:
                bursts[rank] += new
        for pair, rate in step.pair_rate.items():
            pairs[pair].append(rate)
    return bursts, pairs
