"""`python -m bench chaos`: whether a training survives random faults."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from bench.chaos.faults import ChaosError, ChaosOptions, quick_options
from cgx_ray.commands.options import console_for, json_option
from cgx_ray.errors import CGXError, ConfigError
from cgx_ray.lab.namespaces import Lab
from cgx_ray.report.result import result_table, write_result
from cgx_ray.report.show import print_line, progress_bar

# Steps of four ranks in a minute, faults included, on two cores.
_STEPS_PER_MINUTE = 100


@click.command()
@click.option(
    "--minutes",
    default=30.0,
    show_default=True,
    type=click.FloatRange(1, 1440),
    help="Time with faults, on two cores; the steps follow from it. The quiet run comes before.",
)
@click.option("--faults", default=50, show_default=True, type=click.IntRange(1), help="Number of faults.")
@click.option("--seed", type=click.IntRange(0), help="Repeats a run of the same --minutes and --faults. Default: any.")
@json_option()
@click.option("--quick", is_flag=True, help="A short check: two ranks, a small model, 6 faults, no goals of loss.")
def chaos(minutes: float, faults: int, seed: int | None, json_path: str | None, quick: bool) -> None:
    """Train beside random faults, and compare with a quiet run.

    Ray runs in a lab. Processes are stopped and killed, hosts cut off, links slowed down, disks full, gradients NaN.
    Training must go on, come to the same loss, and leave nothing behind.
    """
    reason = Lab.available(rates_only=False)
    if reason is not None:
        raise ConfigError(f"bench chaos needs a lab; {reason}")
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    if quick:
        options = quick_options(seed)
        again = f"python -m bench chaos --quick --seed {seed}"
    else:
        options = ChaosOptions(seed=seed, steps=round(minutes * _STEPS_PER_MINUTE), faults=faults)
        again = f"python -m bench chaos --minutes {minutes:g} --faults {faults} --seed {seed}"
    _run(options, again, json_path)


def _run(options: ChaosOptions, again: str, json_path: str | None) -> None:
    # These import torch: 2 s.
    from bench.chaos.measure import (  # noqa: PLC0415
        chaos_rows,
        fault_table,
        measure_chaos,
    )

    console = console_for(json_path)
    print_line(console, f"seed {options.seed}, {options.steps} steps; to repeat it: {again}")
    out = Path(tempfile.mkdtemp(prefix="cgx-chaos-"))
    with progress_bar(console) as on_part, _kept_after_an_error(out, again):
        numbers = measure_chaos(options, out, lambda line: print_line(console, line), on_part)
    console.print(fault_table(numbers.faults, numbers.harmed.survived))
    rows = chaos_rows(options, numbers)
    console.print(result_table("the run with faults; baseline: the quiet run", rows))
    for left in numbers.harmed.left:
        print_line(console, f"left behind: {left}")
    if json_path:
        write_result("chaos", rows, json_path)


@contextmanager
def _kept_after_an_error(out: Path, again: str) -> Iterator[None]:
    """Remove `out` after the body, unless a training has failed: then the error names it."""
    try:
        yield
    except CGXError as error:
        raise ChaosError(f"{error}\nfiles: {out}; to repeat it: {again}") from error
    except BaseException:
        shutil.rmtree(out)
        raise
    shutil.rmtree(out)
