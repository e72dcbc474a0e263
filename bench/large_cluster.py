"""A large cluster as its agents report it: one record per step and node. Nothing trains, and nothing is sent.

Links, gains and codec times are made up. Steps take what the planner predicts from them, so that the loop finds its
predictions right, and decides when the link changes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from cgx_ray.collectives.greeting import greeted
from cgx_ray.engine.counted import MAX_BURSTS, counted_lags, counted_peers, tells_rates
from cgx_ray.engine.gain_schedule import is_measured
from cgx_ray.monitors.agent import measured_nodes
from cgx_ray.monitors.sample import ROTATION_STEPS, Burst, HostLoad, InsideLink, NodeSample, NodeStep, Sum, Transfer
from cgx_ray.plan import Plan, make_plan
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.models import load_model
from cgx_ray.planner.options import CodecCost, candidate_options
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES
from cgx_ray.planner.prediction import Measured, PlannedGroup, Prediction, groups_of, predict
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
        self._telling = frozenset(rank for rank in range(cluster.num_ranks) if tells_rates(rank, cluster.nodes))
        self._peers = lru_cache(maxsize=2 * cluster.num_ranks)(self._new_peers)
        self._lags = [self._told_lags(node) for node in range(cluster.num_nodes)]
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
        told = {codec: Sum(size * gain, size) for codec, gain in TYPICAL_GAINS.items()}
        # Ranks of a node share its link.
        rate = gbps * 1e9 / 8 / size
        return replace(
            step,
            step=number,
            ranks=ranks,
            step_s=tuple(max(own_s, step.step_s[0]) for own_s in compute_s),
            compute_s=compute_s,
            bursts={
                rank: tuple(Burst(int(rate * BURST_S), BURST_S * self._noise()) for _ in range(MAX_BURSTS))
                for rank in ranks
                if rank in self._telling
            },
            rate_from={
                (peer, rank): rate / len(peers) * self._noise()
                for rank in ranks
                for peers in [self._peers(rank, number // ROTATION_STEPS)]
                for peer in peers
            },
            lag_s={pair: LATENCY_S * self._noise() for pair in self._lags[node]},
            gain=told if is_measured(number, affordable_from=0) else {},
        )

    def _new_step(self, plan: Plan, gbps: float) -> NodeStep:
        """Return what the steps of all nodes under `plan` have in common."""
        truth, size = self._cluster.truth(gbps), self._cluster.ranks_per_node
        groups = groups_of(plan, truth.layers)
        predicted = predict(truth, groups)
        transfers = tuple(self._transfer(index, group, truth) for index, group in enumerate(groups))
        return NodeStep(
            step=0,
            plan_version=plan.version,
            ranks=(),
            step_s=(predicted.step_s,) * size,
            between_s=(0.0,) * size,
            compute_s=(),
            encode_s=(predicted.codec_s / 2,) * size,
            exchange_s=(sum(one.seconds for one in transfers),) * size,
            decode_s=(predicted.codec_s / 2,) * size,
            wire_bytes=(sum(group.wire_bytes for group in groups),) * size,
            dense_bytes=(sum(group.dense_bytes for group in groups),) * size,
            ready_s=_ready_s(predicted),
            transfers=transfers,
            num_local=size,
            inside=InsideLink(INSIDE.alpha_s, INSIDE.beta_s_per_byte),
        )

    def _transfer(self, index: int, group: PlannedGroup, truth: Measured) -> Transfer:
        codec, option = group.option.codec, group.option
        index_bytes = codec.index_bytes(group.numel)
        inside, between = truth.network.terms(
            option.scheme, option.intra, group.dense_bytes, group.wire_bytes, index_bytes
        )
        return Transfer(
            group=index,
            scheme=str(option.scheme),
            codec=str(codec),
            intra=str(option.intra),
            numel=group.numel,
            wire_bytes=group.wire_bytes,
            index_bytes=index_bytes,
            seconds=INSIDE.seconds(*inside) + truth.network.between.seconds(*between),
        )

    def _new_peers(self, rank: int, turn: int) -> list[int]:
        return counted_peers(rank, self._cluster.nodes, turn * ROTATION_STEPS)

    def _told_lags(self, node: int) -> list[tuple[int, int]]:
        """Return the pairs of ranks whose lags the ranks of `node` tell."""
        size, nodes = self._cluster.ranks_per_node, self._cluster.nodes
        return [
            (rank, peer)
            for rank in range(node * size, (node + 1) * size)
            for peer in counted_lags(rank, nodes, dict.fromkeys(greeted(rank, len(nodes)), 0.0))
        ]

    def _noise(self) -> float:
        return 1 + _NOISE * abs(self._random.gauss(0, 1))


def _ready_s(predicted: Prediction) -> tuple[float, ...]:
    """Return when each group was ready, by its share of the elements: backward is as long as these say."""
    whole, ready, done = sum(group.numel for group in predicted.groups), [], 0
    for group in predicted.groups:
        done += group.numel
        ready.append(COMPUTE_S * done / whole)
    return tuple(ready)
