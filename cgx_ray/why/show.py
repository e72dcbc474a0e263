"""A verdict as text for a terminal, and as a page that works offline."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from cgx_ray.report import page
from cgx_ray.report.run_pictures import Picture
from cgx_ray.report.show import new_table, print_line
from cgx_ray.report.style import BLUE, DENSE_COLOR, GREY, ORANGE, SKY, YELLOW, clean, label, new_figure
from cgx_ray.report.svg import WIDTH, page_style
from cgx_ray.units import format_count, format_measured_rate, format_seconds
from cgx_ray.why.advice import describe_enough
from cgx_ray.why.paths import Path
from cgx_ray.why.step_parts import PAUSE, RankBar, StepParts
from cgx_ray.why.verdict import StepVerdict

# Parts of a bar in the order of time: name, field, letter in a terminal, colour.
_PARTS = (
    ("input", "input_s", "i", SKY),
    ("forward", "forward_s", "f", GREY),
    ("backward", "backward_s", "b", BLUE),
    ("waiting for other ranks", "waiting_s", "w", ORANGE),
    ("network", "network_s", "N", DENSE_COLOR),
    ("optimizer and rest", "rest_s", "o", YELLOW),
)
# Characters of a bar, and ranks and nodes that a terminal has room for: the slowest ones and the busiest.
_BAR, _SHOWN_RANKS, _SHOWN_NODES = 40, 8, 8


def show_verdict(console: Console, verdict: StepVerdict, notes: Sequence[str]) -> None:
    """Print the verdict. `notes`: what the report lacks."""
    print_line(console, f"cgx-ray why: {verdict.sentence}", style="bold")
    if verdict.parts is not None:
        _show_bars(console, verdict.parts)
    nodes = _nodes(verdict.paths)
    if len(nodes) > 1:
        table = new_table("links: rate, round trip, sent again", "from \\ to", *nodes, wrap=True)
        for source in nodes:
            table.add_row(source, *("\n".join(_cell(verdict.paths, source, target)) for target in nodes))
        console.print(table)
    for number, cost in enumerate(verdict.costs, start=1):
        saves = f" (gains {format_seconds(cost.saves_s)})" if cost.saves_s else ""
        print_line(console, f"{number}. {format_seconds(cost.seconds)} per step, {cost.who}: {cost.evidence}")
        print_line(console, f"   mend it: {cost.remedy}{saves}", style="yellow")
    for name, text in _advice(verdict):
        print_line(console, f"{name}: {text}")
    for hint in (*verdict.hints, *notes):
        print_line(console, f"note: {hint}", style="dim")


def verdict_page(command: str, verdict: StepVerdict, notes: Sequence[str]) -> str:
    """Return the verdict as one HTML file. `command`: of the script."""
    body = [page.heading(1, "Why is it slow?"), page.paragraph(command, kind="dim")]
    body.append(page.paragraph(verdict.sentence, kind="verdict"))
    parts = verdict.parts
    if parts is not None:
        body.append(
            page.numbers(
                [
                    ("step", format_seconds(parts.step_s)),
                    ("compute", format_seconds(parts.compute_s)),
                    ("network", format_seconds(parts.network_s)),
                    ("input", format_seconds(parts.input_s)),
                    ("ranks", str(len(parts.bars))),
                    ("steps observed", str(parts.num_steps)),
                    *([("left out, pauses", str(parts.num_pauses))] if parts.num_pauses else []),
                ]
            )
        )
        with page_style():
            body += [page.heading(2, "The step"), page.pictures([draw_bars(parts)], "b")]
    if verdict.costs:
        rows = [
            [
                cost.who,
                cost.evidence,
                cost.remedy.replace("`", ""),
                format_seconds(cost.seconds),
                format_seconds(cost.saves_s) if cost.saves_s else "-",
            ]
            for cost in verdict.costs
        ]
        headings = ["who", "what was seen", "what mends it", "costs per step", "gains"]
        body += [page.heading(2, "What it costs, and what mends it"), page.table(headings, rows, num_left=3)]
    if advice := _advice(verdict):
        body.append(page.heading(2, "What else would help"))
        body += [page.paragraph(f"{name}: {text}.", kind="next") for name, text in advice]
    nodes = _nodes(verdict.paths)
    if len(nodes) > 1:
        rows = [[source, *(", ".join(_cell(verdict.paths, source, target)) for target in nodes)] for source in nodes]
        body += [page.heading(2, "Links: rate, round trip, sent again"), page.table(["from \\ to", *nodes], rows)]
    notes = [*verdict.hints, *notes]
    if notes:
        body += [page.heading(2, "Notes"), *(page.paragraph(note) for note in notes)]
    return page.page(f"cgx-ray why: {command}", body)


def draw_bars(parts: StepParts) -> Picture:
    """Draw a bar per rank with the parts of its mean step."""
    figure = new_figure(2 * WIDTH, 1.2 + 0.28 * len(parts.bars))
    axes = figure.subplots()
    names = [label(f"rank {bar.rank}, {bar.node}", longest=28) for bar in parts.bars]
    left = [0.0] * len(parts.bars)
    for name, field, _, color in _PARTS:
        widths = [getattr(bar, field) for bar in parts.bars]
        axes.barh(names, widths, left=left, color=color, label=name, height=0.7)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step")
    axes.margins(y=0.02)
    clean(axes)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    means = "; ".join(f"rank {bar.rank}: {_spoken(bar)}" for bar in parts.bars[:_SHOWN_RANKS])
    return Picture(figure, "The mean step of each rank, from left to right.", f"Parts of the mean step. {means}.")


def _spoken(bar: RankBar) -> str:
    return ", ".join(f"{name} {format_seconds(getattr(bar, field))}" for name, field, *_ in _PARTS)


def _show_bars(console: Console, parts: StepParts) -> None:
    # A rank that waits the least is the one that others wait for.
    bars = sorted(parts.bars, key=lambda bar: bar.waiting_s)[:_SHOWN_RANKS]
    table = new_table(None, "rank", "node", f"mean of {format_count(parts.num_steps, 'step')}", "", num_left=3)
    for bar in sorted(bars, key=lambda bar: bar.rank):
        seconds = [getattr(bar, field) for _, field, *_ in _PARTS]
        scale = _BAR / max(parts.step_s, sum(seconds), 1e-9)
        drawn = "".join(letter * round(scale * one) for one, (_, _, letter, _) in zip(seconds, _PARTS, strict=True))
        table.add_row(str(bar.rank), bar.node, drawn, format_seconds(sum(seconds)))
    console.print(table)
    print_line(console, "  " + ", ".join(f"{letter} {name}" for name, _, letter, _ in _PARTS), style="dim")
    if parts.num_pauses:
        print_line(console, f"  left out: {_pauses(parts)}", style="dim")


def _pauses(parts: StepParts) -> str:
    return f"{format_count(parts.num_pauses, 'step')} that took over {PAUSE:g}x as long as usual"


def _nodes(paths: Sequence[Path]) -> list[str]:
    """Return the nodes of the paths, those of slow ones first if there are many."""
    by_rate = sorted(paths, key=lambda path: path.bytes_per_s)
    found = list(dict.fromkeys(node for path in by_rate for node in (path.source, path.target)))
    return sorted(found[:_SHOWN_NODES])


def _cell(paths: Sequence[Path], source: str, target: str) -> list[str]:
    path = next((path for path in paths if (path.source, path.target) == (source, target)), None)
    if path is None:
        return []
    parts = [format_measured_rate(8 * path.bytes_per_s) if path.bytes_per_s else "?"]
    parts += [format_seconds(path.round_trip_s)] if path.round_trip_s is not None else []
    parts += [f"{path.resent_share:.1%}"] if path.resent_share >= 0.001 else []
    return parts


def _advice(verdict: StepVerdict) -> list[tuple[str, str]]:
    found = verdict.compression
    if found is None:
        return []
    return [("compression would gain", found.sentence), ("a faster link would gain", describe_enough(found))]
