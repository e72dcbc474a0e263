"""`cgx-ray profile`: what codecs cost on a device, as a file to plan with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cgx_ray.errors import ConfigError
from cgx_ray.plan import CODEC_DEFAULTS, CodecSpec
from cgx_ray.planner.cost import Link
from cgx_ray.planner.options import CodecCost, candidate_codecs
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES
from cgx_ray.planner.profile import Profile, load_link, save_profile
from cgx_ray.report.result import cpu_model
from cgx_ray.session.calibrate import TURN_S, measure_codec

PROFILE_NUMELS = tuple(1 << exponent for exponent in range(10, 23, 2))


def profiled_codecs() -> dict[str, CodecSpec]:
    """Every codec at its defaults, by name, and what an adaptive run chooses from, by `str(CodecSpec)`."""
    codecs = {name: CodecSpec(name=name) for name in CODEC_DEFAULTS}
    candidates = candidate_codecs(CANDIDATE_DENSITIES)
    return codecs | {str(codec): codec for codec in candidates if codec != codecs[codec.name]}


def measure_profile(
    device: torch.device, threads: int, link: Link | None, on_codec: Callable[[str, float], None]
) -> Profile:
    """Time all of `profiled_codecs`, some 20 s on one core.

    on_codec  gets, before each codec, its name and the share that is done
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        costs: dict[str, CodecCost] = {}
        codecs = profiled_codecs()
        for name, spec in codecs.items():
            on_codec(name, len(costs) / len(codecs))
            costs[name] = measure_codec(spec, device=device, numels=PROFILE_NUMELS, turn_s=TURN_S)
    finally:
        torch.set_num_threads(threads_before)
    return Profile(
        package_version=version("cgx-ray"), device=device_name(device), threads=threads, codec_costs=costs, link=link
    )


def device_name(device: torch.device) -> str:
    """As profiles have it: the model of the GPU or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def profile_command(device: str, threads: int, network: Path | None, path: Path, console: Console) -> None:
    """Measure, show what came out, and write the profile to `path`.

    network  what `cgx-ray probe --json` wrote, for the profile's link; None leaves that out
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: PyTorch sees no CUDA device here; give --device cpu")
    if threads < 1:
        raise ConfigError(f"threads {threads} is not allowed; give 1 or more")
    link = None if network is None else load_link(network)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1.0)
        profile = measure_profile(
            torch.device(device),
            threads if device == "cpu" else 1,
            link,
            lambda what, share: progress.update(task, description=what, completed=share),
        )
    save_profile(profile, path)
    console.print(cost_table(profile.codec_costs, f"{profile.device}, threads: {profile.threads}"))
    console.print(f"profile: {path}", highlight=False, soft_wrap=True)


def cost_table(costs: Mapping[str, CodecCost], title: str) -> Table:
    """Microseconds a call and nanoseconds an element."""
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1))
    table.add_column("codec", no_wrap=True)
    for heading in ("encode, us", "ns/element", "decode, us", "ns/element"):
        table.add_column(heading, justify="right")
    for codec, cost in costs.items():
        numbers = (
            1e6 * cost.encode_a_s,
            1e9 * cost.encode_b_s_per_element,
            1e6 * cost.decode_a_s,
            1e9 * cost.decode_b_s_per_element,
        )
        table.add_row(codec, *(f"{number:.3g}" for number in numbers))
    return table
