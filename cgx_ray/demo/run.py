"""`cgx-ray demo`: the same training twice on a network that gets slow half way, dense and adaptive."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from cgx_ray.demo.cluster import Cluster, DemoError, lab_cluster, local_cluster
from cgx_ray.demo.runs import Run
from cgx_ray.demo.view import Scene, View, format_rate, make_view
from cgx_ray.errors import ConfigError
from cgx_ray.lab.events import LinkEvent
from cgx_ray.lab.link import LinkChange
from cgx_ray.lab.namespaces import Lab
from cgx_ray.report.record import RunRecord

BATCH_SIZE = 2  # a worker; with 128 bytes of context about 0.3 s of compute a step for 4 workers on 2 cores
SIMULATED_LATENCY_S = 1e-4
_POLL_S = 0.05
_STALL_S = 120.0
_DENSE_BITS = 20e6 * 8 * 2  # what a dense step moves over a link, roughly; for the stall limit only


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of `cgx-ray demo`.

    out             folder for both runs and the picture
    slow_rate       from half of the steps on, bit/s, as `rate`
    force_simulated use the simulated link even where a lab would work
    """

    out: Path
    workers: int = 4
    steps: int = 48
    rate: float = 1e9
    slow_rate: float = 1e8
    seed: int = 0
    dense_only: bool = False
    force_simulated: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= 16:
            raise ConfigError(f"workers {self.workers} is not allowed; give 1 to 16")
        if self.steps < 4:
            raise ConfigError(f"steps {self.steps} is not allowed; give at least 4, half of them on the slow network")
        if min(self.rate, self.slow_rate) < 1e6:
            raise ConfigError(f"rates {self.rate:g} and {self.slow_rate:g} bit/s: give at least 1mbit")

    @property
    def half(self) -> int:
        """The first step on the slow network."""
        return self.steps // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What was trained. `adaptive` is None with `dense_only`."""

    link: str
    dense: RunRecord
    adaptive: RunRecord | None


def run_demo(options: DemoOptions, console: Console) -> DemoResult:
    """Train and show it. Raises DemoError with the training's last lines if it fails."""
    out = options.out.resolve()
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    reason = "asked for" if options.force_simulated else Lab.available()
    link = "emulated link" if reason is None else "simulated link"
    if reason is not None:
        console.print(f"simulated link ({reason})", highlight=False)
    scene = Scene(link=link, num_steps=options.steps, rate_bit_per_s=options.rate)
    with make_view(console) as view:
        view.update(scene)
        with _cluster(options, out, is_simulated=reason is not None) as cluster:
            for run in _runs(options, out, cluster):
                _train(run, cluster, options, scene, view)
    records = {record.name: record for record in scene.records}
    return DemoResult(link=link, dense=records["dense"], adaptive=records.get("adaptive"))


@contextmanager
def _cluster(options: DemoOptions, out: Path, *, is_simulated: bool) -> Iterator[Cluster]:
    if is_simulated:
        with local_cluster(options.workers, out) as cluster:
            yield cluster
    else:
        with lab_cluster(options.workers, options.rate, out) as cluster:
            yield cluster


def _runs(options: DemoOptions, out: Path, cluster: Cluster) -> list[Run]:
    link = None
    if cluster.is_simulated:
        link = (SIMULATED_LATENCY_S, ((0, options.rate), (options.half, options.slow_rate)))
    # On a real network the baseline is DDP as everyone runs it; only our transport can simulate one.
    policies = {"dense": "static" if cluster.is_simulated else None, "adaptive": "adaptive"}
    return [
        Run(
            name=name,
            policy=policy,
            steps=options.steps,
            seed=options.seed,
            batch_size=BATCH_SIZE,
            storage_path=str(out),
            simulated_link=link,
        )
        for name, policy in policies.items()
        if name == "dense" or not options.dense_only
    ]


def _train(run: Run, cluster: Cluster, options: DemoOptions, scene: Scene, view: View) -> None:
    """Submit `run` and follow it to its end, slowing the network down on the way."""
    record = RunRecord(run.run_dir)
    scene.records.append(record)
    scene.status = f"starting {options.workers} workers for the {run.name} run"
    scene.rate_bit_per_s = options.rate
    if cluster.set_rate is not None:
        cluster.set_rate(options.rate)
    start = LinkChange(rate_bit_per_s=options.rate)
    if cluster.is_simulated:
        start["latency_s"] = SIMULATED_LATENCY_S
    record.note(LinkEvent(event="start", time=time.time(), change=start))
    cluster.submit(run)
    stall_s = _STALL_S + 10 * _DENSE_BITS / min(options.rate, options.slow_rate)
    last_news = time.monotonic()
    while record.end is None:
        if record.poll():
            last_news = time.monotonic()
        elif time.monotonic() - last_news > stall_s:
            raise DemoError(f"no step for {stall_s:.0f} s:\n{cluster.log_tail()}")
        if record.steps and record.steps[-1].step >= options.half - 1 and not record.changes:
            _slow_down(record, cluster, options, scene)
        view.update(scene)
        if record.end is None:
            cluster.check()
            time.sleep(_POLL_S)
    scene.status = "ending"
    view.update(scene)


def _slow_down(record: RunRecord, cluster: Cluster, options: DemoOptions, scene: Scene) -> None:
    if cluster.set_rate is not None:
        cluster.set_rate(options.slow_rate)
    scene.rate_bit_per_s = options.slow_rate
    scene.status = f"network drops to {format_rate(options.slow_rate)}"
    change = LinkChange(rate_bit_per_s=options.slow_rate)
    record.note(LinkEvent(event="change", time=time.time(), step=record.steps[-1].step, change=change))
    record.poll()


def parse_rate(text: str) -> float:
    """Bit/s of `"1gbit"`, `"100mbit"`, `"2.5gbit"` or a plain number."""
    units = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "": 1.0}
    number = text.lower().rstrip("abcdefghijklmnopqrstuvwxyz/")
    unit = text.lower()[len(number) :].removesuffix("/s").removesuffix("ps").strip()
    try:
        return float(number) * units[unit]
    except (KeyError, ValueError):
        raise ConfigError(f"rate {text!r} is not a rate; write 1gbit, 100mbit or bits a second") from None
