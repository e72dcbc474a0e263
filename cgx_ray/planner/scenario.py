"""What a plan would make of a model on a network that is not there: `cgx-ray plan`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, cast

from cgx_ray.errors import ConfigError
from cgx_ray.plan import MAX_INDEXED_NUMEL, MAX_PAYLOAD_BYTES, NONE, CodecSpec
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.joint import BestPlan, best_plan
from cgx_ray.planner.models import ModelDescription
from cgx_ray.planner.options import CodecCost, codec_options
from cgx_ray.planner.prediction import Measured
from cgx_ray.units import format_seconds, parse_count, parse_rate, parse_seconds

# Dense 16-bit tensor TFLOP/s with float32 sums, from the data sheets.
PEAK_TFLOPS = {
    "a10": 125, "a100": 312, "h100": 989, "h200": 989, "l4": 121, "l40s": 362, "rtx3090": 71, "rtx4090": 165, "t4": 65,
    "v100": 125,
}  # fmt: skip
DEFAULT_GPU = "v100"
# Of the peak, what training reaches: 0.2 (convolutions) to 0.5 (large transformers) in published runs.
UTILISATION = 0.3

# A plan that saves less than this share is within what the model of costs is wrong by: dense is simpler.
MIN_SAVING = 0.01

# Medians over the 28 decisions of five `cgx-ray demo` runs, a GPT of 4.9 M parameters in its first 48 steps.
TYPICAL_GAINS: Mapping[str, float] = {
    "bf16": 1.0,
    "qsgd:bits=4,bucket_size=128": 0.987,
    "topk:density=0.1": 0.87,
    "topk:density=0.033": 0.72,
    "topk:density=0.011": 0.53,
    "topk:density=0.004": 0.38,
    "topk:density=0.001": 0.22,
}

# Written by `cgx-ray profile`: one core of an AMD EPYC, the least times of four runs.
TYPICAL_PROFILE = Path(__file__).parent / "typical_profile.json"


def compute_time(
    model: ModelDescription,
    *,
    batch: int,
    step_s: float | None = None,
    samples_per_s: float | None = None,
    gpu: str | None = None,
) -> tuple[float, str]:
    """Seconds of forward and backward of a worker's step, and a sentence that says where they come from.

    At most one of these may be given, else what was measured is taken, else `DEFAULT_GPU`; `batch` is the samples of a
    worker's step:

    step_s         the seconds themselves
    samples_per_s  what one worker trains in a second, without any communication
    gpu            name in `PEAK_TFLOPS`: three passes of two operations a multiply-add at `UTILISATION` of the peak
    """
    named = {"step time": step_s, "throughput": samples_per_s, "GPU": gpu}
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} both say how long a step computes; give one of them")
    if batch < 1:
        raise ConfigError(f"batch {batch!r} is not allowed; give the samples of a worker's step, 1 or more")
    if step_s is not None:
        return _positive("step time", step_s), "compute time of a step as given"
    if samples_per_s is not None:
        seconds = batch / _positive("throughput", samples_per_s)
        return seconds, f"{batch} samples a worker and step at {samples_per_s:g} samples/s"
    if gpu is None and model.measured_s is not None:
        return model.measured_s, f"measured times of {model.name}"
    name = (gpu or DEFAULT_GPU).lower()
    if name not in PEAK_TFLOPS:
        raise ConfigError(
            f"no GPU {gpu!r}; known: {', '.join(PEAK_TFLOPS)}; or give the compute time or throughput of a step"
        )
    if not model.forward_macs:
        raise ConfigError(
            f"model {model.name} has measured times and no multiply-adds, so what GPU {name} takes is unknown; leave "
            "it out, or give the compute time or throughput of a step"
        )
    operations = 6 * sum(model.forward_macs) * batch
    seconds = operations / (PEAK_TFLOPS[name] * 1e12 * UTILISATION)
    return seconds, f"{batch} samples a worker and step, {name} at {UTILISATION:.0%} of {PEAK_TFLOPS[name]} TFLOP/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A model that trains on a network.

    compute_s    forward and backward of a step, as `compute_time` gives it
    codec_costs  by codec, as in `Measured`
    gain         compression gain by codec; these codecs may be chosen, over all schemes
    min_gain     codecs that keep less are left out, as in `CGXConfig`
    """

    model: ModelDescription
    network: Network
    compute_s: float
    codec_costs: Mapping[str, CodecCost]
    gain: Mapping[str, float]
    min_gain: float

    def solve(self) -> BestPlan:
        """The best plan, or dense if that is compute-bound or the best one saves less than `MIN_SAVING`.

        Raises ConfigError for what cannot be planned.
        """
        codecs = [CodecSpec.parse(codec) for codec in self.gain]
        measured = Measured(
            layers=self.model.layers,
            backward_s=self.model.step_s(self.compute_s),
            network=self.network,
            codec_costs=self.codec_costs,
            gain={str(codec): gain for codec, gain in zip(codecs, self.gain.values(), strict=True)},
        )
        answer = best_plan(measured, codec_options((NONE, *codecs)), min_gain=self.min_gain)
        saving = 1 - 1 / answer.speedup
        if not answer.is_compute_bound and saving >= MIN_SAVING:
            return answer
        # The gap, now from dense: what the plan saves, and of the rest what a better one could.
        return replace(answer, best=answer.dense, gap=1 - (1 - answer.gap) * (1 - saving))

    @property
    def too_small(self) -> tuple[str, ...]:
        """Codecs whose messages have no room for the largest layer, which are left out."""
        numel = max((layer.numel for layer in self.model.layers), default=0)
        codecs = (CodecSpec.parse(codec) for codec in self.gain)
        return tuple(
            str(codec)
            for codec in codecs
            if codec.payload_bytes(numel) > MAX_PAYLOAD_BYTES
            or (codec.density is not None and numel > MAX_INDEXED_NUMEL)
        )

    def swept(self, sweep: Sweep, value: float) -> Scenario:
        """This scenario with one property of its network changed."""
        return replace(self, network=sweep.apply(self.network, value))


def make_network(num_workers: int, ranks_per_node: int, between: Link, inside: Link) -> Network:
    """Workers on nodes of `ranks_per_node`; on one node if they are no more than that."""
    if num_workers < 1 or ranks_per_node < 1:
        raise ConfigError(f"{num_workers} workers, {ranks_per_node} a node, are not allowed; give 1 or more of both")
    ranks_per_node = min(ranks_per_node, num_workers)
    if num_workers % ranks_per_node:
        raise ConfigError(f"{num_workers} workers do not fill nodes of {ranks_per_node}; give a multiple of that")
    return Network(
        num_nodes=num_workers // ranks_per_node, between=between, ranks_per_node=ranks_per_node, inside=inside
    )


def verdict(answer: BestPlan, num_workers: int) -> str:
    """The answer in one sentence."""
    dense, best = answer.dense, answer.best
    dense_step, best_step = format_seconds(dense.step_s), format_seconds(best.step_s)
    if num_workers == 1:
        return "One worker has nobody to exchange gradients with: there is nothing to plan."
    if answer.is_compute_bound:
        return (
            f"Your training is compute-bound, compression will not help: of a dense step's {dense_step} "
            f"{dense.compute_s / dense.step_s:.0%} is compute."
        )
    if best.groups == dense.groups:
        return f"Nothing is {MIN_SAVING:.0%} better than dense here, though its step is bound by {dense.bound_by}."
    assert best.efficiency is not None
    kept = f", and each keeps {best.efficiency:.1%} of its progress" if best.efficiency < 1 else ""
    return (
        f"{answer.speedup:.2f}x faster than dense, which is bound by {dense.bound_by}: steps of {best_step} "
        f"instead of {dense_step}{kept}."
    )


class Epoch(NamedTuple):
    """Of all workers together."""

    hours: float
    usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What training costs.

    usd_per_hour  of one worker
    batch         samples of a worker's step
    samples       of an epoch; None if nobody asked
    """

    usd_per_hour: float
    batch: int
    samples: int | None

    def __post_init__(self) -> None:
        _positive("price", self.usd_per_hour)
        if self.samples is not None:
            _positive("samples per epoch", self.samples)

    def epoch(self, step_s: float, num_workers: int) -> Epoch:
        """Of steps of `step_s`; the last one may not be full."""
        assert self.samples is not None
        hours = math.ceil(self.samples / (self.batch * num_workers)) * step_s / 3600
        return Epoch(hours, hours * num_workers * self.usd_per_hour)


SweepName = Literal["bandwidth", "latency", "workers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Values of one property of the network, ascending: Gbit/s, milliseconds one way, or workers.

    ranks_per_node  of swept workers, which may be more than the workers of the network that is changed
    """

    name: SweepName
    values: tuple[float, ...]
    ranks_per_node: int = 1

    @property
    def unit(self) -> str:
        return {"bandwidth": "Gbit/s", "latency": "ms", "workers": "workers"}[self.name]

    def apply(self, network: Network, value: float) -> Network:
        """`network` with this value, that of the links between nodes."""
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
    """`"bandwidth=0.1..25gbps"`, `"latency=50us..20ms"` or `"workers=2..1024"`: log-spaced, ends included.

    The first value may leave its unit to the second. Workers are multiples of `ranks_per_node`.
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


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} {value!r} is not allowed; give more than 0")
    return value
