"""Progress of the demo: live panels on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cgx_ray.report.record import RunRecord, StepLine
from cgx_ray.report.show import print_line
from cgx_ray.units import format_rate

PARTS = (("compute", "green"), ("encode", "magenta"), ("exchange", "red"), ("decode", "blue"))
_PLAIN_INTERVAL_S = 5.0
_BAR_WIDTH = 40


@dataclass(slots=True)
class Scene:
    """The state that a screen shows. `records` are the runs so far; the last one is running."""

    link: str
    num_steps: int
    rate_bit_per_s: float
    status: str = "starting Ray"
    records: list[RunRecord] = field(default_factory=list)


class Screen(Protocol):
    def __enter__(self) -> Screen: ...
    def __exit__(self, *error: Any) -> None: ...
    def update(self, scene: Scene) -> None: ...


def make_screen(console: Console) -> Screen:
    return LiveScreen(console) if console.is_terminal else PlainScreen(console)


class LiveScreen:
    """A panel per run, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8)

    def __enter__(self) -> LiveScreen:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def update(self, scene: Scene) -> None:
        panels: list[RenderableType] = [_run_panel(record, scene) for record in scene.records]
        last = scene.records[-1] if scene.records else None
        if last is None or not last.steps or last.end is not None:
            panels.append(Text(f"  {scene.status} ...", style="dim"))
        self._live.update(Group(*panels))


class PlainScreen:
    """A line every few seconds, and one per decision when it is made."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_print = 0.0
        self._status = ""
        self._shown: dict[str, int] = {}

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def update(self, scene: Scene) -> None:
        if scene.status != self._status:
            self._status = scene.status
            self._print(scene.status)
        if not scene.records:
            return
        record = scene.records[-1]
        for line in record.decisions[self._shown.get(record.name, 0) :]:
            self._print(f"{record.name}: {describe_decision(line)}")
        self._shown[record.name] = len(record.decisions)
        now = time.monotonic()
        if record.steps and now - self._last_print >= _PLAIN_INTERVAL_S:
            self._last_print = now
            self._print(_plain_line(record, scene))

    def _print(self, text: str) -> None:
        print_line(self._console, text)


def describe_decision(line: dict[str, Any]) -> str:
    """Return a line with step, old and new plan, and the reason, which contains the prediction."""
    change = (
        f"keep {line['new']['plan']}" if line["kind"] == "keep" else f"{line['old']['plan']} -> {line['new']['plan']}"
    )
    return f"step {line['step']}: {change}: {line['reason']}"


def _plain_line(record: RunRecord, scene: Scene) -> str:
    step = record.steps[-1]
    split = ", ".join(f"{name} {seconds:.2f}" for name, seconds in _parts(step))
    return (
        f"{record.name}: step {step.step + 1}/{scene.num_steps}  loss {step.loss:.3f}  {step.step_s:.2f} s/step"
        f"{f' ({split})' if split else ''}  {step.plan}  {scene.link} {format_rate(scene.rate_bit_per_s)}"
    )


def _parts(step: StepLine) -> list[tuple[str, float]]:
    parts = [(name, getattr(step, f"{name}_s")) for name, _ in PARTS]
    return [(name, seconds) for name, seconds in parts if seconds is not None]


def _run_panel(record: RunRecord, scene: Scene) -> Panel:
    is_running = record.end is None
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=10)
    table.add_column(ratio=1)
    done = len(record.steps)
    bar = Table.grid(padding=(0, 1))
    bar.add_row(ProgressBar(total=scene.num_steps, completed=done, width=_BAR_WIDTH), f"{done}/{scene.num_steps}")
    table.add_row("step", bar)
    if record.steps:
        step = record.steps[-1]
        table.add_row("loss", f"{step.loss:.3f}")
        table.add_row("step time", _step_time(step))
        table.add_row("plan", Text(step.plan, style="bold"))
    if is_running:
        table.add_row(scene.link, format_rate(scene.rate_bit_per_s))
    if record.decisions:
        table.add_row("decision", Text(describe_decision(record.decisions[-1]), style="yellow"))
    title = f"{record.name} gradients" if record.name == "dense" else record.name
    return Panel(table, title=title, title_align="left", border_style="cyan" if is_running else "dim")


def _step_time(step: StepLine) -> Text:
    """Return the seconds and a bar of their parts. Parts overlap, so their sum can exceed the step."""
    text = Text(f"{step.step_s:.2f} s  ")
    parts = _parts(step)
    if not parts:
        return text.append("(plain DDP does not report its parts)", style="dim")
    colors = dict(PARTS)
    total = sum(seconds for _, seconds in parts) or 1.0
    for name, seconds in parts:
        text.append("█" * round(_BAR_WIDTH * seconds / total), style=colors[name])
    for name, seconds in parts:
        text.append(f"  {name} ", style=colors[name]).append(f"{seconds:.2f}")
    return text
