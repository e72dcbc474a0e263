"""Latency and bandwidth of the network, from what the engine's own messages show. No probes, no clock, no sockets.

Processors that are busy, ranks that are late and queues that are full only ever make a message slower. So everything
here looks at the fast side of what was seen: low quantiles of times, high quantiles of rates.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from cgx_ray.control.changes import ChangeDetector
from cgx_ray.control.topology import K, clusters, slow_links
from cgx_ray.monitors.sample import Burst

# What is remembered; a change of the network cuts it short.
WINDOW_S = 10.0
MIN_STEPS = 3
# How often estimates are made anew: with many ranks they take milliseconds.
REFRESH_S = 0.5
FAST_RATE = 0.95
FAST_TIME = 0.1
MIN_BURSTS = 4
MIN_WATCHED_BURSTS = 2
# Groups tell bandwidth from latency if their bytes a hop differ by this much.
SIZE_FACTOR = 4.0
FITTED_PER_SIZE = 5
# An estimate whose interval is wider than this says little.
SURE_FACTOR = 1.25
# Changes of latencies below this are of processors, not of the network.
LATENCY_FLOOR_S = 5e-4
LATENCY_ALARM = 0.45
# One link may be slow for longer than all of them, as it is while a neighbour's burst lasts and until queues are empty.
SLOW_ALARM = 2.0
# What a hop of an exchange, and a byte, may take of processors.
HOP_WORK_S = 1e-3
BYTE_WORK_S = 2e-8
_Z = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number, an interval that it lies in, and what it was made from."""

    value: float
    low: float
    high: float
    source: str

    @property
    def is_sure(self) -> bool:
        return 0 < self.high <= SURE_FACTOR * self.low


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One group's, without the wait for late ranks: seconds = hops * alpha + num_bytes * beta, and contention."""

    hops: float
    num_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What all ranks saw of the network in one step, which took `seconds`.

    bursts        by rank that received them
    pair_rate     bytes a second by (sender, receiver), where long messages went
    round_trip_s  between the ranks of a pair (a, b)
    """

    seconds: float
    exchanges: Sequence[Exchange] = ()
    bursts: Mapping[int, Sequence[Burst]] = field(default_factory=dict)
    pair_rate: Mapping[tuple[int, int], float] = field(default_factory=dict)
    round_trip_s: Mapping[tuple[int, int], float] = field(default_factory=dict)


class PassiveLink:
    """The link between two workers as the last ten seconds of training show it. `add` once a step.

    latency_s    one way, between ranks that are not near each other; None if nobody saw round trips
    bandwidth    payload bytes a second that a worker's link carries, the slowest's where some are slow; None at first
    slow         bytes a second of the ranks whose link, up or down, is much slower than the others'
    num_changes  how often the network has changed
    """

    def __init__(self) -> None:
        self.latency_s: Estimate | None = None
        self.bandwidth: Estimate | None = None
        self.slow: dict[int, float] = {}
        self.num_changes = 0
        self._window: deque[Seen] = deque()
        self._detectors = {
            # Its samples come a step late.
            "latency": ChangeDetector(better=-1, alarm=LATENCY_ALARM, relief_alarm=LATENCY_ALARM),
            "bursts": ChangeDetector(better=1),
            "slowest": ChangeDetector(better=1, alarm=SLOW_ALARM),
            "exchanges": ChangeDetector(better=1),
        }
        self._unwatched: list[Seen] = []
        self._sizes: tuple[float, ...] = ()
        self._last_latency_s = math.inf
        self._far: frozenset[tuple[int, int]] = frozenset()
        self._stale_s = 0.0

    def add(self, seen: Seen, probed_latency_s: float) -> None:
        """Take in a step. If the network has changed, what is older than the change is forgotten.

        probed_latency_s  one way, used where messages do not tell
        """
        self._window.append(seen)
        self._keep(WINDOW_S, MIN_STEPS)
        self._stale_s += seen.seconds
        latency_s = self.latency_s.value if self.latency_s is not None else probed_latency_s
        found = [self._detectors[name].add(value, seconds) for name, value, seconds in self._watched(seen, latency_s)]
        changed_s = [since_s for since_s in found if since_s is not None]
        if changed_s:
            self.num_changes += 1
            self._keep(min(changed_s), 1)
            self._stale_s = REFRESH_S
        if self._stale_s >= REFRESH_S or len(self._window) <= MIN_STEPS:
            self._stale_s = 0.0
            self._refresh(probed_latency_s)

    def _watched(self, seen: Seen, latency_s: float) -> list[tuple[str, float, float]]:
        """What must not change if the network does not, and for how many seconds it is known."""
        watched = []
        if seen.round_trip_s:
            trips = [trip for pair, trip in seen.round_trip_s.items() if pair in self._far]
            value = quantile(trips or list(seen.round_trip_s.values()), FAST_TIME) / 2 + LATENCY_FLOOR_S
            # Queues and busy processors rarely hold up two agreements on end.
            watched.append(("latency", min(value, self._last_latency_s), seen.seconds))
            self._last_latency_s = value
        # Steps with few bursts count together.
        self._unwatched.append(seen)
        bursts, pairs = _gathered(self._unwatched)
        if sum(map(len, bursts.values())) >= MIN_WATCHED_BURSTS:
            down, up = _rates(bursts, pairs)
            usual, seconds = median(down.values()), sum(one.seconds for one in self._unwatched)
            slowest = slowest_rate(down, {**slow_links(up), **slow_links(down)})
            watched += [("bursts", usual, seconds), ("slowest", slowest / usual, seconds)]
            self._unwatched.clear()
        if bursts or not seen.exchanges:
            return watched
        self._unwatched.clear()
        sizes = tuple(one.num_bytes for one in seen.exchanges)
        if sizes != self._sizes:
            # Another plan: what its exchanges take says nothing of a change.
            self._sizes, self._detectors["exchanges"] = sizes, ChangeDetector(better=1)
        # One at a time, and the fastest counts: processors are rarely busy during all of them.
        rate = _rate_at(latency_s, [[one] for one in seen.exchanges if 2 * one.num_bytes >= max(sizes)])
        return [*watched, ("exchanges", rate.value, seen.seconds)] if rate is not None else watched

    def _keep(self, seconds: float, num_steps: int) -> None:
        """Forget the oldest steps, so long as others cover `seconds` and are `num_steps`."""
        covered_s = sum(seen.seconds for seen in self._window)
        while len(self._window) > num_steps and covered_s - self._window[0].seconds >= seconds * (1 - 1e-9):
            covered_s -= self._window.popleft().seconds

    def _refresh(self, probed_latency_s: float) -> None:
        trips: dict[tuple[int, int], list[float]] = defaultdict(list)
        for seen in self._window:
            for pair, seconds in seen.round_trip_s.items():
                trips[pair].append(seconds)
        fast = {pair: quantile_interval(times, FAST_TIME) for pair, times in trips.items()}
        near = clusters({pair: trip[1] for pair, trip in fast.items()})
        group_of = {rank: index for index, group in enumerate(near) for rank in group}
        self._far = frozenset(pair for pair in fast if group_of[pair[0]] != group_of[pair[1]])
        self.latency_s = _latency([trip for pair, trip in fast.items() if pair in self._far] or list(fast.values()))
        bursts, pairs = _gathered(self._window)
        down, up = _rates(bursts, pairs)
        self.slow = {**slow_links(up), **slow_links(down)}
        latency_s = self.latency_s.value if self.latency_s is not None else probed_latency_s
        steps = [seen.exchanges for seen in self._window]
        self.bandwidth = (
            _burst_rate(bursts, down, self.slow)
            or fit_exchanges(list(itertools.chain(*steps)))
            or _rate_at(latency_s, steps)
        )


def _latency(trips: Sequence[tuple[float, float, float]]) -> Estimate | None:
    if not trips:
        return None
    low, value, high = (median(column) / 2 for column in zip(*trips, strict=True))
    return Estimate(value=value, low=low, high=high, source="agreement")


def _gathered(steps: Iterable[Seen]) -> tuple[dict[int, list[float]], dict[tuple[int, int], float]]:
    """Rates of bursts by rank, where there are any, and the usual rate of each pair."""
    bursts: dict[int, list[float]] = defaultdict(list)
    pairs: dict[tuple[int, int], list[float]] = defaultdict(list)
    for seen in steps:
        for rank, new in seen.bursts.items():
            if new:
                bursts[rank] += [burst.rate for burst in new]
        for pair, rate in seen.pair_rate.items():
            pairs[pair].append(rate)
    return bursts, {pair: median(rates) for pair, rates in pairs.items()}


def _rates(
    bursts: Mapping[int, Sequence[float]], pair_rate: Mapping[tuple[int, int], float]
) -> tuple[dict[int, float], dict[int, float]]:
    """Bytes a second that each rank's link brings, and takes: to all others at once, so what they see of it adds up."""
    down = {rank: quantile(rates, FAST_RATE) for rank, rates in bursts.items() if rates}
    sent: dict[int, list[float]] = defaultdict(list)
    for (sender, _), rate in pair_rate.items():
        sent[sender].append(rate)
    return down, {sender: sum(rates) / len(rates) * (len(sent) - 1) for sender, rates in sent.items()}


def _burst_rate(
    bursts: Mapping[int, Sequence[float]], down: Mapping[int, float], slow: Mapping[int, float]
) -> Estimate | None:
    rates = [rate for rates in bursts.values() for rate in rates]
    if len(rates) < MIN_BURSTS:
        return None
    # Where messages do not fill the link, most bursts are far slower than the fastest.
    _, fast, high = quantile_interval(rates, FAST_RATE)
    value = slowest_rate(down, slow)
    return Estimate(value=value, low=value * median(rates) / fast, high=value * high / fast, source="bursts")


def slowest_rate(rate: Mapping[K, float], slow: Mapping[K, float]) -> float:
    """What the planner counts with: the median of all links, or the least of those that are slow."""
    # Not the least of all: that would be the rank whose processor is busiest.
    return min([median(rate.values()), *slow.values()])


def fit_exchanges(exchanges: Sequence[Exchange]) -> Estimate | None:
    """Bytes a second by Theil and Sen from groups of different size; None if they differ too little, or are too few.

    seconds / hops = alpha + beta * bytes / hops: of each size the fastest few, then the median slope between those
    whose bytes differ by SIZE_FACTOR, so that no latency needs to be known. Its interval is Sen's (1968), and has the
    rate with BYTE_WORK_S less a byte: what comes as fast as processors code it is not sure.
    """
    by_size: dict[float, list[float]] = defaultdict(list)
    for one in exchanges:
        if one.hops > 0 and one.num_bytes > 0:
            by_size[one.num_bytes / one.hops].append(one.seconds / one.hops)
    points = [(x, t) for x, times in by_size.items() for t in sorted(times)[: -(-len(times) // 3)][:FITTED_PER_SIZE]]
    slopes = sorted(
        (tb - ta) / (xb - xa)
        for (xa, ta), (xb, tb) in itertools.combinations(sorted(points), 2)
        if xb >= SIZE_FACTOR * xa
    )
    if not slopes:
        return None
    n = len(points)
    # Half of the interval's width as a share of all slopes.
    reach = _Z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18) / (n * (n - 1))
    slow, beta, fast = (quantile(slopes, share) for share in (0.5 + reach, 0.5, 0.5 - reach))
    if fast <= 0 or slow > SURE_FACTOR * fast:
        return None
    return Estimate(value=1 / beta, low=1 / slow, high=1 / max(fast - BYTE_WORK_S, 0.1 * fast), source="fit")


def _rate_at(latency_s: float, steps: Iterable[Sequence[Exchange]]) -> Estimate | None:
    """Bytes a second if messages have this latency. A step's exchanges count together: small ones tell little.

    Its interval has the rate without any latency, and that with HOP_WORK_S more a hop: short exchanges are not sure.
    """
    rates = []
    for exchanges in steps:
        hops, num_bytes, seconds = (
            sum(getattr(one, name) for one in exchanges) for name in ("hops", "num_bytes", "seconds")
        )
        # Never less than a tenth of what was measured: ranks that wait for a processor make latency a guess.
        if num_bytes > 0 and seconds > 0:
            left_s = (seconds, seconds - hops * latency_s, seconds - hops * (latency_s + HOP_WORK_S))
            rates.append([num_bytes / max(left, 0.1 * seconds) for left in left_s])
    if not rates:
        return None
    slow, usual, fast = (quantile_interval(column, FAST_RATE) for column in zip(*rates, strict=True))
    return Estimate(value=usual[1], low=slow[0], high=fast[2], source="exchanges")


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of `values` lie below, one of them; `share` outside of [0, 1] gives the outermost."""
    ordered = sorted(values)
    return ordered[min(max(round(share * (len(ordered) - 1)), 0), len(ordered) - 1)]


def quantile_interval(values: Sequence[float], share: float) -> tuple[float, float, float]:
    """A quantile between the ends of its 95 % interval: order statistics, whatever the distribution."""
    reach = _Z * math.sqrt(share * (1 - share) / len(values))
    return quantile(values, share - reach), quantile(values, share), quantile(values, share + reach)
