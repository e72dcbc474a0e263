"""`cgx-ray profile`: times of all codecs on a device, as a file for `cgx-ray plan` and adaptive runs."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import click
import torch
from rich.table import Table

from cgx_ray.codecs.codec import HOST
from cgx_ray.commands.options import FILE, console_for
from cgx_ray.errors import ConfigError
from cgx_ray.plan import CodecSpec, usable_records
from cgx_ray.planner.candidates import CodecCost, CodecCosts
from cgx_ray.planner.cost import Link
from cgx_ray.planner.engine_cost import HOST_ENGINE
from cgx_ray.planner.fidelity import Fidelity, codecs_of
from cgx_ray.planner.papers.flexible import CANDIDATE_DENSITIES
from cgx_ray.planner.profile import Profile, load_link, save_profile
from cgx_ray.report.result import cpu_model
from cgx_ray.report.show import new_table, print_line, progress_bar, whole_file
from cgx_ray.session.calibrate import TURN_S, measure_codec
from cgx_ray.session.engine_times import measure_engine

PROFILE_NUMELS = tuple(1 << exponent for exponent in range(10, 23, 2))


@click.command()
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True)
@click.option("--threads", default=1, show_default=True, help="Threads of the CPU, as many as a rank will have.")
@click.option("--network", type=click.Path(path_type=Path), help="File of `cgx-ray probe --json`: adds its link.")
@click.option("--out", type=FILE, default="profile.json", show_default=True, help="File of the profile.")
def profile(device: str, threads: int, network: Path | None, out: Path) -> None:
    """Measure the time of all codecs on this device, for `plan`."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda: PyTorch sees no CUDA device here; give --device cpu")
    if threads < 1:
        raise ConfigError(f"threads {threads} is not allowed; give 1 or more")
    link = None if network is None else load_link(network)
    console = console_for(None)
    with progress_bar(console) as on_codec:
        measured = measure_profile(torch.device(device), threads if device == "cpu" else 1, link, on_codec)
    with whole_file(out) as new:
        save_profile(measured, new)
    console.print(cost_table(measured.codec_costs, f"{measured.device}, threads: {measured.threads}"))
    print_line(console, f"profile: {out}")


def profiled_codecs() -> dict[str, CodecSpec]:
    """Return every codec at its defaults, by name, and the candidates of an adaptive run, by `str(CodecSpec)`."""
    codecs = {record.name: CodecSpec(name=record.name) for record in usable_records()}
    candidates = codecs_of(Fidelity.FAST, CANDIDATE_DENSITIES)
    return codecs | {str(codec): codec for codec in candidates if codec != codecs[codec.name]}


def measure_profile(
    device: torch.device, threads: int, link: Link | None, on_codec: Callable[[str, float], None]
) -> Profile:
    """Time all of `profiled_codecs`, which takes some 20 s on one core.

    on_codec  called before each codec with its name and the fraction done
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
        package_version=version("cgx-ray"),
        device=device_name(device),
        threads=threads,
        codec_costs=costs,
        link=link,
        engine=HOST_ENGINE if device == HOST else measure_engine(device),
    )


def device_name(device: torch.device) -> str:
    """Return the name of a device in profiles: the model of the GPU or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_model()


def cost_table(costs: CodecCosts, title: str) -> Table:
    """Return a table with microseconds per call and nanoseconds per element."""
    table = new_table(title, "codec", "encode, us", "ns/element", "decode, us", "ns/element")
    for codec, cost in costs.items():
        numbers = (
            1e6 * cost.encode_a_s,
            1e9 * cost.encode_b_s_per_element,
            1e6 * cost.decode_a_s,
            1e9 * cost.decode_b_s_per_element,
        )
        table.add_row(codec, *(f"{number:.3g}" for number in numbers))
    return table
