"""A training on a simulated cluster that drives the real control loop: no Ray, no clock, no network.

Nodes report as the agents do, once per second each. A plan that the loop publishes is in force two steps later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.shared.simulated_cluster import WORLD, ClusterState, SimulatedCluster
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.policy import Decision
from cgx_ray.monitors.sample import Bandwidth, HostLoad, NodeSample, StepSample, node_steps
from cgx_ray.plan import Plan
from cgx_ray.planner.planned_group import groups_of
from cgx_ray.planner.prediction import predict

REPORT_S = 1.0
_QUIET = HostLoad(sent_bytes_per_s=0.0, received_bytes_per_s=0.0)

Schedule = Callable[[float], ClusterState]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """Truth about one step. `step_s` is without noise, `took_s` with it."""

    began_s: float
    took_s: float
    step_s: float
    efficiency: float
    plan: Plan
    state: ClusterState


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
    _probed: dict[int, dict[str, Bandwidth]] = field(default_factory=dict)

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
            step_s = predicted.step_s * self.cluster.bias(predicted.groups, state) + extra_s
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
            steps=node_steps(self._unsent[rank]),
            latency_s=dict.fromkeys(answering, state.latency_ms / 1e3),
            host=_QUIET,
            bandwidth=self._probed.pop(rank, {}),
        )
        self._unsent[rank] = []
        self.decisions += [(time_s, decision) for decision in self.loop.observe(report, time_s)]
        target = self.loop.next_probe(names[rank], time_s)
        if target is not None:
            rate = min(state.rate(rank), state.rate(int(target)))
            self._probed[rank] = {target: Bandwidth(bytes_per_s=rate)}
