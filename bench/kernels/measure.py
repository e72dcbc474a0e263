"""`python -m bench kernels`: speed and error of the codecs, without Ray and without a network.

Throughput is bytes of float32 gradient per second, 4 per element, unless `kernel_goals` says otherwise. Every number is
the best of several turns, and a codec and its alternative take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import click
import torch

from bench.kernels.codec_numbers import (
    DISTRIBUTIONS,
    QUALITY_NUMEL,
    CodecTiming,
    Quality,
    draw_samples,
    measure_quality,
    measure_size,
)
from bench.kernels.goals import (
    LATENCY_BYTES,
    bf16_goal,
    dense_goals,
    limited,
    overhead_goals,
    reference_goal,
    topk_goal,
)
from bench.shared.picture import Line, Plot
from bench.shared.runner import BenchRun, OnPart, bench_command
from cgx_ray.errors import ConfigError
from cgx_ray.plan import BUILT_IN
from cgx_ray.report.result import Row
from cgx_ray.runtime_ext import ops
from cgx_ray.units import format_bytes, format_count

SWEPT_CODECS = ("qsgd", "topk", "ef_signsgd", "bf16")
GOAL_NUMEL = 1 << 26
_SWEPT_BYTES = tuple(1 << exponent for exponent in range(10, 29, 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """Options of the bench. `numel`: elements of the large gradients."""

    device: str = "cpu"
    numel: int = GOAL_NUMEL
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"device {self.device!r} is not allowed; give cpu or cuda")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device cuda: PyTorch sees no CUDA device here; give --device cpu")
        if not 1 << 10 <= self.numel < 1 << 31:
            raise ConfigError(f"numel {self.numel} is not allowed; give 1024 to 2**31 - 1")
        if self.threads < 1:
            raise ConfigError(f"threads {self.threads} is not allowed; give 1 or more")

    @property
    def is_judged(self) -> bool:
        """True if goals apply: for gradients much larger than all caches, and one core."""
        return self.numel == GOAL_NUMEL and self.threads == 1


@dataclass(slots=True)
class KernelNumbers:
    """The measured numbers.

    goals      rows that have a goal on this device or another
    timings    SWEPT_CODECS over message sizes
    large      every codec at `KernelOptions.numel`
    qualities  every codec at QUALITY_NUMEL
    """

    options: KernelOptions
    goals: list[Row] = field(default_factory=list)
    timings: list[CodecTiming] = field(default_factory=list)
    large: list[CodecTiming] = field(default_factory=list)
    qualities: list[Quality] = field(default_factory=list)

    def rows(self) -> list[Row]:
        rows = [
            *self.goals,
            Row(name="numel", value=self.options.numel, unit="elements"),
            Row(name="threads", value=self.options.threads, unit="threads"),
        ]
        for timing in self.timings:
            size = _row_size(timing.message_bytes)
            rows += _throughput_rows(timing, f"_{size}")
            if timing.message_bytes in LATENCY_BYTES:
                latency_us, copy_us = timing.encode_s * 1e6, timing.copy_s * 1e6
                rows.append(limited(f"{timing.codec}_encode_latency_{size}", "us", latency_us, copy_us))
        for timing in self.large:
            rows += _throughput_rows(timing, "")
        for quality in self.qualities:
            name = quality.spec.name
            rows.append(Row(name=f"{name}_bits", value=quality.bits, unit="bits/element"))
            rows += [Row(name=f"{name}_error_{x}", value=error, unit="relative") for x, error in quality.errors.items()]
        return rows


def _row_size(num_bytes: int) -> str:
    """Return "64KB" for 64 KiB. Names of rows must stay the same from run to run, so they keep this form."""
    return f"{num_bytes >> 10}KB" if num_bytes < 1 << 20 else f"{num_bytes >> 20}MB"


def measure_kernels(options: KernelOptions, on_part: OnPart) -> KernelNumbers:
    """Measure everything, which takes about 2 minutes for 2**26 elements on one core.

    on_part  called before each part with its name and the fraction done
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        numbers = KernelNumbers(options=options)
        parts = _parts(numbers)
        for index, (what, measure) in enumerate(parts):
            on_part(what, index / len(parts))
            measure()
        if not options.is_judged:
            numbers.goals = [replace(row, goal=None, met=None) for row in numbers.goals]
        return numbers
    finally:
        torch.set_num_threads(threads_before)


def _parts(numbers: KernelNumbers) -> list[tuple[str, Callable[[], None]]]:
    """Return (name, call that adds its numbers to `numbers`) per part, in the order in which parts must run."""
    options = numbers.options
    device = torch.device(options.device)
    key = ops.message_key(options.seed, 0, 0, 0, 0)
    largest = max(options.numel, LATENCY_BYTES[-1] // 4)
    all_N = torch.randn(largest, generator=torch.Generator().manual_seed(options.seed)).to(device)
    all_out_N = torch.zeros_like(all_N)
    grad_N, out_N = all_N[: options.numel], all_out_N[: options.numel]

    parts: list[tuple[str, Callable[[], None]]] = [
        ("dense kernels and copy_", lambda: numbers.goals.extend(dense_goals(grad_N, out_N, key))),
        ("top-k and torch.topk", lambda: numbers.goals.append(topk_goal(grad_N, out_N, key))),
        ("bf16 and Tensor.to", lambda: numbers.goals.append(bf16_goal(grad_N, out_N, key))),
    ]
    if device.type == "cpu":
        parts.append(("qsgd and plain PyTorch", lambda: numbers.goals.append(reference_goal(grad_N, out_N, key))))

    def sweep(numel: int) -> None:
        # Interrupts disturb short calls the most, and more rounds of them take little time.
        num_rounds = 15 if 4 * numel in LATENCY_BYTES else 5
        numbers.timings += measure_size(SWEPT_CODECS, all_N[:numel], all_out_N[:numel], key, num_rounds=num_rounds)

    for message_bytes in _SWEPT_BYTES:
        if message_bytes <= 4 * largest:
            parts.append((f"gradients of {format_bytes(message_bytes)}", partial(sweep, message_bytes // 4)))
    parts.append(("fixed cost of a call", lambda: numbers.goals.extend(overhead_goals(numbers.timings, device))))

    samples = draw_samples(QUALITY_NUMEL, options.seed, device)

    def codec(name: str) -> None:
        numbers.large += measure_size([name], grad_N, out_N, key, num_rounds=5)
        numbers.qualities.append(measure_quality(name, samples, key))

    return parts + [(f"codec {name}", partial(codec, name)) for name in BUILT_IN]


def _throughput_rows(timing: CodecTiming, suffix: str) -> list[Row]:
    return [
        limited(
            f"{timing.codec}_{what}_gbps{suffix}",
            "GB/s",
            timing.message_bytes / seconds / 1e9,
            timing.message_bytes / timing.copy_s / 1e9,
        )
        for what, seconds in (("encode", timing.encode_s), ("decode_add", timing.decode_add_s))
    ]


@bench_command(picture="kernels.png")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--numel", default=1 << 26, show_default=True, help="Elements of the large gradients.")
@click.option("--threads", default=1, show_default=True, help="Threads of the CPU; the goals are for one.")
@click.option("--seed", default=0, show_default=True, help="Seed of gradients and rounding.")
def kernels(run: BenchRun, device: str, numel: int, threads: int, seed: int) -> Iterable[Row]:
    """Measure throughput, latency and error of codecs."""
    options = KernelOptions(device=device, numel=numel, threads=threads, seed=seed)
    run.title += f", {device}, {format_count(threads, 'thread')}, {numel:,} elements"
    if not options.is_judged:
        run.print_text(f"no goals: they are for {GOAL_NUMEL:,} elements and one thread")
    numbers = measure_kernels(options, run.on_part)
    by_bits = sorted(numbers.qualities, key=lambda quality: quality.bits)
    names = [f"{quality.spec.name}, {quality.bits:.2g} bits" for quality in by_bits]
    errors = [Line(label=x, x=names, y=[one.errors[x] for one in by_bits], style="o") for x in DISTRIBUTIONS]
    run.panels += [
        Plot(title="Throughput", x="MiB of float32", y="GB/s", lines=list(_speeds(numbers.timings)), log="xy"),
        Plot(title="Error of one message", x="", y="|x - decode(encode(x))| / |x|", lines=errors),
    ]
    return numbers.rows()


def _speeds(timings: list[CodecTiming]) -> Iterator[Line]:
    for name in SWEPT_CODECS:
        found = [timing for timing in timings if timing.codec == name]
        mib = [timing.message_bytes / 2**20 for timing in found]
        ways = {
            f"{name} encode": ("o-", [timing.encode_s for timing in found]),
            f"{name} decode-add": ("v--", [timing.decode_add_s for timing in found]),
        }
        for label, (style, seconds) in ways.items():
            gbps = [timing.message_bytes / s / 1e9 for timing, s in zip(found, seconds, strict=True)]
            yield Line(label=label, x=mib, y=gbps, style=style)
    yield Line(label="copy_", x=mib, y=[one.message_bytes / one.copy_s / 1e9 for one in found], style=":")
