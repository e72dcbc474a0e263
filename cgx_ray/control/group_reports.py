"""The reports of one worker group's nodes: joined steps, and the network as far as they show it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from cgx_ray.control.history import Learned
from cgx_ray.control.joined_steps import JoinedStep, StepJoiner
from cgx_ray.control.journal.facts import DecisionCounts, LoopFacts
from cgx_ray.control.learned.evidence import MAX_STEPS
from cgx_ray.control.network.changes import SlowRanks
from cgx_ray.control.network.known_network import KnownNetwork
from cgx_ray.control.policies.policy import REVIEW_S
from cgx_ray.monitors.sample import NodeSample, NodeStep
from cgx_ray.plan import Layer, Lease, Plan


class GroupReports(ABC):
    """Knowledge of a worker group that does not depend on how its plans are chosen: each way to choose is a subclass.

    layers    of the model
    network   between the nodes
    counts    of decisions, for the metrics
    speed_up  of the newest steps over dense ones; None while dense is not known
    """

    def __init__(self, layers: tuple[Layer, ...], world_size: int) -> None:
        self.layers = layers
        self.network, self.counts = KnownNetwork(), DecisionCounts()
        self.speed_up: float | None = None
        self._joiner, self._slow_ranks = StepJoiner(world_size), SlowRanks(world_size)
        # Time of each node's last report, and of the last report of any node.
        self._reported_s: dict[str, float] = {}
        self._now_s = 0.0

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """The plan in force."""

    @property
    def gain_ratios(self) -> Mapping[str, float]:
        """See `GainWatch`; none where no gains are measured."""
        return {}

    def learned(self) -> Learned | None:
        """Return what the next worker group shall start with, None if that is nothing."""
        return None

    @property
    def silent_ranks(self) -> frozenset[int]:
        """Ranks that steps do not wait for, see `StepJoiner`."""
        return self._joiner.silent

    @property
    def last_step(self) -> int:
        """Newest step that was joined, -1 before the first."""
        return self._joiner.last_step

    def join(self, parts: Sequence[NodeStep], now_s: float) -> list[JoinedStep]:
        """Add records of nodes; return the steps that they complete, oldest first. Give each of them to `add_step`."""
        return self._joiner.add_node_steps(parts, now_s)

    def add_report(self, sample: NodeSample, now_s: float) -> bool:
        """Add what a node reports besides steps; return whether the network has been forgotten (`KnownNetwork`)."""
        self._reported_s[sample.node_id] = self._now_s = now_s
        ranks = [rank for step in sample.steps for rank in step.ranks]
        return self.network.add_report(sample, ranks, now_s)

    def leased(self, plan: Plan, step: int, step_s: float) -> Plan:
        """Return `plan` with a lease, after which the ranks return to the plan before it. `step`: newest one.

        It holds for MAX_STEPS and for REVIEW_S of steps of `step_s`, both: the outcome is known after a few steps, and
        once they are reported.
        """
        before = self.plan.lease.fallback if self.plan.lease is not None else self.plan
        num_steps = max(MAX_STEPS * plan.period, math.ceil(REVIEW_S / step_s))
        return replace(
            plan, lease=Lease(last_step=step + num_steps, fallback=replace(before, version=plan.version + 1))
        )

    def facts(self) -> LoopFacts:
        """Return what the metrics show; without predictions."""
        return LoopFacts(
            bandwidth=self.network.bandwidth,
            is_link_known=self.network.is_known,
            latency_s=self.network.latency_s,
            num_link_changes=self.network.num_changes,
            num_impossible=self.network.num_impossible,
            slow_link_bits_per_s={rank: 8 * rate for rank, rate in self.network.slow.items()},
            slow_ranks=self._slow_ranks.ranks,
            silent_nodes=self.network.silent_nodes,
            silent_ranks=self.silent_ranks,
            speed_up=self.speed_up,
            plan_version=self.plan.version,
            num_decisions=self.counts.num_decisions,
            newest_decision_s=self.counts.newest_s,
            num_reverts=self.counts.num_reverts,
            report_age_s={node: self._now_s - seen_s for node, seen_s in self._reported_s.items()},
            num_incomplete_steps=self._joiner.num_incomplete,
        )
