"""Samples of all ranks, joined by step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import add
from statistics import median

from cgx_ray.control.network.traffic import ObservedExchange, StepTraffic
from cgx_ray.monitors.sample import Burst, NodeStep, StepValues, Transfer, reduce_nodes, shortest
from cgx_ray.plan import Scheme
from cgx_ray.planner.cost import terms

# Seconds after its first report in which all ranks report a step. On a quiet machine they take up to 2 s: a rank
# reports short steps to its agent every 0.5 s, and the agent to the controller every second.
AWAITED_S = 3.0
# Values of `NodeStep` with a number per rank.
MEAN_PARTS = ("step_s", "compute_s", "encode_s", "exchange_s", "decode_s", "wire_bytes", "dense_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedStep(StepValues):
    """One step of all ranks, or of those that are not silent. Times in seconds.

    step_s     median over ranks, without the time for which they wait for the longest pause of a rank
    codec_s    encode and decode, median over ranks
    means      of MEAN_PARTS, over ranks
    slowness   by rank that reported, its compute time over the median of these ranks
    node_sizes ranks of each node
    traffic    network observations; with many ranks, of some of the pairs. The shortest exchange of each group counts:
               longer ones contain the wait for late ranks
    """

    codec_s: float
    means: Mapping[str, float]
    slowness: Mapping[int, float]
    node_sizes: tuple[int, ...]
    traffic: StepTraffic

    @property
    def passed_s(self) -> float:
        """Seconds since the step, or the round, before."""
        return self.num_steps * self.step_s


@dataclass(slots=True)
class _OpenStep:
    """Records of a step, of different ranks; `first_s`: when the first one came."""

    plan_version: int
    first_s: float
    parts: list[NodeStep] = field(default_factory=list)

    @property
    def ranks(self) -> set[int]:
        return {rank for part in self.parts for rank in part.ranks}


class StepJoiner:
    """Collects the records of all nodes and returns each step when all ranks have reported it.

    Steps do not wait for a rank that has not reported one within AWAITED_S. The rank counts again from the next step
    that it reports in time.

    silent          ranks that steps do not wait for
    last_step       newest one that was joined, -1 before
    num_incomplete  steps that were joined without a rank
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self.silent: frozenset[int] = frozenset()
        self.last_step = -1
        self.num_incomplete = 0
        self._open: dict[int, _OpenStep] = {}
        # By rank, its newest step, and when it last reported in time.
        self._newest: dict[int, int] = {}
        self._in_time_s: dict[int, float] = {}
        # Number of ranks by their newest step, without the silent ones: no step waits for a rank that is past it.
        self._num_at: Counter[int] = Counter()
        self._count()
        # When the first sample came, of steps that were joined less than AWAITED_S after it.
        self._joined_s: dict[int, float] = {}

    def add_node_steps(self, parts: Iterable[NodeStep], now_s: float) -> list[JoinedStep]:
        """Add records, those of a rank in order; return the steps that they or the time complete, oldest first."""
        for part in parts:
            self._take(part, now_s)
        joined = []
        for step, one in sorted(self._open.items()):
            if self._is_ready(step, one, now_s):
                del self._open[step]
                self._joined_s[step], self.last_step = one.first_s, step
                self.num_incomplete += sum(len(part.ranks) for part in one.parts) < self._world_size
                joined.append(join(one.parts, self._world_size))
        self._joined_s = {step: first_s for step, first_s in self._joined_s.items() if now_s < first_s + AWAITED_S}
        return joined

    def _take(self, part: NodeStep, now_s: float) -> None:
        step, version = part.step, part.plan_version
        is_other_pass = step in self._open and self._open[step].plan_version != version
        if is_other_pass or any(step <= self._newest.get(rank, -1) for rank in part.ranks):
            # Training goes on from an earlier step, on all ranks. Samples of both passes must not be joined.
            self._open, self._newest, self._joined_s, self.last_step = {}, {}, {}, -1
            self._count()
        for rank in part.ranks:
            if rank not in self.silent:
                self._move(self._newest.get(rank, -1), step)
            self._newest[rank] = step
        if step > self.last_step:
            one = self._open.setdefault(step, _OpenStep(version, now_s))
            one.parts.append(part)
            first_s = one.first_s
        else:
            first_s = self._joined_s.get(step, -math.inf)
        if now_s < first_s + AWAITED_S:
            self._in_time_s.update(dict.fromkeys(part.ranks, now_s))
            if not self.silent.isdisjoint(part.ranks):
                self.silent -= frozenset(part.ranks)
                self._count()

    def _is_ready(self, step: int, one: _OpenStep, now_s: float) -> bool:
        """Return whether no other record of `step` is waited for; note the ranks that have become silent."""
        if min(self._num_at, default=math.inf) >= step:
            # The samples that are missing are lost: their ranks have reported a later step.
            return True
        if now_s < one.first_s + AWAITED_S:
            return False
        missing = set(range(self._world_size)) - self.silent - one.ranks
        self.silent |= {rank for rank in missing if now_s >= self._in_time_s.get(rank, -math.inf) + AWAITED_S}
        self._count()
        return True

    def _move(self, before: int, now: int) -> None:
        """Note that the newest step of a rank is another."""
        self._num_at[before] -= 1
        if not self._num_at[before]:
            del self._num_at[before]
        self._num_at[now] += 1

    def _count(self) -> None:
        """Count again the ranks that are not silent."""
        self._num_at = Counter(
            self._newest.get(rank, -1) for rank in range(self._world_size) if rank not in self.silent
        )


def join(parts: Sequence[NodeStep], world_size: int) -> JoinedStep:
    """Return one step from the records of different ranks that have reported it."""
    reduced, columns = reduce_nodes(parts), _columns(parts)
    step_s = median(columns["step_s"])
    compute_s = dict(zip((rank for part in parts for rank in part.ranks), columns["compute_s"], strict=True))
    usual_s = median(compute_s.values())
    return JoinedStep(
        step_s=step_s,
        error_bits=next((part.error_bits for part in parts if part.layer_errors), None),
        codec_s=median(map(add, columns["encode_s"], columns["decode_s"])),
        means={name: math.fsum(columns[name]) / len(columns[name]) for name in MEAN_PARTS},
        slowness={rank: compute_s[rank] / usual_s if usual_s > 0 else 1.0 for rank in sorted(compute_s)},
        node_sizes=_node_sizes(parts, world_size),
        traffic=_traffic(parts, reduced["num_steps"] * step_s, world_size),
        **reduced,
    )


def _columns(parts: Sequence[NodeStep]) -> dict[str, list[float]]:
    """Return `between_s` and MEAN_PARTS by rank, without the time for which ranks wait for another one's pause."""
    columns = {
        name: list(chain.from_iterable(getattr(part, name) for part in parts)) for name in ("between_s", *MEAN_PARTS)
    }
    if (longest_s := max(columns["between_s"])) > 0:
        waits_s = [longest_s - own_s for own_s in columns["between_s"]]
        columns["step_s"] = [
            max(step_s - wait_s, compute_s)
            for step_s, wait_s, compute_s in zip(columns["step_s"], waits_s, columns["compute_s"], strict=True)
        ]
        columns["exchange_s"] = [max(s - wait_s, 0.0) for s, wait_s in zip(columns["exchange_s"], waits_s, strict=True)]
    return columns


def _node_sizes(parts: Sequence[NodeStep], world_size: int) -> tuple[int, ...]:
    """Return the ranks of each node. If ranks are missing and nodes differ, they may be unknown: then one rank each."""
    num_ranks: Counter[int] = Counter()
    for part in parts:
        num_ranks[part.num_local] += len(part.ranks)
    if len(num_ranks) == 1:
        (size,) = num_ranks
        sizes = [size] * (world_size // size)
    else:
        sizes = [size for size, num in num_ranks.items() for _ in range(math.ceil(num / size))]
    return tuple(sorted(sizes)) if sum(sizes) == world_size else (1,) * world_size


def _traffic(parts: Sequence[NodeStep], step_s: float, world_size: int) -> StepTraffic:
    # With many ranks, most have none (`engine.counted`).
    seen = [
        # Ranks that share a node's link send at the same time, so each sees a part of its rate.
        (rank, part.num_local if part.num_local < world_size else 1, bursts, rates, lags_s)
        for part in parts
        for rank, bursts, rates, lags_s in zip(part.ranks, part.bursts, part.rate_from, part.lag_s, strict=True)
        if bursts or rates or lags_s
    ]
    return StepTraffic(
        seconds=step_s,
        exchanges=tuple(
            _exchange(shortest(transfers), world_size)
            for transfers in zip(*(part.transfers for part in parts), strict=True)
            # A hierarchical exchange uses two kinds of links, so its time shows neither.
            if transfers[0].intra == "flat"
        ),
        bursts={
            rank: tuple(Burst(num_sharing * burst.num_bytes, burst.seconds) for burst in bursts)
            for rank, num_sharing, bursts, _, _ in seen
            if bursts
        },
        pair_rate={(peer, rank): rate for rank, _, _, rates, _ in seen for peer, rate in rates.items() if rate > 0},
        round_trip_s=_round_trips({rank: lags_s for rank, *_, lags_s in seen}),
    )


def _round_trips(lags_s: Mapping[int, Mapping[int, float]]) -> dict[tuple[int, int], float]:
    """Return round trips by pair of ranks. `lags_s`: by rank and other rank."""
    trips = {
        (rank, peer): seconds + lags_s[peer][rank]
        for rank, own_s in lags_s.items()
        for peer, seconds in own_s.items()
        if rank < peer and rank in lags_s.get(peer, ())
    }
    # A clock that was set between the two messages can make a round trip negative.
    return {pair: seconds for pair, seconds in trips.items() if seconds > 0}


def _exchange(transfer: Transfer, world_size: int) -> ObservedExchange:
    hops, num_bytes = terms(
        Scheme(transfer.scheme), world_size, transfer.wire_bytes, transfer.wire_bytes, transfer.index_bytes
    )
    return ObservedExchange(hops=hops, num_bytes=num_bytes, seconds=transfer.seconds)
