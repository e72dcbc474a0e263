"""A simulated cluster whose truth is known: the samples that its ranks make of a step.

A step takes as long as the planner predicts from the true link, compute, gains and codec times, times the stated errors
(`ClusterErrors`). Samples are as the engine makes them, with bursts, exchanges and round trips of the true link.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from typing import Any

from cgx_ray.collectives.transport.greeting import greeted
from cgx_ray.control.gains.known_losses import lost_share
from cgx_ray.engine.counted import MAX_BURSTS, counted_lags, counted_peers, reports_rates
from cgx_ray.engine.gains.gain_schedule import is_measured
from cgx_ray.monitors.node_monitor import measured_nodes
from cgx_ray.monitors.reductions import Sum
from cgx_ray.monitors.sample import (
    ROTATION_STEPS,
    Burst,
    HostLoad,
    InsideLink,
    LayerError,
    NodeSample,
    NodeStep,
    StepSample,
    Transfer,
    node_steps,
)
from cgx_ray.plan import DENSE, Option, Plan, make_plan
from cgx_ray.planner.bits import WIDTHS
from cgx_ray.planner.candidates import CodecCost, CodecCosts, candidate_options
from cgx_ray.planner.cost import Link, Network, exchange_s
from cgx_ray.planner.models import ModelDescription, load_model
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES
from cgx_ray.planner.planned_group import PlannedGroup, groups_of
from cgx_ray.planner.prediction import Measured, Prediction, predict
from cgx_ray.planner.scenario import TYPICAL_GAINS

# 314 tensors.
MODEL = "resnet101"
COMPUTE_S = 0.8
# Rates of a node's link before and after the change, Gbit/s, and its latency.
GBPS, LATER_GBPS, LATENCY_S = 25.0, 2.5, 2e-4
INSIDE = Link.from_rates(bandwidth_gbps=100, latency_ms=0.02)
COST = CodecCost(encode_a_s=1e-4, encode_b_s_per_element=1e-9, decode_a_s=2e-5, decode_b_s_per_element=4e-10)
OPTIONS = candidate_options(CANDIDATE_DENSITIES)
BURST_S = 0.05
# Standard deviation of what each rank measures by itself.
_NOISE = 0.02


# Workers, each on a node of its own.
WORLD = 4
# A burst ends after 50 ms or 2 MiB; groups whose messages are shorter than 64 KiB make none.
_BURST_S, _BURST_BYTES, _LONG_MESSAGE = 0.05, 2 << 20, 1 << 16
# Standard deviation of what each rank measures by itself: rates, latencies, compute.
_RANK_NOISE = 0.03


def simulated_transfers(
    groups: Sequence[PlannedGroup], seconds: Callable[[PlannedGroup], float]
) -> tuple[Transfer, ...]:
    """Return the exchange of each group of a step. `seconds`: of a group's exchange."""
    return tuple(
        Transfer(
            group=index,
            scheme=str(group.option.scheme),
            codec=str(group.option.codec),
            intra=str(group.option.intra),
            numel=group.numel,
            wire_bytes=group.wire_bytes,
            index_bytes=group.option.codec.index_bytes(group.numel),
            seconds=seconds(group),
        )
        for index, group in enumerate(groups)
    )


def flat_exchange_s(group: PlannedGroup, num_workers: int, link: Link) -> float:
    """Return the seconds of a group's exchange between workers that are all on nodes of their own."""
    return exchange_s(
        group.option.scheme,
        num_workers=num_workers,
        dense_bytes=group.dense_bytes,
        wire_bytes=group.wire_bytes,
        index_bytes=group.option.codec.index_bytes(group.numel),
        link=link,
    )


@dataclass(frozen=True)
class LargeCluster:
    """`ranks_per_node` ranks on each of `num_nodes` nodes, in a row."""

    num_nodes: int
    ranks_per_node: int

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @cached_property
    def names(self) -> list[str]:
        return [f"node {number:05}" for number in range(self.num_nodes)]

    @cached_property
    def nodes(self) -> list[int]:
        """Index of the node, by rank."""
        return [rank // self.ranks_per_node for rank in range(self.num_ranks)]

    @property
    def costs(self) -> dict[str, CodecCost]:
        return {str(option.codec): COST for option in OPTIONS}

    def first_plan(self) -> Plan:
        return make_plan(load_model(MODEL).layers, version=0, world_size=self.num_ranks)

    def truth(self, gbps: float) -> Measured:
        model = load_model(MODEL)
        between = Link.from_rates(bandwidth_gbps=gbps, latency_ms=1e3 * LATENCY_S)
        return Measured(
            layers=model.layers,
            backward_s=model.step_s(COMPUTE_S),
            network=Network(
                num_nodes=self.num_nodes, ranks_per_node=self.ranks_per_node, between=between, inside=INSIDE
            ),
            codec_costs=self.costs,
            gain=TYPICAL_GAINS,
        )


class Reports:
    """Makes the reports of all nodes. `cluster`: theirs."""

    def __init__(self, cluster: LargeCluster) -> None:
        self._cluster = cluster
        self._random = random.Random(0)
        self._step = lru_cache(maxsize=4)(self._new_step)
        self._reporting = frozenset(rank for rank in range(cluster.num_ranks) if reports_rates(rank, cluster.nodes))
        self._peers = lru_cache(maxsize=2 * cluster.num_ranks)(self._new_peers)
        self._lags = [self._reported_lags(node) for node in range(cluster.num_nodes)]
        self._measured = [measured_nodes(name, cluster.names) for name in cluster.names]

    def make(self, node: int, number: int, plan: Plan, gbps: float, time_s: float) -> NodeSample:
        """Return what `node` reports after step `number` under `plan`. `gbps`: rate of each node's link."""
        return NodeSample(
            node_id=self._cluster.names[node],
            time_s=time_s,
            steps=(self._record(node, number, plan, gbps),),
            latency_s={name: LATENCY_S * self._noise() for name in self._measured[node]},
            host=HostLoad(sent_bytes_per_s=1e8, received_bytes_per_s=1e8),
        )

    def _record(self, node: int, number: int, plan: Plan, gbps: float) -> NodeStep:
        size, step = self._cluster.ranks_per_node, self._step(plan, gbps)
        ranks = tuple(range(node * size, (node + 1) * size))
        compute_s = tuple(COMPUTE_S * self._noise() for _ in ranks)
        gain = {codec: Sum(size * gain, size) for codec, gain in TYPICAL_GAINS.items()}
        # Ranks of a node share its link.
        rate = gbps * 1e9 / 8 / size
        return replace(
            step,
            step=number,
            ranks=ranks,
            step_s=tuple(max(own_s, step.step_s[0]) for own_s in compute_s),
            compute_s=compute_s,
            bursts=tuple(
                tuple(Burst(int(rate * BURST_S), BURST_S * self._noise()) for _ in range(MAX_BURSTS))
                if rank in self._reporting
                else ()
                for rank in ranks
            ),
            rate_from=tuple(
                {peer: rate / len(peers) * self._noise() for peer in peers}
                for peers in (self._peers(rank, number // ROTATION_STEPS) for rank in ranks)
            ),
            lag_s=tuple({peer: LATENCY_S * self._noise() for peer in peers} for peers in self._lags[node]),
            gain=gain if is_measured(number, affordable_from=0) else {},
        )

    def _new_step(self, plan: Plan, gbps: float) -> NodeStep:
        """Return what the steps of all nodes under `plan` have in common."""
        truth, size = self._cluster.truth(gbps), self._cluster.ranks_per_node
        groups = groups_of(plan, truth.layers)
        predicted = predict(truth, groups)
        transfers = simulated_transfers(groups, lambda group: _exchange_s(group, truth))
        sample = StepSample(
            rank=0,
            step=0,
            plan_version=plan.version,
            step_s=predicted.step_s,
            compute_s=COMPUTE_S,
            encode_s=predicted.codec_s / 2,
            exchange_s=sum(one.seconds for one in transfers),
            decode_s=predicted.codec_s / 2,
            wire_bytes=sum(group.wire_bytes for group in groups),
            dense_bytes=sum(group.dense_bytes for group in groups),
            ready_s=_predicted_ready_s(predicted),
            transfers=transfers,
            num_local=size,
            inside=InsideLink(INSIDE.alpha_s, INSIDE.beta_s_per_byte),
        )
        (step,) = node_steps(replace(sample, rank=rank) for rank in range(size))
        return step

    def _new_peers(self, rank: int, turn: int) -> list[int]:
        return counted_peers(rank, self._cluster.nodes, turn * ROTATION_STEPS)

    def _reported_lags(self, node: int) -> list[list[int]]:
        """Return the ranks whose lags each rank of `node` reports."""
        size, nodes = self._cluster.ranks_per_node, self._cluster.nodes
        return [
            list(counted_lags(rank, nodes, dict.fromkeys(greeted(rank, len(nodes)), 0.0)))
            for rank in range(node * size, (node + 1) * size)
        ]

    def _noise(self) -> float:
        return 1 + _NOISE * abs(self._random.gauss(0, 1))


def _exchange_s(group: PlannedGroup, truth: Measured) -> float:
    option, index_bytes = group.option, group.option.codec.index_bytes(group.numel)
    inside, between = truth.network.terms(option.scheme, option.intra, group.dense_bytes, group.wire_bytes, index_bytes)
    return INSIDE.seconds(*inside) + truth.network.between.seconds(*between)


def _predicted_ready_s(predicted: Prediction) -> tuple[float, ...]:
    """Return when each group was ready, by its share of the elements: backward is as long as these say."""
    whole, ready, done = sum(group.numel for group in predicted.groups), [], 0
    for group in predicted.groups:
        done += group.numel
        ready.append(COMPUTE_S * done / whole)
    return tuple(ready)


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
    unknown      mean logarithm of such factors that the seed draws, for each option and, about 1, for each plan on each
                 network, so that a plan says little of those beside it; their standard deviations are 0.6 and 0.4 of
                 it. Steps of plain dense take as long as predicted
    cold_steps   steps over which compute falls from 3 times to its usual time
    switch_s     seconds that the first step under a new plan takes longer
    """

    step_noise: float = 0.03
    bias: Mapping[Option, float] = field(default_factory=dict)
    unknown: float = 0.0
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
        costs: CodecCosts,
        gain: Mapping[str, float],
        errors: ClusterErrors,
        seed: int,
        layer_errors: Mapping[str, LayerError] | None = None,
    ) -> None:
        self._layer_errors, self._num_measured = layer_errors or {}, 0
        self.model, self.errors = model, errors
        self._costs, self._gain = costs, gain
        self._random, self._seed = random.Random(seed), seed
        self.truth = cache(self._truth)
        self.bias = cache(self._bias)
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

    def _bias(self, groups: tuple[PlannedGroup, ...], state: ClusterState) -> float:
        """Return the true seconds of a step over those of the planner's model."""
        whole = sum(group.dense_bytes for group in groups)
        shares = ((group.dense_bytes / whole, self._option_bias(group.option)) for group in groups)
        log = math.fsum(share * one for share, one in shares)
        if not self.errors.unknown or all(group.option == DENSE for group in groups):
            return math.exp(log)
        return math.exp(log + 0.4 * self._drawn((*groups, state.link)))

    def _option_bias(self, option: Option) -> float:
        unknown = self.errors.unknown
        drawn = unknown + 0.6 * self._drawn(option) if unknown and option != DENSE else 0.0
        return drawn + math.log(self.errors.bias.get(option, 1.0))

    def _drawn(self, what: object) -> float:
        return random.Random(f"{self._seed} {what}").gauss(0, self.errors.unknown)

    def _score(self, groups: tuple[PlannedGroup, ...], state: ClusterState) -> float:
        """Return the true seconds for the progress of one dense step."""
        return predict(self.truth(state), groups).score * self.bias(groups, state)

    def step(self, number: int, plan: Plan, state: ClusterState, *, is_new: bool) -> tuple[list[StepSample], float]:
        """Return the samples of all ranks of a step, and its seconds."""
        truth, groups = self.truth(state), groups_of(plan, self.model.layers)
        cold = 1 + 2 * math.exp(-number / self.errors.cold_steps) if self.errors.cold_steps else 1.0
        factor = cold * self._noise()
        own = replace(truth, backward_s=tuple(factor * seconds for seconds in truth.backward_s))
        predicted = predict(own, groups)
        step_s = own.compute_s + (predicted.step_s - own.compute_s) * self._noise()
        step_s = step_s * self.bias(groups, state) + (self.errors.switch_s if is_new else 0.0)
        ready_s = _ready_s(own, groups)
        link = truth.network.between
        transfers = simulated_transfers(groups, lambda group: self._delay() * flat_exchange_s(group, WORLD, link))
        gain = {codec: self._measured_gain(gain) for codec, gain in truth.gain.items()}
        losses = self._losses() if is_measured(number, affordable_from=0) else {}
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

    def _losses(self) -> dict[str, Any]:
        """Return the fields of a sample with errors by layer, for the next number of bits."""
        bits = WIDTHS[self._num_measured % len(WIDTHS)]
        self._num_measured += 1
        errors = {
            name: LayerError(one.energy, lost_share({4: one.lost}, bits)) for name, one in self._layer_errors.items()
        }
        return {"layer_errors": errors, "error_bits": bits if errors else None}

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
