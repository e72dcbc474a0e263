"""State of a training at this moment, as plain values that `cgx-ray top` asks the controller for."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from cgx_ray.control.joined_steps import MEAN_PARTS
from cgx_ray.control.journal.facts import LinkKind, LoopFacts
from cgx_ray.monitors.sample import NodeSample, NodeStep
from cgx_ray.plan import Plan

# Namespace of the controllers' actors.
NAMESPACE = "cgx_ray"


def new_actor_name(run_name: str) -> str:
    """Return the name of a controller's actor, new for each worker group: the last one's may still be held."""
    return f"{run_name}/{uuid.uuid4().hex[:8]}"


def run_of_actor(actor_name: str) -> str:
    """Return the run of `new_actor_name`."""
    return actor_name.rpartition("/")[0]


class LiveState:
    """Newest report of each rank and each node of one worker group."""

    def __init__(self, run_name: str, nodes: Sequence[str]) -> None:
        """`nodes`: address of each rank's node."""
        self._run_name = run_name
        self.nodes = tuple(nodes)
        # By rank, the newest record with it.
        self._ranks: dict[int, NodeStep] = {}
        self._latency_s: dict[str, Mapping[str, float]] = {}
        self._loads: dict[str, tuple[float, float, float | None]] = {}
        self._node_of: dict[int, str] = {}
        # By the clocks of nodes, of the first and the newest sample.
        self._first_s: float | None = None
        self._last_s = 0.0

    def add_sample(self, sample: NodeSample) -> None:
        for step in sample.steps:
            self._ranks.update(dict.fromkeys(step.ranks, step))
            self._node_of.update(dict.fromkeys(step.ranks, sample.node_id))
        host = sample.host
        self._first_s = sample.time_s if self._first_s is None else self._first_s
        self._last_s = sample.time_s
        self._latency_s[sample.node_id] = sample.latency_s
        self._loads[sample.node_id] = host.sent_bytes_per_s, host.received_bytes_per_s, host.neighbour_bytes_per_s

    def fields(
        self,
        facts: LoopFacts,
        plans: Sequence[Plan],
        journal: Sequence[Mapping[str, Any]],
        *,
        link: LinkKind = "network",
        is_on_one_node: bool = False,
    ) -> dict[str, Any]:
        """Return the state as JSON values.

        plans           the newest ones
        journal         its newest lines
        link            what lies between the ranks
        is_on_one_node  all ranks share memory
        """
        rate, plan = facts.bandwidth, self._in_force(plans)
        plan = plan.on_one_node() if is_on_one_node else plan
        return {
            "run": self._run_name,
            "world_size": plan.world_size,
            "plan": {"version": plan.version, "text": plan.describe(), "is_on_trial": plan.lease is not None},
            "ranks": [self._rank_fields(rank) for rank in sorted(self._ranks)],
            "nodes": [self._node_fields(node_id) for node_id in self._loads],
            "link": link,
            "bandwidth_gbps": [8e-9 * value for value in (rate.low, rate.value, rate.high)] if rate else None,
            "speed_up": facts.speed_up,
            "elapsed_s": max(self._last_s - self._first_s, 0.0) if self._first_s is not None else None,
            "latency_ms": facts.latency_s * 1e3 if facts.latency_s is not None else None,
            "slow_ranks": sorted(facts.slow_ranks),
            "silent_ranks": sorted(facts.silent_ranks),
            "slow_links_gbps": {str(rank): rate / 1e9 for rank, rate in facts.slow_link_bits_per_s.items()},
            "num_silent_nodes": len(facts.silent_nodes),
            "journal": [_short(line) for line in journal],
        }

    def _in_force(self, plans: Sequence[Plan]) -> Plan:
        """Return the plan of the newest step: the newest plan may be on its way to the ranks."""
        newest = max(self._ranks.values(), key=lambda step: step.step, default=None)
        known = {plan.lease.fallback.version: plan.lease.fallback for plan in plans if plan.lease is not None}
        known |= {plan.version: plan for plan in plans}
        return plans[-1] if newest is None else known.get(newest.plan_version, plans[-1])

    def _rank_fields(self, rank: int) -> dict[str, Any]:
        step = self._ranks[rank]
        place = step.ranks.index(rank)
        own = {part: getattr(step, part)[place] for part in ("between_s", *MEAN_PARTS)}
        return {"rank": rank, "node": self._address(rank), "step": step.step, **own}

    def _node_fields(self, node_id: str) -> dict[str, Any]:
        sent, received, neighbours = self._loads[node_id]
        ranks = sorted(rank for rank, node in self._node_of.items() if node == node_id)
        latencies = self._latency_s[node_id].values()
        return {
            "node": self._address(ranks[0]) if ranks else node_id,
            "ranks": ranks,
            "sent_bytes_per_s": sent,
            "received_bytes_per_s": received,
            "neighbour_bytes_per_s": neighbours,
            "latency_ms": 1e3 * max(latencies) if latencies else None,
        }

    def _address(self, rank: int) -> str:
        return self.nodes[rank] if rank < len(self.nodes) else self._node_of[rank]


def _short(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line without the parts that fill a screen: the layers, and the inputs of a replay."""
    return {name: value for name, value in line.items() if name not in ("situation", "layers", "told_codec_s")}
