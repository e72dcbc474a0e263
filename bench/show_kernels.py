"""Tables of `cgx-ray bench kernels`."""

from __future__ import annotations

from rich.table import Table

from cgx_ray.bench.codec_numbers import DISTRIBUTIONS
from cgx_ray.bench.kernel_goals import LATENCY_BYTES
from cgx_ray.bench.kernels import SWEPT_CODECS, KernelNumbers
from cgx_ray.report.show import new_table
from cgx_ray.units import format_bytes


def goal_table(numbers: KernelNumbers) -> Table:
    """Return a table of the numbers that have a goal, each beside its alternative."""
    table = new_table("Goals", "", "value", "peer", "ratio", "goal", "met", gap=0)
    for row in numbers.goals:
        peer = row.limit if row.baseline is None else row.baseline
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.name, *(f"{x:.2f} {row.unit}" for x in (row.value, peer)), ratio, row.goal or "", row.verdict)
    return table


def latency_table(numbers: KernelNumbers) -> Table:
    """Return a table of the time of an encode per codec and message size."""
    table = new_table("Latency of an encode, us", "", *(format_bytes(size) for size in LATENCY_BYTES), gap=0)
    seconds = {(timing.codec, timing.message_bytes): timing.encode_s for timing in numbers.timings}
    seconds |= {("copy_", timing.message_bytes): timing.copy_s for timing in numbers.timings}
    for name in (*SWEPT_CODECS, "copy_"):
        table.add_row(name, *(f"{seconds[name, size] * 1e6:.1f}" for size in LATENCY_BYTES))
    return table


def codec_table(numbers: KernelNumbers) -> Table:
    """Return a table of size, error and throughput per codec."""
    title = "Codecs at their defaults: error by distribution, GB/s (decode: and add)"
    table = new_table(title, "", "bits", "ratio", *DISTRIBUTIONS, "encode", "decode", "copy_", gap=0)
    for quality, timing in zip(numbers.qualities, numbers.large, strict=True):
        gbps = (timing.message_bytes / s / 1e9 for s in (timing.encode_s, timing.decode_add_s, timing.copy_s))
        errors = (f"{quality.errors[name]:.4f}" for name in DISTRIBUTIONS)
        bits, ratio = f"{quality.bits:.3f}", f"{32 / quality.bits:.1f}"
        table.add_row(quality.spec.name, bits, ratio, *errors, *(f"{x:.2f}" for x in gbps))
    return table
