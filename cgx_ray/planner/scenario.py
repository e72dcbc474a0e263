"""Best plan for a model on a network that need not exist: the scenario of `cgx-ray plan`, its price and its sweep."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, cast

from cgx_ray.errors import ConfigError
from cgx_ray.plan import BUILT_IN, MAX_INDEXED_NUMEL, MAX_PAYLOAD_BYTES, NONE, CodecSpec
from cgx_ray.planner.by_hand import unless_by_hand
from cgx_ray.planner.candidates import CodecCosts, codec_options
from cgx_ray.planner.cost import Link, Network, check_positive
from cgx_ray.planner.engine_cost import HOST_ENGINE, EngineCost
from cgx_ray.planner.fidelity import RESERVE, Fidelity, codecs_of
from cgx_ray.planner.joint import BestPlan, best_plan, best_round
from cgx_ray.planner.models import ModelDescription
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES
from cgx_ray.planner.prediction import Measured, predict
from cgx_ray.units import format_seconds, parse_count, parse_rate, parse_seconds

# Smallest share of the step that a plan must save. Less is within the error of the cost model, and dense is simpler.
MIN_SAVING = 0.01

# Of the codecs that come with cgx_ray, by `str(CodecSpec)`.
TYPICAL_GAINS: Mapping[str, float] = {
    text: gain for record in BUILT_IN.values() for text, gain in record.typical_gains.items()
}


def typical_gains(fidelity: Fidelity | str = Fidelity.STRICT) -> dict[str, float]:
    """Return the typical gains of the codecs that a run may choose, by default or with another fidelity.

    Without RESERVE, for a loss that is still to fall.
    """
    codecs = [str(codec) for codec in codecs_of(fidelity, CANDIDATE_DENSITIES) if codec not in (NONE, RESERVE)]
    return {codec: TYPICAL_GAINS[codec] for codec in codecs}


# Written by `cgx-ray profile` on one core of an AMD EPYC, the smallest times of four runs.
TYPICAL_PROFILE = Path(__file__).parent / "typical_profile.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A model that trains on a network.

    compute_s    forward and backward of a step, from `compute_time`
    codec_costs, engine
                 as in `Measured`
    gain         compression gain by codec; these are the candidates, over all schemes
    min_gain     codecs with a smaller gain are left out, as in `CGXConfig`
    periods      steps between two exchanges; the best of them is taken
    """

    model: ModelDescription
    network: Network
    compute_s: float
    codec_costs: CodecCosts
    gain: Mapping[str, float]
    min_gain: float
    periods: tuple[int, ...] = (1,)
    engine: EngineCost = HOST_ENGINE

    def solve(self) -> BestPlan:
        """Return the plan that a run takes, or dense if that is compute-bound or the plan saves less than `MIN_SAVING`.

        Raises ConfigError if the scenario cannot be planned.
        """
        codecs = [CodecSpec.parse(codec) for codec in self.gain]
        measured = Measured(
            layers=self.model.layers,
            backward_s=self.model.step_s(self.compute_s),
            network=self.network,
            codec_costs=self.codec_costs,
            engine=self.engine,
            encodes_on="device" if self.engine.codes_rows else "thread",
            gain={str(codec): gain for codec, gain in zip(codecs, self.gain.values(), strict=True)},
        )
        options = codec_options((NONE, *codecs))
        found = best_plan(measured, options, min_gain=self.min_gain)
        answer = unless_by_hand(
            found, measured, options, lambda groups: predict(measured, groups).score, min_gain=self.min_gain
        )
        alone = [one for one in self.periods if one > 1]
        rounds = [best_round(measured, options, one, min_gain=self.min_gain) for one in alone]
        best = min([answer.best] * (1 in self.periods) + rounds, key=lambda step: step.score)
        if best is not answer.best:
            answer = replace(answer, best=best, gap=max(0.0, 1 - (1 - answer.gap) * answer.best.score / best.score))
        saving = 1 - 1 / answer.speedup
        if not answer.is_compute_bound and saving >= MIN_SAVING:
            return answer
        # The gap is now that of dense: the saving of the plan, and the share of the rest that a better plan could save.
        return replace(answer, best=answer.dense, gap=1 - (1 - answer.gap) * (1 - saving))

    @property
    def too_small(self) -> tuple[str, ...]:
        """Codecs that are left out because their messages have no room for the largest layer."""
        numel = max((layer.numel for layer in self.model.layers), default=0)
        codecs = (CodecSpec.parse(codec) for codec in self.gain)
        return tuple(
            codec.describe()
            for codec in codecs
            if codec.payload_bytes(numel) > MAX_PAYLOAD_BYTES
            or (codec.density is not None and numel > MAX_INDEXED_NUMEL)
        )

    def swept(self, sweep: Sweep, value: float) -> Scenario:
        """Return this scenario with one property of its network changed."""
        return replace(self, network=sweep.apply(self.network, value))


def make_network(num_workers: int, ranks_per_node: int, between: Link, inside: Link) -> Network:
    """Return a network with nodes of `ranks_per_node` workers, or one node if there are not more workers."""
    if num_workers < 1 or ranks_per_node < 1:
        raise ConfigError(f"{num_workers} workers, {ranks_per_node} per node, are not allowed; give 1 or more of both")
    ranks_per_node = min(ranks_per_node, num_workers)
    if num_workers % ranks_per_node:
        raise ConfigError(f"{num_workers} workers do not fill nodes of {ranks_per_node}; give a multiple of that")
    return Network(
        num_nodes=num_workers // ranks_per_node, between=between, ranks_per_node=ranks_per_node, inside=inside
    )


def verdict(answer: BestPlan, num_workers: int) -> str:
    """Return the answer in one sentence."""
    dense, best = answer.dense, answer.best
    dense_step, best_step = format_seconds(dense.step_s), format_seconds(best.step_s)
    if num_workers == 1:
        return "One worker exchanges no gradients: there is nothing to plan."
    if answer.is_compute_bound:
        return (
            f"Your training is compute-bound, compression will not help: of a dense step's {dense_step} "
            f"{dense.compute_s / dense.step_s:.0%} is compute."
        )
    if best.groups == dense.groups:
        return (
            f"No plan that a run takes is {MIN_SAVING:.0%} better than dense here, which is bound by {dense.bound_by}."
        )
    assert best.efficiency is not None
    kept = f"; {best.describe_kept()}" if best.efficiency < 1 else ""
    every = f", with an exchange every {best.period} steps" if best.period > 1 else ""
    return (
        f"{dense.step_s / best.step_s:.2f}x faster than dense, which is bound by {dense.bound_by}: steps of "
        f"{best_step} instead of {dense_step}{every}{kept}."
    )


class Epoch(NamedTuple):
    """Duration and price of one epoch, all workers together."""

    hours: float
    usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Price of training.

    usd_per_hour  price of one worker
    batch         samples per worker and step
    samples       samples per epoch; None if nobody asked
    """

    usd_per_hour: float
    batch: int
    samples: int | None

    def __post_init__(self) -> None:
        check_positive("price", self.usd_per_hour)
        if self.samples is not None:
            check_positive("samples per epoch", self.samples)

    def epoch(self, step_s: float, num_workers: int) -> Epoch:
        """Return the duration and price of an epoch with steps of `step_s`. The last step may have a smaller batch."""
        assert self.samples is not None
        hours = math.ceil(self.samples / (self.batch * num_workers)) * step_s / 3600
        return Epoch(hours, hours * num_workers * self.usd_per_hour)


SweepName = Literal["bandwidth", "latency", "workers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Ascending values of one property of the network: Gbit/s, one-way milliseconds, or workers.

    ranks_per_node  for a sweep of workers: replaces that of the network, which may have fewer workers
    """

    name: SweepName
    values: tuple[float, ...]
    ranks_per_node: int = 1

    @property
    def unit(self) -> str:
        return {"bandwidth": "Gbit/s", "latency": "ms", "workers": "workers"}[self.name]

    def apply(self, network: Network, value: float) -> Network:
        """Return `network` with this value; bandwidth and latency are those of the links between nodes."""
        between = network.between
        match self.name:
            case "bandwidth":
                return replace(network, between=replace(between, beta_s_per_byte=8e-9 / value))
            case "latency":
                return replace(network, between=replace(between, alpha_s=value / 1e3))
            case "workers":
                L = self.ranks_per_node
                return replace(network, num_nodes=round(value) // L, ranks_per_node=L)


def parse_sweep(text: str, ranks_per_node: int = 1, num_points: int = 25) -> Sweep:
    """Read `"bandwidth=0.1..25gbps"`, `"latency=50us..20ms"` or `"workers=2..1024"`; return log-spaced values.

    Both ends are included. The first value may omit its unit if it is that of the second. Workers are rounded to
    multiples of `ranks_per_node`.
    """
    match = re.fullmatch(r"(bandwidth|latency|workers)=(.+?)\.\.(.+)", text.replace(" ", ""))
    if match is None:
        raise ConfigError(
            f"sweep {text!r} is not allowed; give bandwidth=0.1..25gbps, latency=50us..20ms or workers=2..1024"
        )
    name, low, high = match.groups()
    if name != "workers" and not re.search("[a-z]", low, re.IGNORECASE):
        low += high.lstrip("0123456789.")
    read: Mapping[str, Callable[[str], float]] = {
        "bandwidth": lambda value: parse_rate("bandwidth", value) / 1e9,
        "latency": lambda value: 1e3 * parse_seconds("latency", value),
        "workers": lambda value: parse_count("workers", value),
    }
    start, end = read[name](low), read[name](high)
    if not 0 < start < end:
        raise ConfigError(f"sweep {text!r} does not rise from above 0; give the lower value first")
    ratio = (end / start) ** (1 / (num_points - 1))
    values = [start * ratio**index for index in range(num_points - 1)] + [end]
    if name == "workers":
        L = ranks_per_node
        values = sorted({L * max(1, round(value / L)) for value in values})
        if len(values) < 2:
            raise ConfigError(f"sweep {text!r} has one value that fills nodes of {L}; give a wider one")
    return Sweep(name=cast(SweepName, name), values=tuple(values), ranks_per_node=ranks_per_node)
