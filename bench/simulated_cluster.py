"""A simulated cluster whose truth is known: the samples that its ranks make of a step.

A step takes as long as the planner predicts from the true link, compute, gains and codec times, times the stated errors
(`ClusterErrors`). Samples are as the engine makes them, with bursts, exchanges and round trips of the true link.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from cgx_ray.control.known_losses import lost_share
from cgx_ray.engine.gain_schedule import is_measured
from cgx_ray.monitors.sample import CURVE_DENSITIES, Burst, LayerError, StepSample, Transfer
from cgx_ray.plan import CodecSpec, Option, Plan
from cgx_ray.planner.bits import WIDTHS
from cgx_ray.planner.cost import Link, Network, exchange_s
from cgx_ray.planner.models import ModelDescription
from cgx_ray.planner.options import CodecCost
from cgx_ray.planner.papers.flexible import interpolate_gain
from cgx_ray.planner.prediction import Measured, PlannedGroup, groups_of, predict

# Workers, each on a node of its own.
WORLD = 4
# A burst ends after 50 ms or 2 MiB; groups whose messages are shorter than 64 KiB make none.
_BURST_S, _BURST_BYTES, _LONG_MESSAGE = 0.05, 2 << 20, 1 << 16
# Standard deviation of what each rank measures by itself: rates, latencies, compute.
_RANK_NOISE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterState:
    """The truth at one moment.

    slow_link  rate of the last node's link, as a share of `gbps`
    gain       by codec; replaces those of the cluster
    is_silent  the agent of the last node does not answer; its samples are kept until it does
    """

    gbps: float
    latency_ms: float = 0.5
    compute_s: float = 0.2
    slow_link: float = 1.0
    gain: tuple[tuple[str, float], ...] = ()
    is_silent: bool = False

    @property
    def link(self) -> Link:
        return Link.from_rates(bandwidth_gbps=self.gbps * self.slow_link, latency_ms=self.latency_ms)

    def rate(self, rank: int) -> float:
        """Return bytes per second of the link of `rank`."""
        return self.gbps * 1e9 / 8 * (self.slow_link if rank == WORLD - 1 else 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterErrors:
    """Departures of the cluster from the planner's model.

    step_noise   standard deviation of the logarithm of compute and, by itself, of what exchanges add to it
    bias         by option, a factor on the whole step of plans with nothing else; by dense bytes in mixtures
    cold_steps   steps over which compute falls from 3 times to its usual time
    switch_s     seconds that the first step under a new plan takes longer
    """

    step_noise: float = 0.03
    bias: Mapping[Option, float] = field(default_factory=dict)
    cold_steps: float = 0.0
    switch_s: float = 0.2


class SimulatedCluster:
    """Workers that train `model`. `costs` and `gain` are the true ones, by codec.

    layer_errors  energy of each layer, and its lost share with 4 bits; empty: layers lose alike, and ranks measure no
                  errors by layer
    """

    def __init__(
        self,
        model: ModelDescription,
        costs: Mapping[str, CodecCost],
        gain: Mapping[str, float],
        errors: ClusterErrors,
        seed: int,
        layer_errors: Mapping[str, LayerError] | None = None,
    ) -> None:
        self._layer_errors, self._num_measured = layer_errors or {}, 0
        self.model, self.errors = model, errors
        self._costs, self._gain = costs, gain
        self._random = random.Random(seed)
        self.truth = cache(self._truth)
        self.score = cache(self._score)

    def _truth(self, state: ClusterState) -> Measured:
        return Measured(
            layers=self.model.layers,
            backward_s=self.model.step_s(state.compute_s),
            network=Network.flat(WORLD, state.link),
            codec_costs=self._costs,
            gain={**self._gain, **dict(state.gain)},
            squared_errors={
                bits: {name: one.energy * lost_share({4: one.lost}, bits) for name, one in self._layer_errors.items()}
                for bits in WIDTHS
            },
        )

    def bias(self, groups: tuple[PlannedGroup, ...]) -> float:
        whole = sum(group.dense_bytes for group in groups)
        shares = ((group.dense_bytes / whole, self.errors.bias.get(group.option, 1.0)) for group in groups)
        return math.exp(math.fsum(share * math.log(factor) for share, factor in shares))

    def _score(self, groups: tuple[PlannedGroup, ...], state: ClusterState) -> float:
        """Return the true seconds for the progress of one dense step."""
        return predict(self.truth(state), groups).score * self.bias(groups)

    def step(self, number: int, plan: Plan, state: ClusterState, *, is_new: bool) -> tuple[list[StepSample], float]:
        """Return the samples of all ranks of a step, and its seconds."""
        truth, groups = self.truth(state), groups_of(plan, self.model.layers)
        cold = 1 + 2 * math.exp(-number / self.errors.cold_steps) if self.errors.cold_steps else 1.0
        factor = cold * self._noise()
        own = replace(truth, backward_s=tuple(factor * seconds for seconds in truth.backward_s))
        predicted = predict(own, groups)
        step_s = own.compute_s + (predicted.step_s - own.compute_s) * self._noise()
        step_s = step_s * self.bias(groups) + (self.errors.switch_s if is_new else 0.0)
        ready_s = _ready_s(own, groups)
        transfers = self._transfers(groups, truth.network.between)
        gain = {codec: self._measured_gain(gain) for codec, gain in truth.gain.items()}
        losses = self._losses(truth.gain) if is_measured(number, affordable_from=0) else {}
        rates = [state.rate(rank) for rank in range(WORLD)]
        samples = []
        for rank in range(WORLD):
            share = self._random.gauss(1, _RANK_NOISE / 3)
            samples.append(
                StepSample(
                    rank=rank,
                    step=number,
                    plan_version=plan.version,
                    step_s=step_s,
                    compute_s=min(own.compute_s * share, step_s),
                    encode_s=predicted.codec_s / 2,
                    exchange_s=sum(transfer.seconds for transfer in transfers),
                    decode_s=predicted.codec_s / 2,
                    wire_bytes=sum(group.wire_bytes for group in groups),
                    dense_bytes=sum(group.dense_bytes for group in groups),
                    ready_s=tuple(share * ready for ready in ready_s),
                    transfers=transfers,
                    gain=gain if is_measured(number, affordable_from=0) else {},
                    **losses,
                    bursts=(bursts := self._bursts(groups, rates[rank])),
                    rate_from={
                        peer: min(rates[rank], rate) / (WORLD - 1) / self._delay()
                        for peer, rate in enumerate(rates)
                        if bursts and peer != rank
                    },
                    lag_s={peer: state.latency_ms / 1e3 * self._delay() for peer in range(WORLD) if peer != rank},
                )
            )
        return samples, step_s

    def _noise(self) -> float:
        return math.exp(self._random.gauss(0, self.errors.step_noise))

    def _delay(self) -> float:
        """Return the factor by which a busy processor makes one message slower."""
        return 1 + abs(self._random.gauss(0, _RANK_NOISE))

    def _measured_gain(self, gain: float) -> float:
        """Return `gain` with the usual noise of its error, a tenth."""
        return min(1.0, 1 - (1 - gain) * math.exp(self._random.gauss(0, 0.1)))

    def _losses(self, gain: Mapping[str, float]) -> dict[str, Any]:
        """Return the fields of a sample with errors by layer, for the next number of bits, and the gain curve."""
        bits = WIDTHS[self._num_measured % len(WIDTHS)]
        self._num_measured += 1
        density = {CodecSpec.parse(name).density: share for name, share in gain.items() if name.startswith("topk")}
        known = {one: density[one] for one in sorted(filter(None, density))}
        curve = interpolate_gain(tuple(known), tuple(known.values())) if known else None
        errors = {
            name: LayerError(one.energy, lost_share({4: one.lost}, bits)) for name, one in self._layer_errors.items()
        }
        return {
            "gain_curve": tuple(map(curve, CURVE_DENSITIES)) if curve is not None else (),
            "layer_errors": errors,
            "error_bits": bits if errors else None,
        }

    def _transfers(self, groups: tuple[PlannedGroup, ...], link: Link) -> tuple[Transfer, ...]:
        transfers = []
        for index, group in enumerate(groups):
            codec = group.option.codec
            seconds = self._delay() * exchange_s(
                group.option.scheme,
                num_workers=WORLD,
                dense_bytes=group.dense_bytes,
                wire_bytes=group.wire_bytes,
                index_bytes=codec.index_bytes(group.numel),
                link=link,
            )
            transfers.append(
                Transfer(
                    group=index,
                    scheme=str(group.option.scheme),
                    numel=group.numel,
                    wire_bytes=group.wire_bytes,
                    seconds=seconds,
                    index_bytes=codec.index_bytes(group.numel),
                )
            )
        return tuple(transfers)

    def _bursts(self, groups: tuple[PlannedGroup, ...], rate: float) -> tuple[Burst, ...]:
        """Return the bursts at a link of `rate` bytes per second, at most 64."""
        long = [group.wire_bytes for group in groups if group.wire_bytes >= WORLD * _LONG_MESSAGE]
        num_bytes = math.fsum(2 * (WORLD - 1) / WORLD * wire_bytes for wire_bytes in long)
        each = min(_BURST_BYTES, rate * _BURST_S)
        return tuple(Burst(int(each), each / rate * self._delay()) for _ in range(min(int(num_bytes / each), 64)))


def _ready_s(measured: Measured, groups: tuple[PlannedGroup, ...]) -> tuple[float, ...]:
    names = [layer.name for layer in reversed(measured.layers)]
    ready_s = dict(zip(names, itertools.accumulate(measured.backward_s), strict=True))
    return tuple(max(ready_s[name] for name in group.layers) for group in groups)
