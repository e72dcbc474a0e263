"""Model, plans, schedules and networks of `python -m bench adapt --lab`.

The model is the demo's GPT, whose backward sleeps. Its 19.6 MB of gradients stand for 25 times as many, those of a
model of 122 million parameters; so all rates of the papers' schedules are divided by 25, and latencies stay. An epoch
of the schedules takes EPOCH_S seconds.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from bench.step.cases import StepNetwork
from bench.step.workload import Workload
from cgx_ray.demo.gpt import GPT, GPTConfig
from cgx_ray.lab.schedule import Schedule
from cgx_ray.plan import CodecSpec, Layer, Plan
from cgx_ray.planner.fidelity import Fidelity
from cgx_ray.planner.models import ModelDescription
from cgx_ray.session.settings import Settings

RATE_DIVISOR = 25.0
EPOCH_S = 6.0
# Forward and backward of a step, seconds.
COMPUTE_S = 0.15
# Bits per second and one-way seconds of the 16 networks on which adaptive training is compared with plain DDP.
GRID_RATES = (6e7, 2e8, 6e8, 2e9)
GRID_LATENCIES_S = (0.1e-3, 1e-3, 5e-3, 20e-3)
# Shows what steps take longer where ranks share processors. No schedule has it, so no simulated time is fitted to
# itself.
PROCESSOR_NETWORK = StepNetwork(rate_bit_per_s=5e8, latency_s=1e-3)
# Bits per second and one-way seconds between which the networks of the drawn schedule lie, its seed, number of
# networks, and seconds on each.
DRAWN_RATES, DRAWN_LATENCIES_S = (4e7, 1e9), (0.2e-3, 20e-3)
DRAWN_SEED, NUM_DRAWN, DRAWN_S = 32, 4, 60.0
# DDP's default, bytes.
_BUCKET_BYTES = 25 << 20

LabKind = Literal["noop", "ddp", "static", "adaptive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LabWay:
    """A way to average gradients.

    codec, scheme  of kind "static": one plan for the whole training
    fidelity       of kind "adaptive"
    """

    name: str
    kind: LabKind
    codec: str = "none"
    scheme: str = "dense"
    fidelity: Fidelity = Fidelity.STRICT

    def settings(self) -> Settings:
        """Return the settings of the attachment of kind "static" or "adaptive"."""
        # Ranks of a lab share a machine. Shared memory between them would go around the links.
        if self.kind == "adaptive":
            return Settings(policy="adaptive", fidelity=self.fidelity, shared_memory=False)
        return Settings(policy="static", codec=self.codec, scheme=self.scheme, shared_memory=False)

    @property
    def has_rounds(self) -> bool:
        """True if ranks may train alone for some steps."""
        return self.kind == "adaptive" and self.fidelity is not Fidelity.STRICT

    def plan(self, layers: Sequence[Layer], num_ranks: int) -> Plan:
        """Return the plan in force; for plain DDP, the one with the same sums."""
        return self.settings().first_plan(layers, num_ranks, _BUCKET_BYTES)


NOOP = LabWay(name="noop", kind="noop")
DDP = LabWay(name="ddp", kind="ddp")
ADAPTIVE = {level: LabWay(name=f"adaptive {level}", kind="adaptive", fidelity=level) for level in Fidelity}
# What the loop may choose by default: dense, and these codecs over their best schemes for low and for high latency.
STATIC_WAYS = (
    DDP,
    LabWay(name="bf16", kind="static", codec="bf16", scheme="sra"),
    LabWay(name="qsgd4", kind="static", codec="qsgd:bits=4,bucket_size=128", scheme="sra"),
    LabWay(name="qsgd4_allgather", kind="static", codec="qsgd:bits=4,bucket_size=128", scheme="allgather"),
)
LAB_WAYS = {way.name: way for way in (NOOP, *STATIC_WAYS, *ADAPTIVE.values())}


def candidate_specs(fidelity: Fidelity) -> tuple[CodecSpec, ...]:
    """Return the codecs that the loop may choose, without none."""
    return tuple(ADAPTIVE[fidelity].settings().chosen_policy.timed_codecs)


@dataclass(frozen=True, slots=True, kw_only=True)
class LabPhase:
    """A network of a schedule, from `begin_s` to `end_s` after the start."""

    begin_s: float
    end_s: float
    network: StepNetwork

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def phases_of(schedule: Schedule, epoch_s: float, rate_divisor: float) -> list[LabPhase]:
    """Return the phases of a schedule in epochs whose lines set rate or latency of all hosts."""
    played = schedule.with_epoch(epoch_s, "s")
    ends_s = [*(event.at for event in played.events[1:]), played.end]
    network, phases = StepNetwork(rate_bit_per_s=None), []
    for event, end_s in zip(played.events, ends_s, strict=True):
        network = StepNetwork(
            rate_bit_per_s=event.change.get("rate_bit_per_s", network.rate_bit_per_s),
            latency_s=event.change.get("latency_s", network.latency_s),
        )
        phases.append(LabPhase(begin_s=event.at, end_s=end_s, network=_divided(network, rate_divisor)))
    return phases


def drawn_phases(seed: int) -> list[LabPhase]:
    """Return phases on networks that no rule of the loop was made for: log-uniform rates and latencies."""
    draw = random.Random(seed)
    networks = (
        StepNetwork(rate_bit_per_s=_log_uniform(draw, *DRAWN_RATES), latency_s=_log_uniform(draw, *DRAWN_LATENCIES_S))
        for _ in range(NUM_DRAWN)
    )
    return [
        LabPhase(begin_s=index * DRAWN_S, end_s=(index + 1) * DRAWN_S, network=network)
        for index, network in enumerate(networks)
    ]


def _log_uniform(draw: random.Random, low: float, high: float) -> float:
    """Return a value between `low` and `high`, with two digits."""
    return float(f"{math.exp(draw.uniform(math.log(low), math.log(high))):.2g}")


def _divided(network: StepNetwork, rate_divisor: float) -> StepNetwork:
    assert network.rate_bit_per_s is not None
    return replace(network, rate_bit_per_s=network.rate_bit_per_s / rate_divisor)


def _grid() -> tuple[StepNetwork, ...]:
    return tuple(StepNetwork(rate_bit_per_s=rate, latency_s=one) for rate in GRID_RATES for one in GRID_LATENCIES_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptLabOptions:
    """Options of the bench.

    width, num_layers  of the GPT
    drawn_seed         of the schedule "drawn"; None: without it
    ways               static plans
    grid               networks on which adaptive training is compared with plain DDP
    visit_s, num_visit_steps
                       least seconds and steps over which a step of one way on one network is measured
    settle_s           seconds after a change of the network that are not measured
    grid_s, num_grid_steps
                       least seconds and steps of an adaptive training on one network
    has_goals          False for a short check
    fidelity           of the adaptive training
    """

    num_ranks: int = 4
    width: int = GPTConfig().width
    num_layers: int = GPTConfig().num_layers
    schedules: tuple[str, ...] = ("c1", "c2")
    drawn_seed: int | None = DRAWN_SEED
    epoch_s: float = EPOCH_S
    ways: tuple[LabWay, ...] = STATIC_WAYS
    grid: tuple[StepNetwork, ...] = _grid()
    visit_s: float = 2.0
    num_visit_steps: int = 2
    settle_s: float = 2.0
    grid_s: float = 8.0
    num_grid_steps: int = 24
    has_goals: bool = True
    fidelity: Fidelity = Fidelity.STRICT

    def phases(self) -> Mapping[str, list[LabPhase]]:
        """Return the phases of each schedule."""
        found = {name: phases_of(Schedule.read(name), self.epoch_s, RATE_DIVISOR) for name in self.schedules}
        return found if self.drawn_seed is None else {**found, "drawn": drawn_phases(self.drawn_seed)}

    def networks(self) -> tuple[StepNetwork, ...]:
        """Return the networks of the schedules, each once."""
        return tuple(dict.fromkeys(phase.network for phases in self.phases().values() for phase in phases))

    def job(self) -> dict[str, Any]:
        """Return what the ranks need to know."""
        return {"width": self.width, "num_layers": self.num_layers, "fidelity": self.fidelity}

    def workload(self) -> Workload:
        return lab_workload(self.width, self.num_layers, self.num_ranks)


QUICK = AdaptLabOptions(
    num_ranks=2,
    width=128,
    num_layers=2,
    schedules=("c1",),
    drawn_seed=None,
    epoch_s=0.1,
    ways=(DDP, STATIC_WAYS[2]),
    grid=(StepNetwork(rate_bit_per_s=2e8, latency_s=1e-3),),
    visit_s=0.2,
    settle_s=0.1,
    grid_s=1.0,
    num_grid_steps=6,
    has_goals=False,
)


def lab_workload(width: int, num_layers: int, num_ranks: int) -> Workload:
    """Return the layers of the demo's GPT; its matrices share the compute by their sizes."""
    with torch.device("meta"):
        model = GPT(GPTConfig(width=width, num_layers=num_layers))
    named = list(model.named_parameters())
    # Torch allows no dots in the names of one module's parameters.
    layers = [Layer(name=name.replace(".", "/"), numel=one.numel(), ndim=one.ndim) for name, one in named]
    # Embeddings are looked up, not multiplied.
    macs = [
        one.numel() if one.ndim > 1 and name not in ("embed.weight", "position.weight") else 0 for name, one in named
    ]
    model_layers = ModelDescription(name="demo", layers=tuple(layers), forward_macs=tuple(macs))
    return Workload(
        layers=model_layers.layers,
        shapes=tuple(tuple(one.shape) for _, one in named),
        backward_s=model_layers.step_s(COMPUTE_S),
        num_ranks=num_ranks,
    )
