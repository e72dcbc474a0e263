"""Schedules of links, compute and errors on which `python -m bench adapt` runs the control loop, and their goals."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from bench.adapt.simulate import Schedule
from bench.shared.simulated_cluster import WORLD, ClusterErrors, ClusterState
from cgx_ray.plan import NONE, CodecSpec, Option
from cgx_ray.planner.candidates import CodecCost, candidate_codecs, candidate_options
from cgx_ray.planner.cost import Network
from cgx_ray.planner.joint import best_plan
from cgx_ray.planner.models import ModelDescription, load_model
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES
from cgx_ray.planner.prediction import Measured
from cgx_ray.planner.scenario import TYPICAL_GAINS

MODEL = "resnet18"
# A busy core, so slow that each of dense, bf16 and qsgd is the best somewhere between 0.1 and 10 Gbit/s.
COST = CodecCost(encode_a_s=1e-4, encode_b_s_per_element=1e-8, decode_a_s=2e-5, decode_b_s_per_element=4e-9)
COST_BF16 = CodecCost(encode_a_s=1e-4, encode_b_s_per_element=2e-9, decode_a_s=2e-5, decode_b_s_per_element=1.3e-9)
GAIN = {str(codec): TYPICAL_GAINS[str(codec)] for codec in candidate_codecs(CANDIDATE_DENSITIES) if codec != NONE}
# The moment of the only change in most cases, seconds.
CHANGE_S = 60.0
BASE = ClusterState(gbps=1.0)
NUM_SEEDS = 10


def _usual_errors(seed: int) -> ClusterErrors:
    return ClusterErrors()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptCase:
    """A training to simulate.

    errors            by seed
    calibrated_factor calibrated over true time of a codec, by seed and codec
    judged_from_step  steps before it count for answers and switches only
    goals             by the name of a number
    answer            goal: seconds or steps until a change is answered; either suffices
    by_hand           plans are judged by those that users write, one option in DDP's groups, and not by the best ones
    slow_stretch      goal: longest period, seconds or steps, under plans more than 3 % slower than dense
    """

    name: str
    schedule: Schedule
    seconds: float = 180.0
    options: tuple[Option, ...] = candidate_options(CANDIDATE_DENSITIES)
    min_gain: float = 0.8
    gain: Mapping[str, float] = field(default_factory=lambda: dict(GAIN))
    errors: Callable[[int], ClusterErrors] = _usual_errors
    calibrated_factor: Callable[[int, str], float] | None = None
    judged_from_step: int = 0
    num_seeds: int = 3
    goals: Mapping[str, str] = field(default_factory=dict)
    answer: tuple[float, int] | None = None
    slow_stretch: tuple[float, int] | None = None
    by_hand: bool = False

    @property
    def model(self) -> ModelDescription:
        return _model()

    @property
    def codecs(self) -> tuple[CodecSpec, ...]:
        return tuple(dict.fromkeys(option.codec for option in self.options))

    @property
    def costs(self) -> dict[str, CodecCost]:
        return {str(codec): _cost(codec) for codec in self.codecs if codec.name != "none"}

    def calibrated_costs(self, seed: int) -> dict[str, CodecCost]:
        """Return the calibrated codec times that the loop gets."""
        if self.calibrated_factor is None:
            return self.costs
        return {name: cost.slowed(self.calibrated_factor(seed, name)) for name, cost in self.costs.items()}


def _cost(codec: CodecSpec) -> CodecCost:
    return COST_BF16 if codec.name == "bf16" else COST


@cache
def _model() -> ModelDescription:
    return load_model(MODEL)


def _then(before: ClusterState, after: ClusterState, at_s: float = CHANGE_S) -> Schedule:
    return lambda time_s: before if time_s < at_s else after


def _between(usual: ClusterState, other: ClusterState, begin_s: float, end_s: float) -> Schedule:
    return lambda time_s: other if begin_s <= time_s < end_s else usual


def _flapping(a: ClusterState, b: ClusterState, period_s: float) -> Schedule:
    return lambda time_s: a if int(time_s / period_s) % 2 == 0 else b


def _sine(low_gbps: float, high_gbps: float, period_s: float) -> Schedule:
    """Return a link whose rate is a sine on a logarithmic scale, in 24 levels per period."""

    def state(time_s: float) -> ClusterState:
        phase = round(24 * time_s / period_s) % 24 / 24
        share = 0.5 + 0.5 * math.cos(2 * math.pi * phase)
        return replace(BASE, gbps=round(low_gbps * (high_gbps / low_gbps) ** share, 6))

    return state


def _visits(networks: Sequence[ClusterState], seconds: float) -> Schedule:
    """Return each network for `seconds`, in turn."""
    return lambda time_s: networks[int(time_s / seconds) % len(networks)]


def _busy(seed: int) -> ClusterErrors:
    """Return errors as in the lab, where ranks share processors: most plans take 10 to 60 % longer than predicted."""
    return ClusterErrors(unknown=0.25, step_noise=0.1)


def _busy_codec(seed: int, codec: str) -> float:
    return math.exp(random.Random(f"{seed} {codec}").gauss(0, 0.5))


def _miscalibrated(seed: int, codec: str) -> float:
    """Return a factor between 0.1 and 300, uniform on a logarithmic scale."""
    return float(10 ** random.Random(f"{seed} {codec}").uniform(-1, math.log10(300)))


def _barely_slower(state: ClusterState, slowdown: float) -> Callable[[int], ClusterErrors]:
    """Return errors under which the plan that the model calls best takes `slowdown` times a dense step."""

    def errors(seed: int) -> ClusterErrors:
        model = _model()
        options = candidate_options(CANDIDATE_DENSITIES)
        costs = {str(option.codec): _cost(option.codec) for option in options if option.codec.name != "none"}
        found = best_plan(
            Measured(
                layers=model.layers,
                backward_s=model.step_s(state.compute_s),
                network=Network.flat(WORLD, state.link),
                codec_costs=costs,
                gain=TYPICAL_GAINS,
            ),
            options,
            min_gain=0.8,
        )
        factor = slowdown * found.speedup
        codecs = {group.option.codec for group in found.best.groups if group.option.codec.name != "none"}
        return ClusterErrors(bias={option: factor for option in options if option.codec in codecs})

    return errors


# Plans without loss in better groups than DDP's are 15 % faster than DDP.
_FAST = replace(BASE, gbps=6.0)
# bf16 is 1.4 times as fast as dense.
_MODERATE = replace(BASE, gbps=3.0)
_SLOW = replace(BASE, gbps=0.2)
# A model's compute in the lab.
_BUSY = replace(BASE, compute_s=0.36)
_TOP_K = candidate_options((0.01,))

CASES = (
    AdaptCase(name="drop", schedule=_then(_FAST, _SLOW), answer=(5, 10)),
    AdaptCase(
        name="recovery",
        schedule=_then(replace(BASE, gbps=0.1), _FAST),
        options=tuple(option for option in _TOP_K if option.codec.name in ("none", "topk")),
        gain={"topk:density=0.01": 0.9},
        answer=(3, 20),
    ),
    AdaptCase(name="sine", schedule=_sine(0.1, 5.0, 120.0), seconds=360.0, goals={"regret": "<= 0.1"}),
    AdaptCase(
        name="flapping",
        schedule=_flapping(_FAST, replace(BASE, gbps=0.3), 10.0),
        seconds=300.0,
        # Until then it has seen too few changes to know that they go back and forth.
        judged_from_step=150,
        # A percent for other groupings of the same options.
        goals={"switches": "<= 3", "over_best_static": "<= 1.01"},
    ),
    AdaptCase(name="latency", schedule=_then(_FAST, replace(_FAST, latency_ms=30.0)), answer=(5, 10)),
    AdaptCase(name="slow_node", schedule=_between(_MODERATE, replace(_MODERATE, slow_link=0.1), 60.0, 120.0)),
    AdaptCase(
        name="less_compute",
        schedule=_then(replace(BASE, compute_s=2.0), replace(BASE, compute_s=0.2)),
        answer=(5, 10),
    ),
    AdaptCase(
        name="more_compute",
        schedule=_then(replace(BASE, gbps=1.0), replace(BASE, gbps=1.0, compute_s=2.0)),
        answer=(5, 10),
    ),
    AdaptCase(
        name="noise",
        schedule=lambda time_s: _FAST,
        errors=lambda seed: ClusterErrors(step_noise=0.2),
        seconds=300.0,
        num_seeds=NUM_SEEDS,
        goals={"false_disables": "== 0", "slower_than_dense": "<= 0.03"},
    ),
    AdaptCase(
        name="cold_start",
        schedule=lambda time_s: _FAST,
        errors=lambda seed: ClusterErrors(cold_steps=10.0),
        num_seeds=NUM_SEEDS,
        goals={"false_disables": "== 0"},
    ),
    AdaptCase(
        name="bad_plan",
        schedule=lambda time_s: _MODERATE,
        errors=_barely_slower(_MODERATE, 1.1),
        num_seeds=NUM_SEEDS,
        slow_stretch=(10, 20),
    ),
    AdaptCase(
        name="falling_gain",
        schedule=_then(_SLOW, replace(_SLOW, gain=(("topk:density=0.1", 0.5), ("qsgd:bits=4,bucket_size=128", 0.7)))),
    ),
    AdaptCase(
        name="dead_agent",
        schedule=lambda time_s: replace(_FAST if time_s < 70 else _SLOW, is_silent=60 <= time_s < 90),
        answer=(5, 10),
    ),
    AdaptCase(
        name="lost_agent",
        schedule=lambda time_s: replace(_FAST if time_s < 70 else _SLOW, is_silent=time_s >= 60),
        answer=(5, 10),
        goals={"regret": "<= 0.1"},
    ),
    AdaptCase(
        name="wrong_costs",
        schedule=lambda time_s: replace(BASE, gbps=1.0),
        calibrated_factor=_miscalibrated,
        judged_from_step=200,
        num_seeds=NUM_SEEDS,
        goals={"regret": "<= 0.05"},
    ),
    AdaptCase(
        name="shared_cores",
        # Those of C1 in the lab, at rates for this model's bytes.
        schedule=_visits(
            (
                replace(_BUSY, gbps=2.4, latency_ms=1.0),
                replace(_BUSY, gbps=0.1, latency_ms=1.0),
                replace(_BUSY, gbps=0.1, latency_ms=50.0),
                replace(_BUSY, gbps=2.4, latency_ms=50.0),
            ),
            20.0,
        ),
        seconds=80.0,
        errors=_busy,
        calibrated_factor=_busy_codec,
        num_seeds=NUM_SEEDS,
        by_hand=True,
        goals={"over_best_static": "<= 1.05", "false_disables": "== 0"},
    ),
    AdaptCase(
        name="shared_cores_fast",
        schedule=lambda time_s: replace(_BUSY, gbps=5.0, latency_ms=0.1),
        seconds=60.0,
        errors=_busy,
        calibrated_factor=_busy_codec,
        num_seeds=NUM_SEEDS,
        by_hand=True,
        goals={"over_best_static": "<= 1.1", "false_disables": "== 0"},
    ),
)
