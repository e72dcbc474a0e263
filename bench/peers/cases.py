"""Ways, networks and models of `python -m bench peers`."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bench.step.cases import ONE_BUCKET_MB, StepNetwork, StepOptions, StepWay
from bench.step.workload import Workload
from cgx_ray.errors import ConfigError
from cgx_ray.units import parse_rate, parse_seconds

# What a way does to the numbers, from the strictest on. "dense": nothing; "half": 16 bits on the wire; "strict": within
# 1 % of dense's loss; "local": ranks train alone between exchanges; "loose": all else that changes them.
Accuracy = Literal["dense", "half", "strict", "local", "loose"]
ACCURACIES: tuple[Accuracy, ...] = ("dense", "half", "strict", "local", "loose")

_QSGD = "qsgd:bits=4,bucket_size=128"
NOOP, DDP, JOINT = (
    StepWay(name="noop", kind="noop"),
    StepWay(name="ddp", kind="ddp"),
    StepWay(name="joint", kind="planned", planner="joint"),
)
# PowerSGD in one bucket: with several it deadlocks on Gloo, see `step.cases`. Of Cupcake's baselines, "buckets" and
# "even" have the size or number of groups that is predicted to be the best.
BY_ACCURACY: Mapping[Accuracy, tuple[StepWay, ...]] = {
    "dense": (DDP, StepWay(name="dense", kind="engine")),
    "half": (
        StepWay(name="fp16_hook", kind="fp16_hook"),
        StepWay(name="bf16_hook", kind="bf16_hook"),
        StepWay(name="bf16", kind="engine", codec="bf16", scheme="allreduce"),
    ),
    "strict": (
        JOINT,
        StepWay(name="qsgd_sra", kind="engine", codec=_QSGD, scheme="sra"),
        StepWay(name="qsgd_allgather", kind="engine", codec=_QSGD, scheme="allgather"),
        StepWay(name="grace_qsgd", kind="grace", codec=_QSGD),
        *(
            StepWay(name=planner, kind="planned", planner=planner)
            for planner in ("layerwise", "buckets", "even", "cupcake", "bytecomp", "hipress")
        ),
    ),
    "local": (
        StepWay(name="local_sgd_4", kind="local_sgd", period=4),
        StepWay(name="local_sgd_16", kind="local_sgd", period=16),
        StepWay(name="torchft_local_sgd_16", kind="torchft_local_sgd", period=16),
        StepWay(name="torchft_diloco_16", kind="torchft_diloco", period=16),
        StepWay(name="qsgd_rounds_8", kind="engine", codec=_QSGD, scheme="sra", period=8),
    ),
    "loose": (
        *(
            StepWay(
                name=f"powersgd_{rank}",
                kind="powersgd_hook",
                codec=f"powersgd:rank={rank}",
                bucket_cap_mb=ONE_BUCKET_MB,
            )
            for rank in (4, 8)
        ),
        StepWay(name="grace_topk", kind="grace", codec="topk:density=0.01"),
        StepWay(name="grace_ef_signsgd", kind="grace", codec="ef_signsgd"),
        StepWay(name="grace_dgc", kind="grace", codec="dgc:density=0.01"),
        # Its bits by layer cost up to 1.6 % more than 4 bits, log 2026-11-23.
        StepWay(name="cgx", kind="planned", planner="cgx"),
        StepWay(name="flexible", kind="planned", planner="flexible"),
        StepWay(name="hitopkcomm", kind="planned", planner="hitopkcomm"),
    ),
}
WAYS: Mapping[str, StepWay] = {way.name: way for way in (NOOP, *(way for ways in BY_ACCURACY.values() for way in ways))}
ACCURACY_OF: Mapping[str, Accuracy] = {way.name: one for one, ways in BY_ACCURACY.items() for way in ways}
_QUICK_WAYS = ("noop", "ddp", "bf16_hook", "grace_qsgd", "qsgd_sra", "cupcake", "local_sgd_4", "joint")

MODELS = ("resnet50", "vgg16", "bert_base", "gpt2")
RATES = ("10mbit", "100mbit", "1gbit", "2.5gbit")
LATENCIES = ("0.1ms", "1ms", "10ms", "50ms")
# Seconds of backward of a model on one rank, before it is divided.
BACKWARD_S = 0.25
NUM_RANKS = 4
# A divided model exchanges its dense gradients in at most so many seconds.
MAX_EXCHANGE_S = 1.5
# Less cannot be emulated, seconds: what a packet takes through a lab's switch.
LEAST_LATENCY_S = 0.05e-3
# Largest divisor for PowerSGD, whose factors shrink with its root only.
MAX_POWERSGD_DIVISOR = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCell:
    """One model on one network, both as they would be, not as they are measured. `latency_s`: one way."""

    model: str
    rate_bit_per_s: float
    latency_s: float

    @classmethod
    def parse(cls, text: str) -> PeerCell:
        """Read "resnet50/100mbit/1ms". Raises ConfigError for another form or model."""
        model, *network = text.split("/")
        if model not in MODELS or len(network) != 2:
            raise ConfigError(
                f"cell {text!r} is not allowed; give MODEL/RATE/LATENCY, such as resnet50/100mbit/1ms, with a model of "
                f"{', '.join(MODELS)}"
            )
        rate, latency = network
        return cls(model=model, rate_bit_per_s=parse_rate("rate", rate), latency_s=parse_seconds("latency", latency))

    @property
    def name(self) -> str:
        return f"{self.model}/{self._network(self.latency_s).name.replace('_', '/')}"

    def divisor(self, num_ranks: int = NUM_RANKS) -> float:
        """Return by how much layers, backward and latency are divided, with two digits, so that dense ends in time."""
        dense = Workload.load(self.model, backward_s=BACKWARD_S, num_ranks=num_ranks)
        link = self._network(self.latency_s).link
        assert link is not None
        divisor = link.seconds(0, dense.link_bytes(DDP)) / MAX_EXCHANGE_S
        digit = 10.0 ** (math.floor(math.log10(divisor)) - 1)
        return max(1.0, float(f"{math.ceil(divisor / digit) * digit:.2g}"))

    def _network(self, latency_s: float) -> StepNetwork:
        return StepNetwork(rate_bit_per_s=self.rate_bit_per_s, latency_s=latency_s)

    def measured_network(self, divisor: float) -> StepNetwork:
        """Return the network of the divided model."""
        return self._network(max(self.latency_s / divisor, min(self.latency_s, LEAST_LATENCY_S)))

    def options(self, divisor: float, *, num_ranks: int, num_rounds: int) -> StepOptions:
        """Return how the divided model is measured."""
        return StepOptions(
            model=self.model,
            backward_s=BACKWARD_S / divisor,
            network=self.measured_network(divisor),
            num_ranks=num_ranks,
            num_rounds=num_rounds,
            divisor=divisor,
        )


ALL_CELLS = tuple(
    PeerCell.parse(f"{model}/{rate}/{latency}") for model in MODELS for rate in RATES for latency in LATENCIES
)
# Each rate with three models, each model with three rates, and every latency.
USUAL_CELLS = tuple(
    map(
        PeerCell.parse,
        (
            "resnet50/10mbit/50ms",
            "resnet50/100mbit/1ms",
            "resnet50/1gbit/0.1ms",
            "vgg16/10mbit/1ms",
            "vgg16/100mbit/10ms",
            "vgg16/2.5gbit/1ms",
            "bert_base/100mbit/50ms",
            "bert_base/1gbit/10ms",
            "bert_base/2.5gbit/0.1ms",
            "gpt2/10mbit/10ms",
            "gpt2/1gbit/1ms",
            "gpt2/2.5gbit/50ms",
        ),
    )
)
_QUICK_CELLS = ("resnet50/100mbit/1ms", "resnet50/1gbit/0.1ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersOptions:
    """Options of the bench.

    ways  names in `WAYS`, among them noop and ddp, which all others are compared with, and joint, which is judged

    Raises ConfigError for a name that is not in `WAYS`.
    """

    cells: Sequence[PeerCell] = USUAL_CELLS
    ways: Sequence[str] = tuple(WAYS)
    num_ranks: int = NUM_RANKS
    num_rounds: int = 5

    def __post_init__(self) -> None:
        if unknown := [name for name in self.ways if name not in WAYS]:
            raise ConfigError(f"way {unknown[0]!r} is not allowed; give names among {', '.join(WAYS)}")


QUICK = PeersOptions(cells=tuple(map(PeerCell.parse, _QUICK_CELLS)), ways=_QUICK_WAYS, num_rounds=3)


def ways_for(names: Sequence[str], divisor: float) -> tuple[tuple[StepWay, ...], dict[str, str]]:
    """Return the ways to measure, in the order of `WAYS`, and for each other one why it is left out."""
    left_out = {
        name: f"its factors shrink with the root of {divisor:g} only, so it would look worse than it is"
        for name in names
        if WAYS[name].kind == "powersgd_hook" and divisor > MAX_POWERSGD_DIVISOR
    }
    if importlib.util.find_spec("torchft") is None:
        reason = "torchft is not installed; pip install torchft"
        left_out |= {name: reason for name in names if WAYS[name].kind.startswith("torchft_")}
    return tuple(way for name, way in WAYS.items() if name in names and name not in left_out), left_out
