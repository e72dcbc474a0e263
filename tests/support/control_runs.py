"""A fake training that steps a control loop: no Ray, no clock, no network."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.shared.simulated_cluster import flat_exchange_s, simulated_transfers
from cgx_ray.control.gains.known_losses import lost_share
from cgx_ray.control.history import History, Registration
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.learned.measured import is_dense
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.policies.policy import Decision
from cgx_ray.monitors.sample import (
    HostLoad,
    InsideLink,
    LayerError,
    NodeSample,
    StepSample,
    node_steps,
)
from cgx_ray.plan import Layer, Option, Plan, make_plan
from cgx_ray.planner.bits import WIDTHS
from cgx_ray.planner.candidates import CodecCost, candidate_options
from cgx_ray.planner.cost import Link
from cgx_ray.planner.planned_group import groups_of

WORLD = 4


DENSITIES = (0.1, 0.01)


LAYERS = (
    Layer(name="embed", numel=1_000_000, ndim=2),
    Layer(name="bias", numel=1_000, ndim=1),
    Layer(name="head", numel=4_000_000, ndim=2),
)


COST = CodecCost(encode_a_s=1e-5, encode_b_s_per_element=5e-10, decode_a_s=1e-5, decode_b_s_per_element=2e-10)


COSTS = {str(option.codec): COST for option in candidate_options(DENSITIES)} | {"qsgd:bits=3,bucket_size=128": COST}


GAIN = {
    "bf16": 1.0,
    "qsgd:bits=4,bucket_size=128": 0.98,
    "topk:density=0.1": 0.7,
    "topk:density=0.01": 0.3,
}


QUIET = HostLoad(sent_bytes_per_s=0.0, received_bytes_per_s=0.0)


@dataclass
class FakeTraining:
    """A training whose steps take as long as flat schemes do by the cost model, times `slowdown` except when dense.

    slowdown_of  by codec name, another factor for plans that use it
    compute_slowdown
                 factor on compute except when dense
    returns      the ranks run the fallback of a plan on trial
    loss, lr     reported on all ranks, the loss by step; `report` replaces the loss, by step and rank
    clock        of the nodes, by step
    silent       ranks whose samples are lost
    inside       link inside the node that a rank tells
    pause_s      before a step, by step and rank; the other ranks wait for the longest
    weight_drift what a comparison of the weights finds, see `StepSample`
    has_mesh     ranks greet each other, so messages are pushed and exchanges are not sure
    lag          steps after a decision in which the ranks still use the plan before
    """

    loop: ControlLoop
    gbps: float = 1.0
    compute_s: float = 0.3
    slowdown: float = 1.0
    slowdown_of: dict[str, float] = field(default_factory=dict)
    compute_slowdown: float = 1.0
    gain: dict[str, float] = field(default_factory=lambda: dict(GAIN))
    kept: dict[str, float] = field(default_factory=dict)
    norm: float | None = None
    loss: Callable[[int], float] | None = None
    report: Callable[[int, int], float | None] | None = None
    lr: float | None = None
    clock: Callable[[int], float] = float
    late_rank_s: float = 0.0
    pause_s: Callable[[int, int], float] = lambda step, rank: 0.0
    step: int = 0
    noise: float = 0.0
    latency_s: float = 1e-4
    num_local: int = 1
    jitter: float = 0.0
    returns: bool = False
    silent: set[int] = field(default_factory=set)
    inside: dict[int, InsideLink] = field(default_factory=dict)
    has_mesh: bool = False
    weight_drift: float | None = None
    lag: int = 0
    _newest: list[Plan] = field(default_factory=list)

    def run(self, num_steps: int) -> list[Decision]:
        decisions = []
        for _ in range(num_steps):
            self._newest.append(self.loop.plans[-1])
            if (self.step + 1) % self.loop.plans[-1].period:
                # A round has one sample, at its end.
                self.step += 1
                continue
            self.noise = self.jitter * (2 * random.Random(self.step).random() - 1)
            samples = tuple(self.sample(rank) for rank in range(WORLD) if rank not in self.silent)
            self.step += 1
            sample = NodeSample(
                node_id="node",
                time_s=self.clock(self.step),
                steps=node_steps(samples),
                latency_s={"other": self.latency_s},
                host=QUIET,
            )
            decisions += self.loop.observe(sample, float(self.step))
        return decisions

    def _factor(self, plan: Plan) -> float:
        if is_dense(plan):
            return 1.0
        names = {group.option.codec.name for group in plan.groups}
        return math.prod([self.slowdown, *(self.slowdown_of.get(name, 1.0) for name in names)])

    def _loss(self, rank: int) -> float | None:
        if self.report is not None:
            return self.report(self.step, rank)
        return self.loss(self.step) if self.loss is not None else None

    def sample(self, rank: int) -> StepSample:
        plan = self._newest[max(0, len(self._newest) - 1 - self.lag)] if self.lag else self.loop.plans[-1]
        if self.returns and plan.lease is not None:
            plan = plan.lease.fallback
        link = Link.from_rates(bandwidth_gbps=self.gbps, latency_ms=self.latency_s * 1e3)
        groups = groups_of(plan, LAYERS)
        transfers = simulated_transfers(groups, lambda group: flat_exchange_s(group, WORLD, link))
        exchange = sum(transfer.seconds for transfer in transfers) / plan.period
        compute_s = self.compute_s * (1.0 if is_dense(plan) else self.compute_slowdown)
        late_s = self.late_rank_s if rank else 0.0
        pauses_s = [self.pause_s(self.step, one) for one in range(WORLD)]
        waits_s = max(pauses_s) - pauses_s[rank]
        # Sparse codecs need two measurements that agree. Step 2 has the second one, before the first decision.
        is_measured = self.step % 20 == 1 or self.step == 2
        return StepSample(
            rank=rank,
            step=self.step,
            num_steps=plan.period,
            plan_version=plan.version,
            step_s=(compute_s + exchange) * self._factor(plan) + waits_s,
            between_s=pauses_s[rank],
            compute_s=compute_s * (1 + self.noise),
            encode_s=0.002,
            exchange_s=exchange + late_s + waits_s,
            decode_s=0.002,
            wire_bytes=1,
            dense_bytes=1,
            ready_s=(compute_s * (1 + self.noise),) * len(plan.groups),
            num_local=self.num_local,
            transfers=tuple(transfer._replace(seconds=transfer.seconds + late_s) for transfer in transfers),
            gain=self.gain if is_measured else {},
            kept=self.kept if is_measured else {},
            norm=self.norm if is_measured else None,
            loss=self._loss(rank),
            lr=self.lr,
            inside=self.inside.get(rank),
            weight_drift=self.weight_drift,
            lag_s={other: self.latency_s for other in range(WORLD) if other != rank} if self.has_mesh else {},
        )


class MeteredTraining(FakeTraining):
    """A fake training with errors by layer, one number of bits at a time.

    error   lost share of a layer with 4 bits
    widths  numbers of bits that are measured in turn
    scatter of the errors, as a standard deviation of their logarithm
    """

    error: dict[str, float]
    widths: Sequence[int] = WIDTHS
    scatter: float = 0.0

    def sample(self, rank: int) -> StepSample:
        sample = super().sample(rank)
        if not sample.gain:
            return sample
        bits = self.widths[self.step % len(self.widths)]
        noise = random.Random(f"{self.step} {rank}")
        return replace(
            sample,
            error_bits=bits,
            layer_errors={
                name: LayerError(1.0, lost * lost_share({4: 1.0}, bits) * math.exp(noise.gauss(0, self.scatter)), 1.0)
                for name, lost in self.error.items()
            },
        )


def start(
    tmp_path: Path,
    *,
    min_gain: float = 0.8,
    options: Sequence[Option] = candidate_options(DENSITIES),
    gain_ratios: Mapping[str, float] | None = None,
) -> FakeTraining:
    policy = Adaptive(candidates=options, min_gain=min_gain)
    loop = ControlLoop(policy, Journal(tmp_path / "decisions.jsonl"), History(gain_ratios=gain_ratios or {}))
    loop.register(registration())
    run = FakeTraining(loop)
    run.step = 1
    return run


def registration(
    layers: tuple[Layer, ...] = LAYERS,
    first_plan: Plan | None = None,
    codec_costs: Mapping[str, CodecCost] = COSTS,
    **rest: Any,
) -> Registration:
    """Return what WORLD ranks say when they begin with a dense plan, or with another one."""
    first = first_plan or make_plan(layers, version=0, world_size=WORLD)
    return Registration(layers=layers, first_plan=first, codec_costs=codec_costs, **rest)


def journal(tmp_path: Path, *events: str) -> list[dict[str, Any]]:
    """Return the journal's lines of these events; without any, decisions and outcomes."""
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] in (events or ("decision", "outcome"))]
