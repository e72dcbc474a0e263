"""A simulated cluster that drives the real control loop: no Ray, no clock, no network, and the truth is known.

A step takes as long as the planner predicts from the true link, compute, gains and codec times, times the stated errors
(`ClusterErrors`). Ranks report as the engine and the agents do: samples of all steps once per second and node, with
bursts, exchanges and round trips of the true link. A plan that the loop publishes is in force two steps later.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policy import Decision
from cgx_ray.monitors.sample import Burst, HostLoad, NodeSample, StepSample, Transfer
from cgx_ray.plan import Option, Plan
from cgx_ray.planner.cost import Link, Network, exchange_s
from cgx_ray.planner.models import ModelDescription
from cgx_ray.planner.options import CodecCost
from cgx_ray.planner.prediction import Measured, PlannedGroup, groups_of, predict

# Workers, each on a node of its own.
WORLD = 4
REPORT_S = 1.0
GAIN_STEPS = 20
# A burst ends after 50 ms or 2 MiB; groups whose messages are shorter than 64 KiB make none.
_BURST_S, _BURST_BYTES, _LONG_MESSAGE = 0.05, 2 << 20, 1 << 16
_QUIET = HostLoad(sent_bytes_per_s=0.0, received_bytes_per_s=0.0)
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


Schedule = Callable[[float], ClusterState]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """Truth about one step. `step_s` is without noise, `took_s` with it."""

    began_s: float
    took_s: float
    step_s: float
    efficiency: float
    plan: Plan
    state: ClusterState


class SimulatedCluster:
    """Workers that train `model`. `costs` and `gain` are the true ones, by codec."""

    def __init__(
        self,
        model: ModelDescription,
        costs: Mapping[str, CodecCost],
        gain: Mapping[str, float],
        errors: ClusterErrors,
        seed: int,
    ) -> None:
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
                    gain=gain if number % GAIN_STEPS == 1 else {},
                    bursts=(bursts := self._bursts(groups, rates[rank])),
                    rate_from=tuple(
                        min(rates[rank], rate) / (WORLD - 1) / self._delay() if bursts and peer != rank else 0.0
                        for peer, rate in enumerate(rates)
                    ),
                    lag_s=tuple(
                        0.0 if peer == rank else state.latency_ms / 1e3 * self._delay() for peer in range(WORLD)
                    ),
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


@dataclass(slots=True)
class SimulatedRun:
    """A training of `cluster` under `loop`; `steps` and `decisions` (with their times) are what happened."""

    loop: ControlLoop
    cluster: SimulatedCluster
    schedule: Schedule
    steps: list[SimulatedStep] = field(default_factory=list)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    now_s: float = 0.0
    _unsent: dict[int, list[StepSample]] = field(default_factory=lambda: {rank: [] for rank in range(WORLD)})
    _probed: dict[int, dict[str, float]] = field(default_factory=dict)

    def run(self, *, until_s: float = math.inf, num_steps: int | None = None) -> None:
        """Train until either limit."""
        held: list[Plan] = [self.loop.plans[-1]] * 2
        before = held[0]
        number = 1
        while self.now_s < until_s and (num_steps is None or len(self.steps) < num_steps):
            plan, state = held[0], self.schedule(self.now_s)
            samples, took_s = self.cluster.step(number, plan, state, is_new=plan != before)
            predicted = predict(self.cluster.truth(state), groups_of(plan, self.cluster.model.layers))
            assert predicted.efficiency is not None
            extra_s = self.cluster.errors.switch_s if plan != before else 0.0
            step_s = predicted.step_s * self.cluster.bias(predicted.groups) + extra_s
            self.steps.append(
                SimulatedStep(
                    began_s=self.now_s,
                    took_s=took_s,
                    step_s=step_s,
                    efficiency=predicted.efficiency,
                    plan=plan,
                    state=state,
                )
            )
            # A step's agreement fixes the plan of the step after it, so what comes now is used two steps later.
            held = [held[1], self.loop.plans[-1]]
            self._report(samples, took_s, state)
            before, number = plan, number + 1

    def _report(self, samples: list[StepSample], took_s: float, state: ClusterState) -> None:
        """Send the nodes' reports that are due while the step runs, then keep its samples for the next ones."""
        began_s, self.now_s = self.now_s, self.now_s + took_s
        due = [
            (turn * REPORT_S + rank * REPORT_S / WORLD, rank)
            for turn in range(int(began_s / REPORT_S), int(self.now_s / REPORT_S) + 1)
            for rank in range(WORLD)
        ]
        for time_s, rank in due:
            if began_s < time_s <= self.now_s and not (state.is_silent and rank == WORLD - 1):
                self._send(rank, time_s, state)
        for sample in samples:
            self._unsent[sample.rank].append(sample)

    def _send(self, rank: int, time_s: float, state: ClusterState) -> None:
        names = [str(node) for node in range(WORLD)]
        others = [name for name in names if name != names[rank]]
        answering = others if not state.is_silent else [name for name in others if name != names[-1]]
        report = NodeSample(
            node_id=names[rank],
            time_s=time_s,
            steps=tuple(self._unsent[rank]),
            latency_s=dict.fromkeys(answering, state.latency_ms / 1e3),
            host=_QUIET,
            bandwidth=self._probed.pop(rank, {}),
        )
        self._unsent[rank] = []
        self.decisions += [(time_s, decision) for decision in self.loop.observe(report, time_s)]
        target = self.loop.next_probe(names[rank], time_s)
        if target is not None:
            self._probed[rank] = {target: min(state.rate(rank), state.rate(int(target)))}
