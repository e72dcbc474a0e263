"""`python -m bench accuracy`: validation loss after training with each codec, over dense, at equal steps.

Real trainings: four rank processes with one thread each, DistributedDataParallel and the engine, over loopback or in a
lab. Every codec gets the same weights, batches, learning rates and clipping as dense, so that losses are compared seed
by seed. Models are small, so that the full run (15 codecs, 3 workloads, 3 seeds, 300 steps) takes about 45 minutes on
two cores that others use too.

gpt_adamw  byte-level GPT with AdamW, weight decay and clipping
gpt_sgd    the same with SGD and momentum
digits     a CNN on scikit-learn's images of digits, with SGD and momentum
gpt_demo   the demo's GPT, 4.9 million parameters, with AdamW; only if asked for

dgc has a momentum of its own, so its optimizers have none (SGD: momentum, AdamW: beta1).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from rich.table import Table

from bench.accuracy.cases import CGX, POLICIES, AccuracyOptions, read_option
from bench.shared.ranks import run_ranks
from cgx_ray.plan import DENSE
from cgx_ray.report.result import Row
from cgx_ray.report.show import new_table
from cgx_ray.report.style import (
    BLUE,
    DENSE_COLOR,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    YELLOW,
    add_title,
    clean,
    new_figure,
    plain_numbers,
    save_figure,
)
from cgx_ray.units import format_count, format_rate

# A time to dense's last loss is the time to this multiple of it: a codec may end a little above it and be good enough.
NEAR_LOSS = 1.01
# 4 bits everywhere, which bits by layer are compared with.
STATIC = str(read_option("qsgd:bits=4"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """One training.

    option          "dense", codec over scheme, or "adaptive" with its fidelity if that is not the default
    points          (steps done, seconds of training, validation loss), ten of them; fewer if it has diverged
    wire_bytes      that one rank sends per step
    relative_error  largest of rank 0's messages at the points: squared error over |g|^2, without error feedback. NaN
                    for policies
    bytes_over_static, error_over_static
                    wire bytes, and error of the average over ranks, of the bits in force over those of 4 bits in the
                    same layers and steps; NaN if there were none
    step_s          median of the seconds of the steps in the second half of the training
    """

    workload: str
    option: str
    seed: int
    points: tuple[tuple[int, float, float], ...]
    has_diverged: bool
    wire_bytes: float
    relative_error: float
    bytes_over_static: float = math.nan
    error_over_static: float = math.nan
    step_s: float = math.nan

    @property
    def loss(self) -> float:
        """The last validation loss, infinite if the training has diverged."""
        return math.inf if self.has_diverged else self.points[-1][2]

    def seconds_to(self, loss: float) -> float | None:
        """Return the seconds of training until the validation loss was `loss`, None if it never was.

        Between two points the loss counts as a straight line.
        """
        before_s, before = 0.0, math.inf
        for _, seconds, now in self.points:
            if now <= loss:
                share = (before - loss) / (before - now) if before < math.inf else 1.0
                return before_s + share * (seconds - before_s)
            before_s, before = seconds, now
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecAccuracy:
    """All seeds of a codec in a workload, and those of dense, in the same order."""

    runs: tuple[TrainingRun, ...]
    dense: tuple[TrainingRun, ...]

    @property
    def workload(self) -> str:
        return self.runs[0].workload

    @property
    def option(self) -> str:
        return self.runs[0].option

    @property
    def num_diverged(self) -> int:
        return sum(run.has_diverged for run in self.runs)

    @property
    def ratios(self) -> list[float]:
        """Loss over dense's by seed, infinite for a training that has diverged."""
        return [run.loss / dense.loss for run, dense in zip(self.runs, self.dense, strict=True)]

    @property
    def ratio(self) -> float:
        """Mean of `ratios`."""
        return fmean(self.ratios)

    @property
    def wire_share(self) -> float:
        """Wire bytes over dense's."""
        return self.runs[0].wire_bytes / self.dense[0].wire_bytes

    @property
    def relative_error(self) -> float:
        return max(run.relative_error for run in self.runs)

    @property
    def curve(self) -> list[tuple[float, float, float]]:
        """Means over seeds of the points that all have reached."""
        by_point = zip(*(run.points for run in self.runs), strict=False)
        return [(fmean(p[0] for p in one), fmean(p[1] for p in one), fmean(p[2] for p in one)) for one in by_point]

    @property
    def speedup(self) -> float | None:
        """Dense's seconds to nearly its last loss over the codec's, mean over seeds; None if one never came there."""
        shares = []
        for run, dense in zip(self.runs, self.dense, strict=True):
            own_s, dense_s = (one.seconds_to(NEAR_LOSS * dense.loss) for one in (run, dense))
            if own_s is None or dense_s is None:
                return None
            shares.append(dense_s / own_s)
        return fmean(shares)

    def rows(self, *, is_timed: bool) -> Iterator[Row]:
        name = f"{self.workload} {self.option}"
        loss, dense = fmean(run.loss for run in self.runs), fmean(run.loss for run in self.dense)
        if self.num_diverged:
            yield Row(name=f"{name}: loss", value=None, unit="nats", baseline=dense)
            yield Row(name=f"{name}: diverged", value=self.num_diverged, unit="seeds")
        else:
            yield Row(name=f"{name}: loss", value=loss, unit="nats", baseline=dense, ratio=self.ratio)
            yield Row(name=f"{name}: least loss over dense", value=min(self.ratios), unit="x")
            yield Row(name=f"{name}: largest loss over dense", value=max(self.ratios), unit="x")
        wire_bytes, dense_bytes = self.runs[0].wire_bytes, self.dense[0].wire_bytes
        yield Row(name=f"{name}: wire", value=wire_bytes, unit="bytes", baseline=dense_bytes, ratio=self.wire_share)
        error = self.relative_error if math.isfinite(self.relative_error) else None
        yield Row(name=f"{name}: relative error", value=error, unit="share")
        if all(math.isfinite(run.bytes_over_static) for run in self.runs):
            # The goals are for bits that a policy has chosen.
            goals = ("<= 0.7", "<= 2") if self.option in CGX else (None, None)
            share, ratio = (fmean(values) for values in zip(*map(_over_static, self.runs), strict=True))
            yield Row(name=f"{name}: wire over 4 bits", value=share, unit="x", goal=goals[0])
            yield Row(name=f"{name}: error over 4 bits", value=ratio, unit="x", goal=goals[1])
        if is_timed:
            yield Row(name=f"{name}: time to dense's loss, faster by", value=self.speedup, unit="x")


def _over_static(run: TrainingRun) -> tuple[float, float]:
    return run.bytes_over_static, run.error_over_static


def rows_beside_static(accuracies: Sequence[CodecAccuracy], *, is_timed: bool) -> Iterator[Row]:
    """Yield loss, and in a lab time, of each policy over those of 4 bits everywhere after the same steps."""
    static = {one.workload: one for one in accuracies if one.option == STATIC}
    for one in accuracies:
        four = static.get(one.workload)
        if four is None or four.num_diverged or one.num_diverged or one.option not in POLICIES:
            continue
        pairs = list(zip(one.runs, four.runs, strict=True))
        name = f"{one.workload} {one.option}"
        loss = fmean(run.loss / other.loss for run, other in pairs)
        yield Row(name=f"{name}: loss over 4 bits", value=loss, unit="x", goal="<= 1.01")
        if is_timed:
            seconds = fmean(run.points[-1][1] / other.points[-1][1] for run, other in pairs)
            yield Row(name=f"{name}: seconds over 4 bits", value=seconds, unit="x", goal="<= 1")
            step = fmean(run.step_s / other.step_s for run, other in pairs)
            yield Row(name=f"{name}: step over 4 bits", value=step, unit="x", goal="<= 1")


def measure_accuracy(options: AccuracyOptions, on_run: Callable[[TrainingRun, float], None]) -> list[TrainingRun]:
    """Train all cases.

    on_run  called after each training with it and the fraction of trainings done

    Raises BenchError if a rank ends early, LabError if the lab cannot be made.
    """
    job = {
        "workloads": options.workloads,
        "ways": options.ways,
        "num_seeds": options.num_seeds,
        "num_steps": options.num_steps,
    }
    lines = run_ranks(
        "bench.accuracy.rank",
        job,
        name="bench accuracy",
        num_ranks=options.num_ranks,
        rate_bit_per_s=options.rate_bit_per_s,
    )
    num_runs = options.num_seeds * len(options.workloads) * len(options.ways)
    runs = []
    for line in lines:
        runs.append(TrainingRun(**json.loads(line)))
        on_run(runs[-1], len(runs) / num_runs)
    return runs


def accuracies_of(runs: Sequence[TrainingRun]) -> list[CodecAccuracy]:
    """Return the seeds of each codec in each workload together, in the order of `runs`."""
    cases: dict[tuple[str, str], list[TrainingRun]] = {}
    for run in runs:
        cases.setdefault((run.workload, run.option), []).append(run)
    return [
        CodecAccuracy(runs=tuple(found), dense=tuple(cases[workload, str(DENSE)]))
        for (workload, _), found in cases.items()
    ]


def rows_of(options: AccuracyOptions, accuracies: Sequence[CodecAccuracy]) -> list[Row]:
    """Return the numbers as rows, after those that say what was run."""
    is_timed = options.rate_bit_per_s is not None
    return [
        Row(name="ranks", value=options.num_ranks, unit="processes"),
        Row(name="steps", value=options.num_steps, unit="steps"),
        Row(name="seeds", value=options.num_seeds, unit="seeds"),
        *(row for one in accuracies for row in one.rows(is_timed=is_timed)),
        *rows_beside_static(accuracies, is_timed=is_timed),
    ]


_COLORS = {
    "none": DENSE_COLOR,
    "dense": DENSE_COLOR,
    "bf16": GREY,
    "qsgd": BLUE,
    "terngrad": SKY,
    "topk": PURPLE,
    "dgc": ORANGE,
    "ef_signsgd": YELLOW,
    "powersgd": GREEN,
    "adaptive": INK,
    "cgx": SKY,
}
_DASHES = ("-", "--", ":", "-.", (0, (1, 3)))
# Losses over dense that the levels of fidelity allow.
_LEVELS = (1.01, 1.05)
# Larger losses over dense are written instead of drawn: the differences of 1 % could not be seen beside them.
_MAX_DRAWN = 1.42


def accuracy_table(options: AccuracyOptions, accuracies: Sequence[CodecAccuracy]) -> Table:
    """Return a table with a row per codec: wire bytes, and the loss of each workload, over dense."""
    title = f"validation loss / dense loss after {options.num_steps} steps, mean and range of {options.num_seeds} seeds"
    table = new_table(title, "", "bytes / dense", *options.workloads, gap=0, wrap=True)
    for option in dict.fromkeys(one.option for one in accuracies):
        found = {one.workload: one for one in accuracies if one.option == option}
        wire_share = max(one.wire_share for one in found.values())
        is_timed = options.rate_bit_per_s is not None
        cells = (_cell(found[workload], is_timed=is_timed) for workload in options.workloads)
        table.add_row(_short(option), f"{wire_share:.3f}", *cells)
    return table


def _cell(one: CodecAccuracy, *, is_timed: bool) -> str:
    if one.num_diverged:
        return f"diverged ({one.num_diverged} of {len(one.runs)})"
    if one.option == str(DENSE):
        return f"loss {sum(run.loss for run in one.runs) / len(one.runs):.4f}"
    speedup = f", {one.speedup:.1f}x as fast" if is_timed and one.speedup is not None else ""
    return f"{one.ratio:.4f} ({min(one.ratios):.3f}..{max(one.ratios):.3f}){speedup}"


def beside_static_table(accuracies: Sequence[CodecAccuracy], *, is_timed: bool) -> Table | None:
    """Return a table of what bits by layer save over 4 bits everywhere; None if no codec has bits."""
    found = [one for one in accuracies if all(math.isfinite(run.bytes_over_static) for run in one.runs)]
    if not found:
        return None
    rows = {row.name: row for one in found for row in one.rows(is_timed=is_timed)}
    rows |= {row.name: row for row in rows_beside_static(accuracies, is_timed=is_timed)}
    columns = ("wire", "error", "loss", *(("seconds", "step") if is_timed else ()))
    table = new_table("over 4 bits everywhere, after the same steps", "", *columns, gap=0)
    for one in found:
        name = f"{one.workload} {_short(one.option)}"
        cells = (rows.get(f"{one.workload} {one.option}: {column} over 4 bits") for column in columns)
        table.add_row(name, *("" if row is None else f"{row.value:.3f}" for row in cells))
    return table


def plot_accuracy(options: AccuracyOptions, accuracies: Sequence[CodecAccuracy], path: Path) -> None:
    """Write the picture: a column per workload with the loss over steps, over time in a lab, and the last losses."""
    is_timed = options.rate_bit_per_s is not None
    num_rows, num_columns = 3 if is_timed else 2, len(options.workloads)
    figure = new_figure(2 + 4.6 * num_columns, 1 + 4.2 * num_rows)
    panels = figure.subplots(num_rows, num_columns, squeeze=False)
    styles = _styles(accuracies)
    for column, workload in enumerate(options.workloads):
        found = [one for one in accuracies if one.workload == workload]
        _draw_curves(panels[0][column], found, styles, 0, "step")
        panels[0][column].set_title(workload)
        if is_timed:
            _draw_curves(panels[1][column], found, styles, 1, "seconds of training")
        _draw_ratios(panels[-1][column], found, styles, has_names=column == 0)
    lines, names = panels[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", frameon=False, fontsize=8, ncols=2 + num_columns)
    network = "loopback" if options.rate_bit_per_s is None else format_rate(options.rate_bit_per_s)
    ranks = format_count(options.num_ranks, "rank")
    seeds = format_count(options.num_seeds, "seed")
    add_title(figure, f"python -m bench accuracy, {ranks}, {network}, {options.num_steps} steps, {seeds}")
    save_figure(figure, path)


def _styles(accuracies: Sequence[CodecAccuracy]) -> dict[str, dict[str, Any]]:
    """Return a colour per codec, and dashes that tell its variants apart."""
    styles: dict[str, dict[str, Any]] = {}
    used: dict[str, int] = {}
    for option in dict.fromkeys(one.option for one in accuracies):
        name = option.partition(":")[0].partition(" ")[0]
        dash = _DASHES[used.get(name, 0) % len(_DASHES)]
        styles[option] = {"color": _COLORS.get(name, INK), "linestyle": dash}
        used[name] = used.get(name, 0) + 1
    return styles


def _short(option: str) -> str:
    """Return an option without the scheme that its codec usually has."""
    if option in POLICIES:
        return option
    codec = option.partition(" over ")[0]
    return codec if option != codec and option == str(read_option(codec)) else option


def _draw_curves(
    axes: Axes, found: Sequence[CodecAccuracy], styles: dict[str, dict[str, Any]], x: int, x_label: str
) -> None:
    for one in found:
        curve, label = one.curve, _short(one.option)
        xs, losses = [point[x] for point in curve], [point[2] for point in curve]
        # Dense is drawn above the others.
        axes.plot(xs, losses, linewidth=1.4, label=label, zorder=3 if label == "dense" else 2, **styles[one.option])
    axes.set_yscale("log")
    plain_numbers(axes.yaxis, minor="12345678")
    axes.set(xlabel=x_label, ylabel="validation loss, nats")
    clean(axes)


def _draw_ratios(
    axes: Axes, found: Sequence[CodecAccuracy], styles: dict[str, dict[str, Any]], *, has_names: bool
) -> None:
    """Draw the last loss over dense's: a point at the mean of the seeds, a line from the least to the largest."""
    compared = [one for one in found if one.option != str(DENSE)]
    for level in (1.0, *_LEVELS):
        axes.axvline(level, color=INK, linewidth=0.8, linestyle="-" if level == 1 else ":")
    for place, one in enumerate(compared):
        color = styles[one.option]["color"]
        if one.ratio <= _MAX_DRAWN:
            axes.plot([min(one.ratios), max(one.ratios)], [place, place], color=color, linewidth=2)
            axes.plot([one.ratio], [place], "o", color=color, markersize=5)
        else:
            text = f"{one.ratio:.2f}" if math.isfinite(one.ratio) else "diverged"
            axes.annotate(f"{text} >", (_MAX_DRAWN, place), ha="right", va="center", fontsize=8, color=color)
    names = [_short(one.option) for one in compared] if has_names else [""] * len(compared)
    axes.set_yticks(range(len(compared)), names, fontsize=8)
    axes.set_ylim(len(compared) - 0.5, -0.5)
    axes.set_xlim(right=min(axes.get_xlim()[1], _MAX_DRAWN))
    axes.set(xlabel="last loss / dense's (dotted: 1.01, 1.05)")
    clean(axes)
