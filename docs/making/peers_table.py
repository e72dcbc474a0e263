"""`python -m docs.making.peers_table` writes the tables of `bench peers` in docs/performance.md, and its picture.

Both are made from bench/data/peers.json, of the cells that a usual run measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from bench.peers.cases import ACCURACY_OF, DDP, JOINT, NOOP, USUAL_CELLS, WAYS, PeerCell
from bench.peers.record import BEST_GOAL, DDP_GOAL, LIMIT_GOALS, CellTimes, read_cells
from cgx_ray.report import style
from cgx_ray.units import format_rate, format_seconds

_ROOT = Path(__file__).resolve().parents[2]
DATA = _ROOT / "bench" / "data" / "peers.json"
PAGE = _ROOT / "docs" / "performance.md"
PICTURE = _ROOT / "docs" / "img" / "peers.png"
BEGIN, END = "<!-- begin of what is made by `bench peers` -->\n", "<!-- end of what is made by `bench peers` -->\n"
_COLORS = {
    "dense": style.DENSE_COLOR,
    "half": style.GREEN,
    "strict": style.BLUE,
    "local": style.PURPLE,
    "loose": style.ORANGE,
}


def usual() -> list[tuple[PeerCell, CellTimes]]:
    """Return the cells of a usual run that were measured, in their order."""
    found = read_cells(DATA)
    return [(cell, found[cell.name]) for cell in USUAL_CELLS if cell.name in found]


def _lines(rows: Iterable[Iterable[str]]) -> Iterator[str]:
    for row in rows:
        yield f"| {' | '.join(row)} |\n"


def tables(cells: list[tuple[PeerCell, CellTimes]]) -> str:
    """Return what was measured where, a table with a row per cell, and one with a row per way."""
    letters = [chr(ord("A") + index) for index in range(len(cells))]
    times = [time for _, time in cells]
    rows = [["", "model", "network", "f", "DDP", "exchange", "joint", "best other of its accuracy", "over its bound"]]
    rows.append(["---"] * len(rows[0]))
    for letter, (cell, time) in zip(letters, cells, strict=True):
        best, bound = time.best(with_engine=True), f"{time.over_limit:.2f}"
        network = f"{format_rate(cell.rate_bit_per_s)}, {format_seconds(cell.latency_s)}"
        ddp_s, share = format_seconds(time.ways[DDP.name].median_s), f"{time.exchange_share:.0%}"
        other = f"{best}, {time.ratio(best):.2f}"
        plan = time.joint.plan or ""
        rows.append([letter, cell.model, network, f"{time.divisor:g}", ddp_s, share, plan, other, bound])
    ways = [["way", "accuracy", *letters], ["---"] * (2 + len(letters))]
    for name in WAYS:
        shown = [f"{time.ratio(name):.2f}" if name in time.names else "" for time in times]
        if any(shown):
            ways.append([f"**{name}**" if name == JOINT.name else name, ACCURACY_OF.get(name, "limit"), *shown])
    runs = [run for time in times for run in time.runs]
    machines = sorted({f"{run.machine['cpu']}, {run.machine['cores']} cores" for run in runs})
    dates = [run.date for run in runs]
    spread = median(
        (way.quartiles_s[1] - way.quartiles_s[0]) / way.median_s for run in runs for way in run.ways.values()
    )
    head = f"{times[0].num_ranks} ranks, medians of {min(run.num_rounds for run in runs)} rounds or more;"
    where = f"{'; '.join(machines)}; {min(dates)} to {max(dates)}"
    return (
        f"{head} {where}.\nThe middle half of a way's steps spreads over {spread:.1%} of its time.\n\n"
        f"{''.join(_lines(rows))}\nGoals of joint: {DDP_GOAL} of DDP, {BEST_GOAL} of the best other; over its bound "
        f"{LIMIT_GOALS['median']} in the median cell,\n{LIMIT_GOALS['worst']} in the worst. Seconds over those of "
        f"plain DDP:\n\n{''.join(_lines(ways))}"
    )


def page() -> str:
    """Return the page with the tables made again."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{tables(usual())}\n{END}{rest.partition(END)[2]}"


def draw(cells: list[tuple[PeerCell, CellTimes]]) -> Figure:
    """Draw a line per cell with a mark per way at its seconds over those of plain DDP."""
    figure = style.new_figure(10, 1.6 + 0.42 * len(cells))
    axes = figure.subplots()
    for y, (_, time) in enumerate(cells):
        axes.plot(time.ratio(NOOP.name), y, "|", color=style.INK, markersize=16, markeredgewidth=2)
        for name in time.names:
            if name in ACCURACY_OF:
                color, filled = _COLORS[ACCURACY_OF[name]], WAYS[name].has_engine
                marker, size = ("D", 9) if name == JOINT.name else ("o", 6)
                axes.plot(time.ratio(name), y, marker, color=color, markersize=size, mfc=color if filled else "white")
    axes.set_yticks(range(len(cells)), [time.cell.replace("/", ", ") for _, time in cells])
    axes.set_ylim(len(cells) - 0.5, -0.5)
    axes.set_xscale("log")
    style.plain_numbers(axes.xaxis, minor="25")
    axes.set_xlabel("seconds of a step over those of plain DDP")
    style.clean(axes)
    marks = [
        ("|", style.INK, style.INK, "no exchange"),
        ("D", style.BLUE, style.BLUE, "joint"),
        ("o", style.GREY, "white", "without cgx_ray"),
    ]
    marks += [("o", color, color, name) for name, color in _COLORS.items()]
    handles = [Line2D([], [], ls="", marker=m, color=color, mfc=fill, label=text) for m, color, fill, text in marks]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    PAGE.write_text(page())
    style.save_figure(draw(usual()), PICTURE)
    print(PAGE, PICTURE)
