"""The command line: `demo`, `lab`, `report`, `probe`, `collective`, `plan`, `profile`, `profile-model`, `bench`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import click
from rich.console import Console

from cgx_ray.commands.lab import lab
from cgx_ray.errors import CGXError

_Command = TypeVar("_Command", bound=Callable[..., Any])

# Commands import what they need when they run: `cgx-ray --help` loads no Ray and no matplotlib.


class _Commands(click.Group):
    """Shows our own errors, and files that cannot be read or written, as one message instead of a traceback."""

    def invoke(self, context: click.Context) -> object:
        signal.signal(signal.SIGTERM, _raise_interrupt)
        try:
            return super().invoke(context)
        except CGXError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.filename is None:
                raise
            raise click.ClickException(f"{error.filename}: {error.strerror}") from error


class _OutFile(click.Path):
    """A file to write, refused before anything is measured if it could not be written in the end."""

    def __init__(self, path_type: type = str) -> None:
        super().__init__(dir_okay=False, writable=True, allow_dash=path_type is str, path_type=path_type)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if path == "-":
            return path
        folder = self.folder(Path(os.fsdecode(path)))
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            self.fail(f"{value} cannot be written: {folder} is no folder to write to; give another", param, ctx)
        return path

    def folder(self, path: Path) -> Path:
        """What has to be there."""
        return path.parent


class _Picture(_OutFile):
    """A picture to write; its folders are made."""

    suffixes = (".png", ".pdf", ".svg")

    def __init__(self) -> None:
        super().__init__(Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if Path(value).suffix not in self.suffixes:
            self.fail(f"{value} is no picture; give a name that ends in {', '.join(self.suffixes)}", param, ctx)
        return super().convert(value, param, ctx)

    def folder(self, path: Path) -> Path:
        return next(folder for folder in path.absolute().parents if folder.exists())


_FILE = _OutFile(Path)
_PICTURE = _Picture()


def _json(what: str) -> Callable[[_Command], _Command]:
    return click.option(
        "--json", "json_path", type=_OutFile(), metavar="FILE", help=f"Write {what} as JSON; - is standard output."
    )


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Make SIGTERM end a command as Ctrl-C does: in order, leaving nothing behind."""
    raise KeyboardInterrupt


@click.group(cls=_Commands)
@click.version_option(package_name="cgx-ray")
def main() -> None:
    """Adaptive gradient compression for Ray Train and PyTorch DDP."""


main.add_command(lab)


def _console(json_path: str | None) -> Console:
    """Standard output belongs to the JSON when that goes there."""
    return Console(stderr=json_path == "-")


@main.command()
@click.option("--workers", default=4, show_default=True, help="Training processes, one a host.")
@click.option("--steps", default=48, show_default=True, help="Steps of each run; the network drops after half.")
@click.option("--rate", default="1gbit", show_default=True, help="Rate of every link at first.")
@click.option("--slow-rate", default="100mbit", show_default=True, help="Rate of every link in the second half.")
@click.option("--seed", default=0, show_default=True, help="Of weights, batches and rounding.")
@click.option("--dense-only", is_flag=True, help="Only the dense run.")
@click.option("--simulated-link", is_flag=True, help="Pace messages by software even if namespaces work here.")
@_json("the numbers")
@click.option("--bench-rounds", default=12, show_default=True, help="Of `bench step`, whose rows --json adds.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the runs.  [default: runs/demo-<time>]")
def demo(
    workers: int,
    steps: int,
    rate: str,
    slow_rate: str,
    seed: int,
    dense_only: bool,
    simulated_link: bool,
    json_path: str | None,
    bench_rounds: int,
    out: Path | None,
) -> None:
    """Train a small GPT twice, dense and adaptive, on a network that gets slow half way."""
    from cgx_ray.commands.demo import demo_command  # noqa: PLC0415
    from cgx_ray.demo.run import DemoOptions, parse_rate  # noqa: PLC0415

    options = DemoOptions(
        out=out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S"),
        workers=workers,
        steps=steps,
        rate=parse_rate(rate),
        slow_rate=parse_rate(slow_rate),
        seed=seed,
        dense_only=dense_only,
        force_simulated=simulated_link,
    )
    demo_command(options, _console(json_path), json_path, num_bench_rounds=bench_rounds)


@main.command()
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--events", type=click.Path(path_type=Path), help="Of `lab run --events`.  [default: network.jsonl in RUN, if any]"
)
@click.option("--plot", type=_PICTURE, default="report.png", show_default=True, help="Where the picture goes.")
def report(run_dir: Path, events: Path | None, plot: Path) -> None:
    """Draw a run: step times and the network, with the decisions in both.

    RUN is the folder <storage path>/<run name> of a run with CGXConfig, which may still be training.
    """
    from cgx_ray.commands.report import report_command  # noqa: PLC0415

    report_command(run_dir, events, _console(None), plot)


@main.command()
@click.option("--address", default="auto", show_default=True, help="Of a running Ray cluster.")
@click.option("--hops", is_flag=True, help="Count network hops as well; each takes up to a second.")
@_json("the matrix")
@click.option("--plot", type=_PICTURE, default="network.png", show_default=True, help="Where the picture goes.")
def probe(address: str, hops: bool, json_path: str | None, plot: Path) -> None:
    """Measure latency and bandwidth between all nodes of a running Ray cluster."""
    from cgx_ray.commands.probe import probe_command  # noqa: PLC0415

    probe_command(address, _console(json_path), json_path, plot, counts_hops=hops)


@main.command()
@click.option("--numel", type=int, required=True, help="Elements of the gradient, float32.")
@click.option("--density", type=float, required=True, help="Kept share, in (0, 1]: 0.01 sends 1 %.")
@click.option("--workers", type=int, required=True)
@click.option("--latency", required=True, help="One way, such as 4ms or 50us.")
@click.option("--bandwidth", required=True, help="Of a worker's link, such as 10gbps or 100mbit.")
@_json("the numbers")
def collective(numel: int, density: float, workers: int, latency: str, bandwidth: str, json_path: str | None) -> None:
    """Which collective is the fastest for a top-k gradient, and what each costs."""
    from rich.table import Table  # noqa: PLC0415

    from cgx_ray.planner.what_if import compare_schemes, parse_link  # noqa: PLC0415

    link = parse_link(latency, bandwidth)
    result = compare_schemes(numel=numel, density=density, num_workers=workers, link=link)
    table = Table("scheme", "literature, ms", "here, ms", title=f"fastest: {result.scheme}")
    for scheme, cost_ms in sorted(result.costs_ms.items(), key=lambda item: item[1]):
        table.add_row(scheme, f"{cost_ms:.2f}", f"{result.ours_ms[scheme]:.2f}")
    _console(json_path).print(table)
    if json_path:
        text = json.dumps({"scheme": result.scheme, "costs_ms": result.costs_ms, "ours_ms": result.ours_ms}, indent=2)
        with click.open_file(json_path, "w") as file:
            file.write(text + "\n")


@main.command()
@click.option("--model", required=True, metavar="NAME|FILE", help="resnet50, gpt2, ..., or a file of `profile-model`.")
@click.option("--workers", type=int, required=True)
@click.option("--latency", help="One way between nodes, such as 4ms or 50us.  [default: of --profile]")
@click.option("--bandwidth", help="Of a node's link, such as 10gbps or 100mbit.  [default: of --profile]")
@click.option("--ranks-per-node", default=1, show_default=True, help="Workers that share a node and its link.")
@click.option("--inside-latency", default="50us", show_default=True, help="Between ranks of a node.")
@click.option("--inside-bandwidth", default="16gbps", show_default=True, help="Between ranks of a node.")
@click.option("--step-time", help="Forward and backward of a step without communication, such as 120ms.")
@click.option("--throughput", type=float, help="Or: samples a second of one worker without communication.")
@click.option("--gpu", help="Or: v100, a100, ..., at 30 % of its peak.")
@click.option("--batch", default=32, show_default=True, help="Samples of a worker's step.")
@click.option("--profile", type=click.Path(path_type=Path), help="Codec times, as `cgx-ray profile` writes them.")
@click.option("--gain", "gains", multiple=True, metavar="CODEC=SHARE", help="What a codec keeps; may be repeated.")
@click.option("--min-gain", default=0.8, show_default=True, help="Codecs that keep less are left out.")
@click.option("--price", type=float, help="US dollars an hour of a worker.")
@click.option("--samples-per-epoch", type=int, help="With --price: what an epoch costs.")
@click.option("--sweep", metavar="NAME=LOW..HIGH", help="bandwidth=0.1..25gbps, latency=50us..20ms or workers=2..1024.")
@_json("it all")
@click.option("--plot", type=_PICTURE, help="Draw the steps, dense and planned, and the sweep.")
def plan(json_path: str | None, plot: Path | None, **given: Any) -> None:
    """What the best plan would make of a model on a network: step time, what bounds it, groups, cost."""
    from cgx_ray.commands.plan import plan_command  # noqa: PLC0415
    from cgx_ray.planner.question import read_question  # noqa: PLC0415

    plan_command(read_question(**given), _console(json_path), json_path=json_path, plot=plot)


@main.command("profile-model")
@click.argument("target", metavar="MODULE:FUNCTION")
@click.option("--out", type=_FILE, default="model.csv", show_default=True, help="The model file.")
@click.option("--input", "input_shape", metavar="SHAPE", help="Of a batch of noise, such as 8x3x224x224.")
@click.option("--steps", default=10, show_default=True, help="That count; three more warm up.")
def profile_model(target: str, out: Path, input_shape: str | None, steps: int) -> None:
    """Make a model file for `plan --model` from a model that runs here.

    MODULE:FUNCTION, or script.py:function, names a function without arguments that returns the model and a batch, or
    the model and a function that computes its loss.
    """
    from cgx_ray.commands.profile_model import profile_model_command  # noqa: PLC0415

    profile_model_command(target, Console(), out, input_shape=input_shape, steps=steps)


@main.command()
@click.option("--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True)
@click.option("--threads", default=1, show_default=True, help="Of the CPU, as a rank will have them.")
@click.option("--network", type=click.Path(path_type=Path), help="What `cgx-ray probe --json` wrote: adds the link.")
@click.option("--out", type=_FILE, default="profile.json", show_default=True)
def profile(device: str, threads: int, network: Path | None, out: Path) -> None:
    """Measure what codecs cost on this device and write it down, to plan with."""
    from cgx_ray.commands.profile import profile_command  # noqa: PLC0415

    profile_command(device, threads, network, out, _console(None))


@main.group()
def bench() -> None:
    """Measure a part of it."""


@bench.command()
@_json("the numbers")
@click.option("--rounds", default=12, show_default=True, help="Rounds; each times both.")
@click.option("--steps", default=4, show_default=True, help="Steps of each in a round.")
def step(json_path: str | None, rounds: int, steps: int) -> None:
    """What the engine costs with dense gradients, against plain DDP."""
    from cgx_ray.bench.step import measure_step, print_rows  # noqa: PLC0415
    from cgx_ray.report.result import write_result  # noqa: PLC0415

    rows = measure_step(num_rounds=rounds, steps_per_round=steps)
    print_rows(_console(json_path), rows)
    if json_path:
        write_result("step", rows, json_path)


@bench.command()
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--numel", default=1 << 26, show_default=True, help="Elements of the large gradients.")
@click.option("--threads", default=1, show_default=True, help="Of the CPU; the goals are for one.")
@click.option("--seed", default=0, show_default=True, help="Of gradients and rounding.")
@_json("the numbers")
@click.option("--plot", type=_PICTURE, default="kernels.png", show_default=True, help="Where the picture goes.")
def kernels(device: str, numel: int, threads: int, seed: int, json_path: str | None, plot: Path) -> None:
    """What the codecs cost and what they lose: throughput, latency, error."""
    from cgx_ray.bench.kernels import KernelOptions  # noqa: PLC0415
    from cgx_ray.bench.show_kernels import kernels_command  # noqa: PLC0415

    options = KernelOptions(device=device, numel=numel, threads=threads, seed=seed)
    kernels_command(options, _console(json_path), json_path, plot)


@bench.command()
@click.option("--ranks", default=4, show_default=True, help="Processes, each on a host of its own; goals are for 4.")
@_json("the numbers")
@click.option("--quick", is_flag=True, help="4 MB, two rounds, not 100 Mbit/s, no goals: does it work?")
def collectives(ranks: int, json_path: str | None, quick: bool) -> None:
    """How long schemes take over our TCP and over Gloo, against Gloo's all-reduce and the bound."""
    from cgx_ray.bench.collectives import CollectiveOptions  # noqa: PLC0415
    from cgx_ray.bench.show_collectives import collectives_command  # noqa: PLC0415

    collectives_command(CollectiveOptions(num_ranks=ranks, quick=quick), _console(json_path), json_path)


@bench.command("planner")
@_json("the numbers")
@click.option("--quick", is_flag=True, help="Few cases, small models, no goals: does it work?")
@click.option("--plot", type=_PICTURE, default="planner.png", show_default=True, help="Where the picture goes.")
def bench_planner(json_path: str | None, quick: bool, plot: Path) -> None:
    """Is the planner exact, how long does it take, and what does it plan for up to 16,384 workers."""
    from cgx_ray.bench.show_planner import planner_command  # noqa: PLC0415

    planner_command(quick, _console(json_path), json_path, plot)


@bench.command("lab")
@_json("the numbers")
def bench_lab(json_path: str | None) -> None:
    """How faithful the lab is on this machine: Gloo's all-reduce against the alpha-beta model."""
    from cgx_ray.bench.lab import lab_command  # noqa: PLC0415

    lab_command(_console(json_path), json_path)


@bench.command()
@click.option("--minutes", default=1.0, show_default=True, help="Beside a bursty neighbour; goals are for 10.")
@_json("the numbers")
@click.option("--quick", is_flag=True, help="One link and no more: does it work?")
def network(minutes: float, json_path: str | None, quick: bool) -> None:
    """Whether the monitors see what the lab has set, while a training job runs, and what they cost."""
    from cgx_ray.bench.network import NetworkOptions, network_command  # noqa: PLC0415

    network_command(NetworkOptions(minutes=minutes, quick=quick), _console(json_path), json_path)


if __name__ == "__main__":
    sys.exit(main())
