"""Options of `cgx-ray plan`, read into a scenario, with the assumptions for options that are not given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cgx_ray.commands.collective import parse_link
from cgx_ray.errors import ConfigError
from cgx_ray.plan import CodecSpec, check_period, spoken
from cgx_ray.planner.candidates import efficiency
from cgx_ray.planner.cost import Link, check_positive
from cgx_ray.planner.fidelity import PERIODS, period_loss
from cgx_ray.planner.models import ModelDescription
from cgx_ray.planner.profile import Profile, load_profile
from cgx_ray.planner.scenario import (
    TYPICAL_PROFILE,
    Price,
    Scenario,
    Sweep,
    make_network,
    parse_sweep,
    typical_gains,
)
from cgx_ray.units import format_count, parse_rate, parse_seconds

# Dense 16-bit tensor TFLOP/s with float32 sums, from the data sheets.
PEAK_TFLOPS = {
    "a10": 125, "a100": 312, "h100": 989, "h200": 989, "l4": 121, "l40s": 362, "rtx3090": 71, "rtx4090": 165, "t4": 65,
    "v100": 125,
}  # fmt: skip
# Share of the peak that training reaches; published runs have 0.2 (convolutions) to 0.5 (large transformers).
UTILISATION = 0.3


# Links between ranks of a node that nobody described: GPUs on one bus, without NVLink.
INSIDE_LATENCY, INSIDE_BANDWIDTH = "50us", "16gbps"


def compute_time(
    model: ModelDescription,
    *,
    batch: int,
    step_s: float | None = None,
    samples_per_s: float | None = None,
    gpu: str | None = None,
) -> tuple[float, str]:
    """Return the seconds of forward and backward of one worker's step, and a sentence that says where they come from.

    `batch` is the number of samples per worker and step. Give one of the others, or none for a model whose times were
    measured.

    step_s         the seconds themselves
    samples_per_s  samples that one worker trains per second, without communication
    gpu            name in `PEAK_TFLOPS`: forward and backward are three passes of two operations per multiply-add, at
                   `UTILISATION` of the peak
    """
    named = {"step time": step_s, "throughput": samples_per_s, "GPU": gpu}
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} both say how long a step computes; give one of them")
    if batch < 1:
        raise ConfigError(f"batch {batch!r} is not allowed; give the samples of a worker's step, 1 or more")
    if step_s is not None:
        return check_positive("step time", step_s), "compute time of a step as given"
    if samples_per_s is not None:
        seconds = batch / check_positive("throughput", samples_per_s)
        return seconds, f"{batch} samples per worker and step at {samples_per_s:g} samples/s"
    if gpu is None and model.measured_s is not None:
        return model.measured_s, f"measured times of {model.name}"
    if gpu is None:
        raise ConfigError(
            f"how long a step of {model.name} computes is unknown; give --step-time 120ms, --throughput, --gpu a100, "
            "or as --model a file of `cgx-ray profile-model`"
        )
    name = gpu.lower()
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
    return seconds, f"{batch} samples per worker and step, {name} at {UTILISATION:.0%} of {PEAK_TFLOPS[name]} TFLOP/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Scenario to plan for, and the assumptions in it, in words."""

    scenario: Scenario
    assumptions: tuple[str, ...]
    price: Price | None
    sweep: Sweep | None


def read_question(
    *,
    model: ModelDescription,
    workers: int,
    latency: str | None,
    bandwidth: str | None,
    ranks_per_node: int,
    inside_latency: str,
    inside_bandwidth: str,
    step_time: str | None,
    throughput: float | None,
    gpu: str | None,
    batch: int,
    profile: Path | None,
    fidelity: str,
    gains: Sequence[str],
    min_gain: float,
    period: str,
    price: float | None,
    samples_per_epoch: int | None,
    sweep: str | None,
) -> Question:
    """Read the options of `cgx-ray plan`. Raises ConfigError for a value that is not allowed."""
    measured = load_profile(profile or TYPICAL_PROFILE)
    inside = parse_link(inside_latency, inside_bandwidth)
    network = make_network(workers, ranks_per_node, _between(latency, bandwidth, measured.link), inside)
    compute_s, compute_from = compute_time(
        model,
        step_s=None if step_time is None else parse_seconds("step time", step_time),
        samples_per_s=throughput,
        gpu=gpu,
        batch=batch,
    )
    given = dict(_read_gain(text) for text in gains)
    scenario = Scenario(
        model=model,
        network=network,
        compute_s=compute_s,
        # A run sends dense gradients from where they lie, while the profile's "none" copies them.
        codec_costs={codec: cost for codec, cost in measured.codec_costs.items() if codec != "none"},
        gain={**typical_gains(fidelity), **given},
        min_gain=min_gain,
        periods=_read_periods(period),
        engine=measured.engine,
    )
    swept = None if sweep is None else parse_sweep(sweep, ranks_per_node)
    nodes = ranks_per_node if swept is not None and swept.name == "workers" else network.ranks_per_node
    assumptions = [f"{compute_from}: {1e3 * compute_s:.4g} ms of forward and backward"]
    if samples_per_epoch is not None and (step_time is not None or compute_s == model.measured_s):
        assumptions.append(f"{batch} samples per worker and step (--batch)")
    assumptions += _about_compute(model, gpu, measured)
    if nodes > 1:
        assumptions.append(f"nodes of {nodes}, inside {inside.bandwidth_gbps:g} Gbit/s and {1e3 * inside.alpha_s:g} ms")
    return Question(
        scenario=scenario,
        assumptions=(*assumptions, *_about_codecs(scenario, measured, given)),
        price=_read_price(price, batch, samples_per_epoch),
        sweep=swept,
    )


def _read_price(price: float | None, batch: int, samples: int | None) -> Price | None:
    if samples is not None and price is None:
        raise ConfigError("--samples-per-epoch is for the price of an epoch; give --price too")
    return None if price is None else Price(usd_per_hour=price, batch=batch, samples=samples)


def _read_periods(text: str) -> tuple[int, ...]:
    """Return the periods to choose from."""
    if text == "auto":
        return (1, *PERIODS)
    try:
        period = int(text)
    except ValueError:
        raise ConfigError(f"--period {text!r} is not allowed; give a number of steps, or auto") from None
    check_period(period)
    return (period,)


def _about_compute(model: ModelDescription, gpu: str | None, measured: Profile) -> list[str]:
    """Return the assumptions about what was not measured, or is not in the model."""
    # The profile of a GPU has what groups cost there, with dense sums by NCCL.
    is_gpu = measured.engine.codes_rows
    nccl = "" if is_gpu else ", and no NCCL"
    assumptions = [f"no copies between a GPU and its host{nccl}: {'not' if is_gpu else 'neither is'} in the model"]
    if gpu is not None:
        assumptions.append(f"nothing was measured on a GPU: the speed of {gpu} is from its data sheet")
    if not model.ready_s:
        assumptions.append("a layer's share of backward is that of multiply-adds; `cgx-ray profile-model` measures")
    return assumptions


def _about_codecs(scenario: Scenario, measured: Profile, given: Mapping[str, float]) -> list[str]:
    """Return the assumptions about codecs. `given`: gains that the user gave."""
    threads = format_count(measured.threads, "thread")
    kept = ", ".join(f"{spoken(codec)} {gain:.3g}" for codec, gain in scenario.gain.items() if codec not in given)
    assumptions = [
        f"codec times of {measured.device}, {threads}; --profile takes those of your machine",
        f"codecs keep as much of a gradient as of a small GPT's ({kept}); --gain takes what yours keep",
    ]
    kept_of = {codec: efficiency(gain, CodecSpec.parse(codec)) for codec, gain in scenario.gain.items()}
    dropped = [codec for codec, share in kept_of.items() if share < scenario.min_gain]
    if dropped:
        assumptions.append(
            f"{', '.join(map(spoken, dropped))} left out: they keep less than {scenario.min_gain:g} (--min-gain)"
        )
    if scenario.periods != (1,):
        replicas = scenario.network.num_workers
        lost = ", ".join(f"{period_loss(period, replicas) - 1:.1%} every {period}" for period in PERIODS)
        assumptions.append(
            f"exchanges of {replicas} replicas every few steps cost as much loss as a small GPT's ({lost} steps): see "
            "docs/period.md; a run chooses them with fidelity 'balanced', up to 5 % of loss, or 'fast'"
        )
    if scenario.too_small:
        largest = max(scenario.model.layers, key=lambda layer: layer.numel)
        assumptions.append(
            f"{', '.join(scenario.too_small)} left out: a message has room for 4 GiB, indices for 2^31 elements, and "
            f"{largest.name} has {largest.numel:,}"
        )
    return assumptions


def _between(latency: str | None, bandwidth: str | None, measured: Link | None) -> Link:
    """Return the link as given; what is not given comes from the profile."""
    if latency is not None and bandwidth is not None:
        return parse_link(latency, bandwidth)
    if measured is None:
        raise ConfigError(
            "the network is unknown; give --latency 4ms and --bandwidth 10gbps, or a --profile with a link"
        )
    return Link.from_rates(
        bandwidth_gbps=measured.bandwidth_gbps if bandwidth is None else parse_rate("bandwidth", bandwidth) / 1e9,
        latency_ms=1e3 * (measured.alpha_s if latency is None else parse_seconds("latency", latency)),
    )


def _read_gain(text: str) -> tuple[str, float]:
    codec, _, share = text.rpartition("=")
    try:
        name, kept = str(CodecSpec.parse(codec)), float(share)
    except ValueError as error:  # ConfigError is one
        raise ConfigError(
            f"--gain {text!r} is not allowed ({error}); give a codec and a share, such as qsgd:bits=2=0.9"
        ) from error
    if not 0 < kept <= 1:
        raise ConfigError(f"--gain {text!r} is not allowed; a share is more than 0 and at most 1")
    return name, kept
