"""Compute time of a step: given, from throughput, measured, or estimated from multiply-adds and a GPU's data sheet."""

from __future__ import annotations

from cgx_ray.errors import ConfigError
from cgx_ray.planner.cost import check_positive
from cgx_ray.planner.models import ModelDescription

# Dense 16-bit tensor TFLOP/s with float32 sums, from the data sheets.
PEAK_TFLOPS = {
    "a10": 125, "a100": 312, "h100": 989, "h200": 989, "l4": 121, "l40s": 362, "rtx3090": 71, "rtx4090": 165, "t4": 65,
    "v100": 125,
}  # fmt: skip
# Share of the peak that training reaches; published runs have 0.2 (convolutions) to 0.5 (large transformers).
UTILISATION = 0.3


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
