"""The demo: the same training twice, dense and under a policy, on a network that slows down after half of the steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from cgx_ray.demo.cluster import Cluster, DemoError, lab_cluster, local_cluster
from cgx_ray.demo.gpt import BATCH_SIZE
from cgx_ray.demo.run_request import RunRequest
from cgx_ray.errors import ConfigError
from cgx_ray.lab.events import LinkEvent
from cgx_ray.lab.link import LinkChange
from cgx_ray.lab.namespaces import Lab
from cgx_ray.report.live_screen import Screen, make_screen
from cgx_ray.report.live_view import LiveView, view_of_record
from cgx_ray.report.record import RunRecord
from cgx_ray.report.show import print_line
from cgx_ray.session.settings import VARIABLE, Settings, policy_variable
from cgx_ray.units import format_rate

# Policies that decide during training, the default first.
DECIDING = ("adaptive", "cgx", "flexible")
SIMULATED_LATENCY_S = 1e-4
_POLL_S = 0.05
_STALL_S = 120.0
# A dense step sends roughly this over a link; it scales the time after which a run counts as stuck.
_DENSE_BITS = 20e6 * 8 * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Options of `cgx-ray demo`.

    out             folder for both runs and the picture
    rate, slow_rate rate of every link in the first and in the second half of the steps, bit/s
    policy          of the second run, as in CGXConfig, but not "static"
    fidelity        of policy "adaptive", as in CGXConfig
    force_simulated use the simulated link even where a lab works
    """

    out: Path
    workers: int = 4
    steps: int = 48
    rate: float = 1e9
    slow_rate: float = 1e8
    seed: int = 0
    policy: str = "adaptive"
    fidelity: str | None = None
    dense_only: bool = False
    force_simulated: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= 16:
            raise ConfigError(f"workers {self.workers} is not allowed; give 1 to 16")
        if self.steps < 4:
            raise ConfigError(f"steps {self.steps} is not allowed; give at least 4, half of them on the slow network")
        settings = Settings(policy=self.policy, fidelity=self.fidelity)
        if not settings.decides:
            name = policy_variable()
            unset = f" ({VARIABLE}={name} is set, which replaces other policies; unset it)" if name else ""
            raise ConfigError(f"policy {self.policy!r} decides nothing; give {', '.join(DECIDING)}{unset}")
        if min(self.rate, self.slow_rate) < 1e6:
            raise ConfigError(f"rates {self.rate:g} and {self.slow_rate:g} bit/s: give at least 1mbit")

    @property
    def half(self) -> int:
        """The first step on the slow network."""
        return self.steps // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Records of the dense run, and of that under the policy, which is None with `dense_only`."""

    link: str
    dense: RunRecord
    decided: RunRecord | None


def run_demo(options: DemoOptions, console: Console) -> DemoResult:
    """Train both runs and show their progress. Raises DemoError with the training's last lines if it fails."""
    out = options.out.resolve()
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; give another --out")
    out.mkdir(parents=True, exist_ok=True)
    reason = "asked for" if options.force_simulated else Lab.available()
    link = "emulated link" if reason is None else "simulated link"
    if reason is not None:
        print_line(console, f"simulated link ({reason})")
    scene = _Scene(link=link, num_steps=options.steps, rate_bit_per_s=options.rate)
    with make_screen(console) as screen:
        scene.show(screen)
        with _cluster(options, out, is_simulated=reason is not None) as cluster:
            for run in _runs(options, out, cluster):
                _train(run, cluster, options, scene, screen)
    records = {record.name: record for record in scene.records}
    return DemoResult(link=link, dense=records["dense"], decided=records.get(options.policy))


@dataclass(slots=True)
class _Scene:
    """The state that a screen shows. `records` are the runs so far; the last one is running."""

    link: str
    num_steps: int
    rate_bit_per_s: float
    status: str = "starting Ray"
    records: list[RunRecord] = field(default_factory=list)

    def show(self, screen: Screen) -> None:
        link = f"{self.link} {format_rate(self.rate_bit_per_s)}"
        views: list[LiveView] = [
            view_of_record(record, num_steps=self.num_steps, links=[link]) for record in self.records
        ]
        screen.update(views, self.status)


@contextmanager
def _cluster(options: DemoOptions, out: Path, *, is_simulated: bool) -> Iterator[Cluster]:
    if is_simulated:
        with local_cluster(options.workers, out) as cluster:
            yield cluster
    else:
        with lab_cluster(options.workers, options.rate, out) as cluster:
            yield cluster


def _runs(options: DemoOptions, out: Path, cluster: Cluster) -> list[RunRequest]:
    link = None
    if cluster.is_simulated:
        link = (SIMULATED_LATENCY_S, ((0, options.rate), (options.half, options.slow_rate)))
    # On a real network the baseline is plain DDP. A simulated link needs our transport, so there it is dense gradients.
    policies = {"dense": "static" if cluster.is_simulated else None, options.policy: options.policy}
    return [
        RunRequest(
            name=name,
            policy=policy,
            steps=options.steps,
            seed=options.seed,
            batch_size=BATCH_SIZE,
            storage_path=str(out),
            fidelity=options.fidelity,
            simulated_link=link,
        )
        for name, policy in policies.items()
        if name == "dense" or not options.dense_only
    ]


def _train(run: RunRequest, cluster: Cluster, options: DemoOptions, scene: _Scene, screen: Screen) -> None:
    """Submit `run`, follow it to its end, and slow the network down after half of its steps."""
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
        scene.show(screen)
        if record.end is None:
            cluster.check()
            time.sleep(_POLL_S)
    scene.status = f"ending the {run.name} run"
    scene.show(screen)


def _slow_down(record: RunRecord, cluster: Cluster, options: DemoOptions, scene: _Scene) -> None:
    if cluster.set_rate is not None:
        cluster.set_rate(options.slow_rate)
    scene.rate_bit_per_s = options.slow_rate
    scene.status = f"network drops to {format_rate(options.slow_rate)}"
    change = LinkChange(rate_bit_per_s=options.slow_rate)
    record.note(LinkEvent(event="change", time=time.time(), step=record.steps[-1].step, change=change))
    record.poll()
