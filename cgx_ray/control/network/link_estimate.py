"""Latency and bandwidth of the network, estimated from the training's own messages. No probes, clock or sockets.

Busy processors, late ranks and full queues can only make a message slower. So all estimates use the fast side of the
observations: high quantiles of rates, low quantiles of times. The observations come from the engine's TCP mesh:

- A burst (`Burst`) is some 20 to 50 ms of long messages at one receiver, or 2 MiB of them, by the kernel's time stamps.
  Bursts are added up over trains of packets. A pause ends a train, because then the sender was encoding or TCP's window
  was full. The first bytes of each train are left out, as they come from queues in front of the link.
- Some milliseconds after a step, when nothing else is under way, ranks greet each other. Each notes when the others'
  greetings arrived. The delays that two ranks note add up to one round trip, whichever rank was late and whatever their
  clocks say.
- An exchange is the wall time of one group, on any transport.

The estimates over a window of ten seconds:

1. Latency is half of the 0.15 quantile of a pair's round trips, and then the median over the pairs whose ranks are not
   near each other (`topology.clusters`).
2. Bandwidth is the 0.85 quantile of each rank's burst rates, by time. It is sure if that is within NOISE of the median
   burst. Without bursts it is the rate of the exchanges after the latency is subtracted. `rate_estimates` has both
   estimators. If neither is sure, the last bandwidth that bursts were sure of since the last change stands: short
   messages do not fill the link, and what they seem to show is up to 10x too slow or too fast.
3. A rank whose link has less than two thirds of the median rate, sending or receiving, is slow. Then the bandwidth is
   the slowest of these ranks', since the others wait for it. Ranks without bursts keep their last rate (`link_rates`).

One step is enough if it took several times as long as those before and its messages show why (`restart_if_slower`).
Otherwise a CUSUM test (`changes.ChangeDetector`) watches these quantities, and needs two steps. After a change all
observations older than the change are dropped. A change by 2x is noticed after 2.1 s, so a neighbour's burst of 2 s
that fills the link is none. Exchanges show a change only while there are no bursts, or too few so far to know their
level. On the mesh only what TURN_S per hop does not explain counts.

Bandwidth counts payload, which is 95.6 % of the rate of 1500-byte frames. Where all uplinks are slower than all
downlinks, a receiver observes more than the senders can sustain (`KnownNetwork`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from cgx_ray.control.network.changes import LINK_CHANGE, WINDOW_S, ChangeDetector
from cgx_ray.control.network.estimate import FEW, NOISE, WORK_S, Estimate, quantile, quantile_interval
from cgx_ray.control.network.rate_estimates import (
    FAST_RATE,
    estimate_at_latency,
    estimate_from_bursts,
    link_rates,
    slowest_rate,
)
from cgx_ray.control.network.topology import clusters, slow_links
from cgx_ray.control.network.traffic import StepTraffic, gather_rates

# Seconds between two estimates: with many ranks an estimate takes milliseconds.
REFRESH_S = 0.5
# Seconds without any burst after which a change of the exchanges counts: shorter ones lie between two bursts.
QUIET_S = 0.5
# Seconds per hop that a rank may wait for a processor, where ranks share them: a turn or two of the scheduler.
TURN_S = 5e-3


class LinkRates:
    """The newest rate of each rank.

    After a change of the network a rate from before it is compared with the new ones, but makes no rank slow that was
    not slow already: where one link has become slow, the plan for it sends so little that only that link is filled.

    all   bytes per second by rank, from before the last change if there is none since
    slow  those that are much slower than the others
    """

    def __init__(self) -> None:
        self.all: dict[int, float] = {}
        self.slow: dict[int, float] = {}
        self._new: set[int] = set()

    def update(self, rates: Mapping[int, float]) -> None:
        """Add rates that were measured since the last change."""
        self.all.update(rates)
        self._new |= rates.keys()
        known = self._new | self.slow.keys()
        self.slow = {rank: rate for rank, rate in slow_links(self.all).items() if rank in known}

    def forget(self) -> None:
        """Take all rates for those from before a change."""
        self._new = set()

    @property
    def usual(self) -> float | None:
        """Median rate; None unless the rates of all ranks are from after the last change."""
        return median(self.all.values()) if self.all and self._new >= self.all.keys() else None

    @property
    def is_outdated(self) -> bool:
        """True if a rank counts as slow by its rate from before the last change."""
        return not self.slow.keys() <= self._new


class _Watched(NamedTuple):
    """A value for a detector, see `ChangeDetector.add_sample`."""

    detector: ChangeDetector
    value: float
    seconds: float


class PassiveLink:
    """The link between two workers, by the last ten seconds of training. Call `add_traffic` once per step.

    latency_s       one way, between ranks that are not near each other; None without round trips
    bandwidth       of a worker's link, the slowest one's where some are slow; None at first
    slow            rates by rank, for ranks whose link, up or down, is much slower than the others'
    sent, received  rates by rank, for ranks whose messages show that of their link up or down
    num_changes     number of times that the network has changed
    """

    def __init__(self) -> None:
        self.latency_s: Estimate | None = None
        self.bandwidth: Estimate | None = None
        self.slow: dict[int, float] = {}
        self.sent: dict[int, float] = {}
        self.received: dict[int, float] = {}
        self.num_changes = 0
        self._window: deque[StepTraffic] = deque()
        self._detectors = _new_detectors()
        # By whether ranks greeted each other, as they do on the mesh, and bytes and hops of a step's largest exchange:
        # only rates of exchanges that are alike are compared.
        self._exchange_detectors: dict[tuple[bool, float, float], ChangeDetector] = {}
        self._unwatched: list[StepTraffic] = []
        self._quiet_s = QUIET_S
        self._down, self._up = LinkRates(), LinkRates()
        # Newest bandwidth since the last change that bursts were sure of.
        self._known: Estimate | None = None
        self._last_latency_s: float | None = None
        self._far: frozenset[tuple[int, int]] = frozenset()
        self._estimate_age_s = 0.0

    def add_traffic(self, traffic: StepTraffic, probed_latency_s: float) -> None:
        """Add a step. If the network has changed, forget the steps before the change.

        probed_latency_s  one way, used if there are no round trips
        """
        self._window.append(traffic)
        self._trim(WINDOW_S, FEW)
        self._estimate_age_s += traffic.seconds
        latency_s = self._latency_or(probed_latency_s)
        watched = self._watched_latency(traffic) + self._watched_bursts(traffic)
        exchanges = self._watched_exchanges(traffic, latency_s)
        counts_exchanges = self._is_quiet or not self._detectors["bursts"].had_level
        found = [one.detector.add_sample(one.value, one.seconds) for one in watched + exchanges]
        # The exchanges' level is learned all the time, so that a change is known when bursts end.
        changed_s = [since for since in found[: None if counts_exchanges else len(watched)] if since is not None]
        if changed_s:
            self._forget_before(min(changed_s), {one.detector for one in exchanges})
            if all(since is None for since in found[: len(watched)]):
                # Bursts of before have the level of another link.
                self._detectors |= {name: ChangeDetector() for name in ("bursts", "slowest")}
        if self._estimate_age_s >= REFRESH_S or len(self._window) <= FEW:
            self._estimate_age_s = 0.0
            self._refresh(probed_latency_s)

    def restart_if_slower(self, traffic: StepTraffic, probed_latency_s: float) -> bool:
        """Estimate again from a step that took far longer than usual, if its messages show why; else return False.

        The network may have changed within the step, so only the later half of each rank's bursts counts. Of exchanges
        on the mesh, where short messages look far slower than the link, only those count that are far slower than the
        same ones before, in a step without bursts: a mixture may send so little on the mesh, beside the vendor's sums.
        A latency counts if this greeting and the one before say it: one alone may have waited for a processor.
        """
        later = {rank: found[len(found) // 2 :] for rank, found in traffic.bursts.items()}
        latency_s = self._latency_or(probed_latency_s)
        exchanges = estimate_at_latency(latency_s, [traffic.exchanges]) if not traffic.round_trip_s else None
        rates = link_rates(later, {})[0].values() or ([exchanges.value] if exchanges is not None else [])
        is_slower = self.bandwidth is not None and bool(rates) and median(rates) * LINK_CHANGE <= self.bandwidth.value
        late_s = min(self._floored_latency(traffic) or 0.0, self._last_latency_s or 0.0)
        is_later = late_s >= LINK_CHANGE * (latency_s + WORK_S)
        if not rates:
            watched = self._watched_exchanges(traffic, latency_s)
            is_slower = any(one.detector.is_far_below(one.value) for one in watched)
        if not (is_slower or is_later):
            return False
        self._detectors = _new_detectors()
        self._unwatched.clear()
        self._window.append(replace(traffic, bursts=later, pair_rate={}))
        self._forget_before(0.0, set())
        self._refresh(probed_latency_s)
        return True

    def _latency_or(self, probed_latency_s: float) -> float:
        return self.latency_s.value if self.latency_s is not None else probed_latency_s

    @property
    def usual_sent(self) -> float | None:
        """Median rate at which ranks send; None until all that receive have shown theirs since the last change."""
        return self._up.usual if self._up.all.keys() >= self._down.all.keys() else None

    @property
    def _is_quiet(self) -> bool:
        return self._quiet_s >= QUIET_S

    def _forget_before(self, since_s: float, current: set[ChangeDetector]) -> None:
        """The network changed `since_s` ago. `current`: detectors of the exchanges of this step."""
        self.num_changes += 1
        self._exchange_detectors = {
            size: detector for size, detector in self._exchange_detectors.items() if detector in current
        }
        self._down.forget()
        self._up.forget()
        self._known = None
        self._trim(since_s, 1)
        self._estimate_age_s = REFRESH_S

    def _floored_latency(self, traffic: StepTraffic) -> float | None:
        """Return the latency that the round trips of far ranks show, plus WORK_S; None without round trips.

        Changes below it come from processors, not from the network.
        """
        if not traffic.round_trip_s:
            return None
        trips = [trip for pair, trip in traffic.round_trip_s.items() if pair in self._far]
        return quantile(trips or list(traffic.round_trip_s.values()), 1 - FAST_RATE) / 2 + WORK_S

    def _watched_latency(self, traffic: StepTraffic) -> list[_Watched]:
        """Return what the round trips show, if there are any."""
        value = self._floored_latency(traffic)
        if value is None:
            return []
        # Queues and busy processors rarely delay two greetings in a row. One alone could set a level that is too high.
        watched = min(value, self._last_latency_s) if self._last_latency_s is not None else None
        self._last_latency_s = value
        return [_Watched(self._detectors["latency"], watched, traffic.seconds)] if watched is not None else []

    def _watched_bursts(self, traffic: StepTraffic) -> list[_Watched]:
        """Return the usual rate and the slowest link's share of it."""
        self._quiet_s = 0.0 if any(traffic.bursts.values()) else self._quiet_s + traffic.seconds
        # Steps with few bursts are collected until there are enough.
        self._unwatched.append(traffic)
        bursts, pairs = gather_rates(self._unwatched)
        new_down, new_up = link_rates(bursts, pairs)
        is_faster = self._are_faster(new_down)
        if sum(map(len, bursts.values())) < FEW and not is_faster:
            if self._is_quiet:
                self._unwatched.clear()
            return []
        # A slow link stays slow until its own bursts show otherwise: those of the others do not show it.
        down = {**self._down.all, **new_down}
        # Sending rates of some ranks compare only with each other.
        up = new_up if new_up.keys() >= self._up.all.keys() else self._up.all
        middle = median(down.values())
        slowest = slowest_rate(middle, {**slow_links(up), **slow_links(down)})
        seconds = _seconds(self._unwatched)
        self._unwatched.clear()
        return [
            _Watched(self._detectors["bursts"], median(new_down.values()), seconds),
            _Watched(self._detectors["slowest"], slowest / middle, seconds),
        ]

    def _are_faster(self, down: Mapping[int, float]) -> bool:
        """Return whether ranks receive faster than before, by these rates of some of them."""
        known = self._down.all
        ratios = [rate / known[rank] for rank, rate in down.items() if rank in known]
        return bool(ratios) and median(ratios) > 1

    def _watched_exchanges(self, traffic: StepTraffic, latency_s: float) -> list[_Watched]:
        """Return the rate of the step's largest exchanges, if it had any."""
        if not traffic.exchanges:
            return []
        largest, hops = max((one.num_bytes, one.hops) for one in traffic.exchanges)
        # Each hop may wait for a processor, on the mesh for a turn, which is no change of the network. With that, rates
        # depend on the size.
        has_mesh = bool(traffic.round_trip_s)
        turn_s = TURN_S if has_mesh else WORK_S
        # The fastest single exchange counts: processors are rarely busy during all of them.
        counted = [
            [replace(one, seconds=one.seconds + turn_s * one.hops)]
            for one in traffic.exchanges
            if 2 * one.num_bytes >= largest
        ]
        rate = estimate_at_latency(latency_s, counted)
        if rate is None:
            return []
        # A plan may change while evidence gathers, so the detectors of plans that are not in force are kept.
        key = has_mesh, largest, hops
        alike = (
            other
            for other in self._exchange_detectors
            if other[0] == has_mesh
            and all(a < NOISE * b and b < NOISE * a for a, b in zip(other[1:], key[1:], strict=True))
        )
        detector = self._exchange_detectors.setdefault(next(alike, key), ChangeDetector())
        return [_Watched(detector, rate.value, traffic.seconds)]

    def _trim(self, seconds: float, num_steps: int) -> None:
        """Forget the oldest steps, as long as at least `num_steps` are left and cover `seconds`."""
        covered_s = _seconds(self._window)
        while len(self._window) > num_steps and covered_s - self._window[0].seconds >= seconds * (1 - 1e-9):
            covered_s -= self._window.popleft().seconds

    def _refresh(self, probed_latency_s: float) -> None:
        """Make all estimates again from the window."""
        trips: dict[tuple[int, int], list[float]] = defaultdict(list)
        for step in self._window:
            for pair, seconds in step.round_trip_s.items():
                trips[pair].append(seconds)
        fast = {pair: quantile_interval(times, 1 - FAST_RATE) for pair, times in trips.items()}
        near = clusters({pair: trip[1] for pair, trip in fast.items()})
        cluster_of = {rank: index for index, cluster in enumerate(near) for rank in cluster}
        self._far = frozenset(pair for pair in fast if cluster_of[pair[0]] != cluster_of[pair[1]])
        self.latency_s = _latency([trip for pair, trip in fast.items() if pair in self._far] or list(fast.values()))
        bursts, pairs = gather_rates(self._window)
        self.received, self.sent = link_rates(bursts, pairs)
        self._down.update(self.received)
        if self.sent.keys() >= self._up.all.keys():
            self._up.update(self.sent)
        self.slow = {**self._up.slow, **self._down.slow}
        latency_s = self._latency_or(probed_latency_s)
        steps = [step.exchanges for step in self._window]
        found = estimate_from_bursts(bursts, pairs, self._down.all, self.slow)
        found = found or estimate_at_latency(latency_s, steps, is_pushed=bool(trips))
        if found is not None and found.is_sure and found.source == "bursts":
            self._known = found
        elif found is not None and self._known is not None:
            found = _not_sure(self._known, found)
        if found is not None and (self._down.is_outdated or self._up.is_outdated):
            found = _not_sure(found, found)
        self.bandwidth = found


def _new_detectors() -> dict[str, ChangeDetector]:
    return {name: ChangeDetector() for name in ("latency", "bursts", "slowest")}


def _seconds(steps: Iterable[StepTraffic]) -> float:
    return sum(step.seconds for step in steps)


def _not_sure(known: Estimate, found: Estimate) -> Estimate:
    """Return what was known, with a spread that also holds what was `found`, and that is too wide to be sure."""
    high = max(known.high, found.high, LINK_CHANGE * known.low)
    return replace(known, low=min(known.low, found.low), high=high)


def _latency(trips: Sequence[tuple[float, float, float]]) -> Estimate | None:
    if not trips:
        return None
    low, value, high = (median(column) / 2 for column in zip(*trips, strict=True))
    return Estimate(value=value, low=low, high=high, source="greetings")
