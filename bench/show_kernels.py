"""`cgx-ray bench kernels` from options to tables, picture and JSON."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cgx_ray.bench.codec_numbers import DISTRIBUTIONS
from cgx_ray.bench.kernel_goals import LATENCY_BYTES
from cgx_ray.bench.kernels import GOAL_NUMEL, SWEPT_CODECS, KernelNumbers, KernelOptions, format_bytes, measure_kernels
from cgx_ray.errors import ConfigError
from cgx_ray.report.result import write_result

PLOT_FORMATS = (".png", ".svg", ".pdf")
_MET = {None: "", True: "yes", False: "no"}


def kernels_command(options: KernelOptions, console: Console, json_path: str | None, plot_path: Path) -> None:
    """Measure, show what came out, draw it, and write the rows if `json_path` is given."""
    if plot_path.suffix not in PLOT_FORMATS:
        raise ConfigError(
            f"picture {str(plot_path)!r} is not allowed; give a name that ends in {', '.join(PLOT_FORMATS)}"
        )
    threads = f", {options.threads} thread{'s' if options.threads > 1 else ''}" if options.device == "cpu" else ""
    console.print(f"{options.numel:,} elements on {options.device}{threads}", highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        numbers = measure_kernels(options, lambda what, share: progress.update(task, description=what, completed=share))
    console.print(goal_table(numbers))
    if not options.is_judged:
        console.print(f"no goals: they are for {GOAL_NUMEL:,} elements and one thread", highlight=False)
    console.print(latency_table(numbers))
    console.print(codec_table(numbers))
    # Numbers first: they took minutes, and the picture needs a library more.
    if json_path:
        write_result("kernels", numbers.rows(), json_path)
    from cgx_ray.bench.plot_kernels import plot_kernels  # noqa: PLC0415

    plot_kernels(numbers, plot_path)
    console.print(f"picture: {plot_path}", highlight=False, soft_wrap=True)


def goal_table(numbers: KernelNumbers) -> Table:
    table = _table("Goals", "", "value", "peer", "ratio", "goal", "met")
    for row in numbers.goals:
        peer = row.limit if row.baseline is None else row.baseline
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(
            row.name, *(f"{x:.2f} {row.unit}" for x in (row.value, peer)), ratio, row.goal or "", _MET[row.met]
        )
    return table


def latency_table(numbers: KernelNumbers) -> Table:
    table = _table("Latency of an encode, us", "", *(format_bytes(size) for size in LATENCY_BYTES))
    seconds = {(point.codec, point.message_bytes): point.encode_s for point in numbers.points}
    seconds |= {("copy_", point.message_bytes): point.copy_s for point in numbers.points}
    for name in (*SWEPT_CODECS, "copy_"):
        table.add_row(name, *(f"{seconds[name, size] * 1e6:.1f}" for size in LATENCY_BYTES))
    return table


def codec_table(numbers: KernelNumbers) -> Table:
    title = "Codecs at their defaults: error by distribution, GB/s (decode: and add)"
    table = _table(title, "", "bits", "ratio", *DISTRIBUTIONS, "encode", "decode", "copy_")
    for quality, point in zip(numbers.qualities, numbers.large, strict=True):
        gbps = (point.message_bytes / s / 1e9 for s in (point.encode_s, point.decode_add_s, point.copy_s))
        errors = (f"{quality.errors[name]:.4f}" for name in DISTRIBUTIONS)
        bits, ratio = f"{quality.bits:.3f}", f"{32 / quality.bits:.1f}"
        table.add_row(quality.spec.name, bits, ratio, *errors, *(f"{x:.2f}" for x in gbps))
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=0)
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
