"""Samples of all ranks, joined by step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from cgx_ray.control.traffic import ObservedExchange, StepTraffic
from cgx_ray.monitors.sample import Burst, LayerError, StepSample, Transfer
from cgx_ray.plan import Scheme
from cgx_ray.planner.cost import terms

# Seconds after its first report in which all ranks report a step. On a quiet machine they take up to 2 s: a rank tells
# its agent every 0.5 s, and the agent tells the controller every second.
SILENT_S = 3.0
# Distances between ranks whose pairs count in a step, so that a rank is in 16 pairs: the work of a step must not grow
# with the square of the ranks. Other distances count after ROTATION_STEPS, as estimates need several steps of a pair.
COUNTED_OFFSETS = 8
ROTATION_STEPS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedStep:
    """One step of all ranks, or of those that are not silent. Times in seconds.

    compute_s  of the slowest rank, which the others wait for
    ready_s    for each group, the time at which the last rank had it
    slowness   by rank that reported, its compute time over the median of these ranks
    traffic    network observations; with many ranks, of the pairs of `counted_offsets`. The shortest exchange of each
               group counts: longer ones contain the wait for late ranks
    gain       predicted gain by codec or option, mean over ranks, on steps that measured it
    kept       measured gain by option in use, mean over ranks, on the same steps
    gain_curve gain of top-k at CURVE_DENSITIES, mean over ranks, on the same steps
    layer_errors, error_bits
               energy and lost share by layer with so many bits, means over ranks, on the same steps
    norm       of the fresh gradients, root mean square over ranks, on the same steps
    loss       mean over the ranks that reported a finite one
    lr         learning rate, median over the ranks that reported one
    num_local  number of ranks that share memory if it is the same on all nodes, else 1
    """

    step: int
    plan_version: int
    step_s: float
    compute_s: float
    codec_s: float
    ready_s: tuple[float, ...]
    slowness: Mapping[int, float]
    traffic: StepTraffic
    gain: Mapping[str, float]
    num_local: int
    kept: Mapping[str, float] = field(default_factory=dict)
    gain_curve: tuple[float, ...] = ()
    layer_errors: Mapping[str, LayerError] = field(default_factory=dict)
    error_bits: int | None = None
    norm: float | None = None
    loss: float | None = None
    lr: float | None = None


@dataclass(slots=True)
class _OpenStep:
    """Samples of a step by rank; `first_s`: when the first one came."""

    plan_version: int
    first_s: float
    samples: dict[int, StepSample] = field(default_factory=dict)


class StepJoiner:
    """Collects samples and returns each step when all ranks have reported it.

    Steps do not wait for a rank that has not reported one within SILENT_S. The rank counts again from the next step
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
        self._heard_s: dict[int, float] = {}
        # When the first sample came, of steps that were joined less than SILENT_S after it.
        self._joined_s: dict[int, float] = {}

    def add(self, samples: Iterable[StepSample], now_s: float) -> list[JoinedStep]:
        """Add samples, those of a rank in order; return the steps that they or the time complete, oldest first."""
        for sample in samples:
            self._take(sample, now_s)
        joined = []
        for step, one in sorted(self._open.items()):
            if self._is_ready(step, one, now_s):
                del self._open[step]
                self._joined_s[step], self.last_step = one.first_s, step
                self.num_incomplete += len(one.samples) < self._world_size
                joined.append(join(list(one.samples.values()), self._world_size))
        self._joined_s = {step: first_s for step, first_s in self._joined_s.items() if now_s < first_s + SILENT_S}
        return joined

    def _take(self, sample: StepSample, now_s: float) -> None:
        rank, step, version = sample.rank, sample.step, sample.plan_version
        is_other_pass = step in self._open and self._open[step].plan_version != version
        if is_other_pass or step <= self._newest.get(rank, -1):
            # Training goes on from an earlier step, on all ranks. Samples of both passes must not be joined.
            self._open, self._newest, self._joined_s, self.last_step = {}, {}, {}, -1
        self._newest[rank] = step
        if step > self.last_step:
            one = self._open.setdefault(step, _OpenStep(version, now_s))
            one.samples[rank] = sample
            first_s = one.first_s
        else:
            first_s = self._joined_s.get(step, -math.inf)
        if now_s < first_s + SILENT_S:
            self._heard_s[rank] = now_s
            self.silent -= {rank}

    def _is_ready(self, step: int, one: _OpenStep, now_s: float) -> bool:
        """Return whether no other sample of `step` is waited for; note the ranks that have become silent."""
        missing = set(range(self._world_size)) - self.silent - one.samples.keys()
        # The sample of a rank that has reported a later step is lost.
        if all(self._newest.get(rank, -1) > step for rank in missing):
            return True
        if now_s < one.first_s + SILENT_S:
            return False
        self.silent |= {rank for rank in missing if now_s >= self._heard_s.get(rank, -math.inf) + SILENT_S}
        return True


def join(samples: list[StepSample], world_size: int) -> JoinedStep:
    """Return one step from the samples of the ranks that have reported it."""
    samples = sorted(samples, key=lambda sample: sample.rank)
    norms = [sample.norm for sample in samples if sample.norm is not None]
    losses = [sample.loss for sample in samples if sample.loss is not None and math.isfinite(sample.loss)]
    rates = [sample.lr for sample in samples if sample.lr is not None]
    step_s = median(sample.step_s for sample in samples)
    usual_s = median(sample.compute_s for sample in samples)
    num_local = samples[0].num_local if len({sample.num_local for sample in samples}) == 1 else 1
    return JoinedStep(
        step=samples[0].step,
        plan_version=samples[0].plan_version,
        step_s=step_s,
        compute_s=max(sample.compute_s for sample in samples),
        codec_s=median(sample.encode_s + sample.decode_s for sample in samples),
        ready_s=tuple(max(times) for times in zip(*(sample.ready_s for sample in samples), strict=True)),
        slowness={sample.rank: sample.compute_s / usual_s if usual_s > 0 else 1.0 for sample in samples},
        traffic=_traffic(samples, step_s, world_size, num_local if num_local < world_size else 1),
        gain=_means([sample.gain for sample in samples]),
        num_local=num_local,
        kept=_means([sample.kept for sample in samples]),
        gain_curve=tuple(
            fmean(gains) for gains in zip(*filter(None, (one.gain_curve for one in samples)), strict=True)
        ),
        layer_errors=_mean_errors([sample.layer_errors for sample in samples]),
        error_bits=next((sample.error_bits for sample in samples if sample.layer_errors), None),
        norm=math.hypot(*norms) / math.sqrt(len(norms)) if norms else None,
        loss=fmean(losses) if losses else None,
        lr=median(rates) if rates else None,
    )


def _means(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the ranks that measured it."""
    names = {name for gain in measured for name in gain}
    return {name: fmean(gain[name] for gain in measured if name in gain) for name in names}


def _mean_errors(measured: Sequence[Mapping[str, LayerError]]) -> dict[str, LayerError]:
    """Return the mean of each layer over the ranks that measured it; lost shares are weighted by energy."""
    found = {}
    for name in dict.fromkeys(name for errors in measured for name in errors):
        own = [errors[name] for errors in measured if name in errors]
        energy = math.fsum(one.energy for one in own)
        found[name] = LayerError(energy / len(own), math.fsum(one.energy * one.lost for one in own) / energy)
    return found


def _traffic(samples: list[StepSample], step_s: float, world_size: int, num_sharing: int) -> StepTraffic:
    """`num_sharing`: ranks that share a node's link. They send at the same time, so each sees a part of its rate."""
    offsets = counted_offsets(samples[0].step, world_size)
    return StepTraffic(
        seconds=step_s,
        exchanges=tuple(
            _exchange(min(transfers, key=lambda transfer: transfer.seconds), world_size)
            for transfers in zip(*(sample.transfers for sample in samples), strict=True)
            # A hierarchical exchange uses two kinds of links, so its time tells neither.
            if transfers[0].intra == "flat"
        ),
        bursts={
            sample.rank: tuple(Burst(num_sharing * burst.num_bytes, burst.seconds) for burst in sample.bursts)
            for sample in samples
        },
        pair_rate={
            (peer, one.rank): rate
            for one in samples
            for peer in _peers(one.rank, offsets, world_size)
            if one.rate_from and (rate := one.rate_from[peer]) > 0
        },
        round_trip_s=_round_trips({sample.rank: sample.lag_s for sample in samples}, offsets, world_size),
    )


def counted_offsets(step: int, world_size: int) -> Sequence[int]:
    """Return the distances between the ranks whose pairs count in `step`: all in small groups, else a few far apart."""
    farthest = world_size // 2
    if farthest <= COUNTED_OFFSETS:
        return range(1, farthest + 1)
    turn = step // ROTATION_STEPS
    return [1 + (turn + index * farthest // COUNTED_OFFSETS) % farthest for index in range(COUNTED_OFFSETS)]


def _peers(rank: int, offsets: Sequence[int], world_size: int) -> set[int]:
    return {(rank + distance) % world_size for offset in offsets for distance in (offset, -offset)}


def _round_trips(
    lag_s: Mapping[int, Sequence[float]], offsets: Sequence[int], world_size: int
) -> dict[tuple[int, int], float]:
    """Return round trips by pair of ranks. `lag_s`: by rank, as in `StepSample`; empty without a mesh."""
    trips = {
        (min(rank, peer), max(rank, peer)): lags[peer] + lag_s[peer][rank]
        for offset in offsets
        for rank, lags in lag_s.items()
        if lags and lag_s.get(peer := (rank + offset) % world_size)
    }
    # A clock that was set between the two messages can make a round trip negative.
    return {pair: seconds for pair, seconds in trips.items() if seconds > 0}


def _exchange(transfer: Transfer, world_size: int) -> ObservedExchange:
    hops, num_bytes = terms(
        Scheme(transfer.scheme), world_size, transfer.wire_bytes, transfer.wire_bytes, transfer.index_bytes
    )
    return ObservedExchange(hops=hops, num_bytes=num_bytes, seconds=transfer.seconds)
