"""Live views on a terminal, redrawn in place, or as plain lines elsewhere. They fit 80 columns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from textwrap import shorten
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cgx_ray.report.live_view import PARTS, DecisionLine, LiveView, RankLine
from cgx_ray.report.show import print_line
from cgx_ray.units import format_seconds
from cgx_ray.untrusted import printable

_COLORS = dict(zip(PARTS, ("green", "magenta", "red", "blue"), strict=True))
_PLAIN_INTERVAL_S = 5.0
_BAR_WIDTH = 30
# Ranks that are shown one by one, the slowest, and links: a view fits 24 lines.
_SHOWN_RANKS, _SHOWN_LINKS = 4, 5
# Characters of a decision that a panel shows: two lines of 80 columns. The journal has the rest; the prediction has a
# line of its own.
_SHOWN_CHARS = 116


class Screen(Protocol):
    """Place for views. `status`: what happens now, while no training has news; empty: nothing."""

    def __enter__(self) -> Screen: ...
    def __exit__(self, *error: Any) -> None: ...
    def update(self, views: Sequence[LiveView], status: str) -> None: ...


def make_screen(console: Console) -> Screen:
    return LiveScreen(console) if console.is_terminal else PlainScreen(console)


class LiveScreen:
    """A panel per view, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8)

    def __enter__(self) -> LiveScreen:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def update(self, views: Sequence[LiveView], status: str) -> None:
        panels: list[RenderableType] = [draw_view(view) for view in views]
        if status and (not views or views[-1].step is None or not views[-1].is_running):
            panels.append(Text(f"  {status} ...", style="dim"))
        self._live.update(Group(*panels))


class PlainScreen:
    """A line every few seconds, and one per decision when it is made. The last step of a run has a line too."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last_print = 0.0
        self._last_step: tuple[str, int | None] | None = None
        self._status = ""
        self._last_decision: dict[str, DecisionLine] = {}

    def __enter__(self) -> PlainScreen:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def update(self, views: Sequence[LiveView], status: str) -> None:
        if status != self._status:
            self._status = status
            if status:
                self._print(status)
        if not views:
            return
        view = views[-1]
        for line in self._new_decisions(view):
            self._print(f"{view.name}: decided at step {line.step}: {line.text}")
        now = time.monotonic()
        step = view.name, view.step
        is_due = now - self._last_print >= _PLAIN_INTERVAL_S if view.is_running else step != self._last_step
        if view.ranks and is_due:
            self._last_print, self._last_step = now, step
            self._print(plain_line(view))

    def _new_decisions(self, view: LiveView) -> list[DecisionLine]:
        shown = self._last_decision.get(view.name)
        texts = [(line.step, line.text) for line in view.decisions]
        known = texts.index((shown.step, shown.text)) + 1 if shown and (shown.step, shown.text) in texts else 0
        if view.decisions:
            self._last_decision[view.name] = view.decisions[-1]
        return list(view.decisions[known:])

    def _print(self, text: str) -> None:
        print_line(self._console, printable(text))


def plain_line(view: LiveView) -> str:
    """Return step, loss, seconds, speed, plan and link in one line."""
    slowest = max(view.ranks, key=lambda rank: rank.step_s)
    split = ", ".join(f"{part} {format_seconds(seconds)}" for part, seconds in slowest.parts.items())
    parts = [
        f"{view.name}: step {_step_of(view)}",
        view.loss_text,
        f"{format_seconds(slowest.step_s)} per step{f' ({split})' if split else ''}",
        *view.pace[1:],
        view.speed or "",
        view.plan or "",
        *view.links[:1],
    ]
    return "  ".join(filter(None, parts))


def draw_view(view: LiveView) -> Panel:
    """Return the panel of a view."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", min_width=8)
    table.add_column(ratio=1)
    if view.num_steps is not None:
        done = 0 if view.step is None else view.step + 1
        bar = Table.grid(padding=(0, 1))
        bar.add_row(ProgressBar(total=view.num_steps, completed=done, width=_BAR_WIDTH), f"{done}/{view.num_steps}")
        table.add_row("step", bar)
        if view.loss is not None:
            table.add_row("loss", f"{view.loss:.3f}")
    elif view.step is not None:
        table.add_row("step", ", ".join(filter(None, (str(view.step), *view.pace, view.loss_text))))
    if view.plan is not None:
        table.add_row("plan", Text(printable(view.plan), style="bold"))
    if view.speed is not None:
        table.add_row("speed", view.speed)
    if view.ranks:
        table.add_row("ranks", _ranks(view.ranks))
    for index, link in enumerate(_shown_links(view.links) if view.is_running else ()):
        table.add_row("" if index else "link", Text(printable(link)))
    if view.decisions:
        table.add_row("decided", _decisions(view.decisions))
    for note in view.notes:
        table.add_row("note", Text(printable(note), style="yellow"))
    title = Text(printable(view.name) + ("" if view.is_running else " (ended)"))
    return Panel(table, title=title, title_align="left", border_style="cyan" if view.is_running else "dim")


def _shown_links(links: Sequence[str]) -> Sequence[str]:
    num_more = len(links) - _SHOWN_LINKS
    return [*links[: _SHOWN_LINKS - 1], f"and {num_more + 1} more nodes"] if num_more > 0 else links


def _step_of(view: LiveView) -> str:
    if view.step is None:
        return "-"
    return f"{view.step + 1}/{view.num_steps}" if view.num_steps is not None else str(view.step)


def _ranks(ranks: Sequence[RankLine]) -> RenderableType:
    """Return a line per rank: its seconds, and a bar of their parts as long as its share of the slowest."""
    slowest_s = max(rank.step_s for rank in ranks)
    slowest = sorted(ranks, key=lambda rank: rank.step_s, reverse=True)[:_SHOWN_RANKS]
    shown = slowest if len(ranks) > _SHOWN_RANKS else ranks
    grid = Table.grid(padding=(0, 1))
    for rank in shown:
        name = Text(printable(f"{rank.name} {rank.node}".strip()), style="yellow" if rank.is_slow else "")
        width = round(_BAR_WIDTH * rank.step_s / slowest_s) if slowest_s > 0 else 0
        grid.add_row(name, format_seconds(rank.step_s), _bar(rank.parts, width))
    if not any(rank.parts for rank in shown):
        return grid
    legend = Text()
    for part in PARTS:
        mean_s = sum(rank.parts.get(part, 0.0) for rank in shown) / len(shown)
        legend.append(f"{part} {format_seconds(float(f'{mean_s:.2g}'))}  ", style=_COLORS[part])
    rows: list[RenderableType] = [grid, legend]
    if len(shown) < len(ranks):
        rows.append(Text(f"and {len(ranks) - len(shown)} faster ranks", style="dim"))
    return Group(*rows)


def _bar(parts: Mapping[str, float], width: int) -> Text:
    """Return a bar that the parts divide. Parts overlap, so their sum can exceed the step."""
    if not parts:
        return Text("plain DDP reports no parts", style="dim")
    text, total = Text(), sum(parts.values()) or 1.0
    drawn, passed = 0, 0.0
    for part, seconds in parts.items():
        passed += seconds
        end = round(width * passed / total)
        text.append("█" * (end - drawn), style=_COLORS[part])
        drawn = end
    return text


def _decisions(lines: Sequence[DecisionLine]) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(ratio=1)
    for line in lines:
        later = f"measured {format_seconds(line.measured_s)}" if line.measured_s is not None else "not measured"
        shown = shorten(printable(line.text), _SHOWN_CHARS, placeholder=" ...")
        text = Text(shown, style="bold" if line.is_change else "")
        grid.add_row(str(line.step), text)
        grid.add_row("", Text(f"predicted {format_seconds(line.predicted_s)} per step, {later}", style="yellow"))
    return grid
