"""The pictures of a run's report, each with its alternative text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cgx_ray.report.live_view import is_new_plan, outcomes_of
from cgx_ray.report.record import RunRecord, smooth_losses
from cgx_ray.report.run_facts import (
    StepSpan,
    between_share,
    density_and_bits,
    mean_parts,
    options_by_version,
    options_of,
    prediction_errors,
    shares_by,
    spans,
)
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
    add_bottom_legend,
    clean,
    codec_color,
    fit_values,
    label,
    new_figure,
)
from cgx_ray.report.svg import WIDTH

_PART_NAMES = ("compute", "encode", "exchange", "decode")
_PART_COLORS = (GREY, PURPLE, DENSE_COLOR, BLUE)
_GREYS = ("#8a8f96", "#b4b8bd", "#6b7077", "#d2d5d8")
_PALETTE = (BLUE, GREEN, ORANGE, PURPLE, SKY, YELLOW)
_HEIGHT = 2.7


class Picture(NamedTuple):
    """A figure, its caption, and a text for a person who cannot see it."""

    figure: Figure
    caption: str
    alt: str


def run_pictures(record: RunRecord) -> list[Picture]:
    """Return the pictures that the run's files have data for."""
    drawn: Sequence[Callable[[RunRecord], Picture | None]] = (
        draw_phases,
        draw_loss,
        draw_link,
        draw_predictions,
        draw_density,
        draw_shares,
    )
    return [picture for draw in drawn if (picture := draw(record)) is not None]


def draw_phases(record: RunRecord) -> Picture | None:
    """Draw the seconds per step by part over the steps, with a line at each change of plan."""
    found = spans(record)
    if not found:
        return None
    figure, axes = _axes()
    edges, parts = _edges(found), mean_parts(found)
    if parts is None:
        axes.stairs([span.step_s for span in found], edges, fill=True, color=DENSE_COLOR, label="step")
        alt = f"Seconds per step over {found[-1].step + 1} steps; the run reports no parts."
    else:
        below = [0.0] * len(found)
        for index, name in enumerate(_PART_NAMES):
            top = [
                low + (span.parts_s or (span.step_s, 0.0, 0.0, 0.0))[index]
                for low, span in zip(below, found, strict=True)
            ]
            axes.stairs(top, edges, baseline=below, fill=True, color=_PART_COLORS[index], label=name)
            below = top
        if share := between_share(found):
            top = [low + span.between_s for low, span in zip(below, found, strict=True)]
            axes.stairs(top, edges, baseline=below, fill=True, color=YELLOW, label="between steps")
        means = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in zip(_PART_NAMES, parts, strict=True))
        alt = f"Stacked seconds per step over {found[-1].step + 1} steps. On average: {means}."
        alt += f" Of the time {share:.0%} passed between steps." if share else ""
    changes = _mark_changes(axes, record)
    steps = ", ".join(map(str, changes))
    alt += f" The plan changed after step {steps}." if changes else " The plan never changed."
    axes.set(xlabel="step", ylabel="seconds per step", ylim=(0, None))
    axes.margins(x=0)
    _finish(axes, num_columns=6)
    return Picture(
        figure,
        "Where the time of a step goes. Of encoding, exchange and decoding only what compute did not hide. Between "
        "steps: evaluations, checkpoints and the like. Dashed: a new plan was decided.",
        alt,
    )


def draw_loss(record: RunRecord) -> Picture | None:
    """Draw the loss over the steps, where the run reports it."""
    figure, axes = _axes()
    if record.steps:
        steps, losses = [line.step for line in record.steps], smooth_losses(record.steps)
        axes.plot(steps, [line.loss for line in record.steps], color=BLUE, alpha=0.3, linewidth=1, label="loss")
        axes.plot(steps, losses, color=BLUE, linewidth=2, label="mean of 10 steps")
    else:
        known = [(line["step"], line["loss"]) for line in record.progress if line.get("loss") is not None]
        if not known:
            return None
        steps, losses = [step for step, _ in known], [loss for _, loss in known]
        axes.plot(steps, losses, color=BLUE, linewidth=2, label="mean of some steps and all ranks")
    _mark_changes(axes, record)
    axes.set(xlabel="step", ylabel="loss")
    _finish(axes)
    return Picture(
        figure,
        "Training loss. Dashed: a new plan was decided.",
        f"Training loss up to step {steps[-1]}, falling from {losses[0]:.3g} to {losses[-1]:.3g}."
        if losses[-1] < losses[0]
        else f"Training loss up to step {steps[-1]}, from {losses[0]:.3g} to {losses[-1]:.3g}.",
    )


def draw_link(record: RunRecord) -> Picture | None:
    """Draw the estimated bandwidth with the spread of its measurements, and what decisions used."""
    lines = [line for line in record.progress if line["bandwidth_gbps"] is not None]
    used = [(line["step"], line["inputs"]["bandwidth_gbps"]) for line in record.decisions]
    used = [(step, gbps) for step, gbps in used if gbps is not None]
    if not lines and not used:
        return None
    figure, axes = _axes()
    if lines:
        steps = [line["step"] for line in lines]
        low, value, high = zip(*(line["bandwidth_gbps"] for line in lines), strict=True)
        axes.fill_between(steps, low, high, color=SKY, alpha=0.35, linewidth=0, label="spread")
        axes.plot(steps, value, color=BLUE, linewidth=1.8, label="estimate")
    if used:
        axes.plot(*zip(*used, strict=True), "o", color=ORANGE, markersize=5, label="used by a decision")
    rates = [value for _, value in used] or [line["bandwidth_gbps"][1] for line in lines]
    axes.set(xlabel="step", ylabel="Gbit/s per rank")
    fit_values(axes)
    _mark_changes(axes, record)
    _finish(axes, num_columns=3)
    return Picture(
        figure,
        "Bandwidth of the slowest rank's link, as the training's own messages and probes show it. The spread is that "
        "of the measurements, and no confidence interval.",
        f"Estimated bandwidth over the steps, between {min(rates):.3g} and {max(rates):.3g} Gbit/s per rank.",
    )


def draw_predictions(record: RunRecord) -> Picture | None:
    """Draw the predicted and the measured seconds of each decision."""
    measured, errors = outcomes_of(record.decisions, record.outcomes), prediction_errors(record)
    if not errors:
        return None
    figure, axes = _axes()
    pairs = zip(record.decisions, measured, strict=True)
    known = [(line["step"], line["predicted_step_s"], found) for line, found in pairs if found is not None]
    for step, predicted_s, found_s in known:
        axes.plot([step, step], [predicted_s, found_s], color=INK, alpha=0.4, linewidth=1)
    steps, predicted, seconds = zip(*known, strict=True)
    axes.plot(steps, predicted, "D", color=ORANGE, markersize=6, label="predicted")
    axes.plot(steps, seconds, "o", color=BLUE, markersize=6, label="measured")
    dense = [(line["step"], line["predicted_dense_s"]) for line in record.decisions]
    axes.plot(
        *zip(*dense, strict=True), "_", color=DENSE_COLOR, markersize=9, markeredgewidth=2, label="dense, predicted"
    )
    axes.set(xlabel="decision after step", ylabel="seconds per step")
    fit_values(axes)
    _finish(axes, num_columns=3)
    worst = max(errors, key=abs)
    return Picture(
        figure,
        "Each decision's prediction beside what was measured afterwards.",
        f"Predicted and measured seconds per step of {len(known)} decisions. Measured differs from predicted by "
        f"{median(map(abs, errors)):.0%} usually (median), by {worst:+.0%} at worst.",
    )


def draw_density(record: RunRecord) -> Picture | None:
    """Draw density and bits per element over the steps."""
    found, known = spans(record), options_by_version(record)
    values = [density_and_bits(options_of(span.version, known)) for span in found]
    pairs = [(span, value) for span, value in zip(found, values, strict=True) if value is not None]
    if not pairs:
        return None
    density, bits = [100 * value[0] for _, value in pairs], [value[1] for _, value in pairs]
    if len({*density}) == len({*bits}) == 1:
        return None
    figure, axes = _axes()
    steps = [span.step for span, _ in pairs]
    axes.step(steps, density, where="post", color=GREEN, linewidth=2, label="density: kept elements (%)")
    axes.step(steps, bits, where="post", color=BLUE, linewidth=2, label="sent bits per element")
    axes.set(xlabel="step")
    fit_values(axes)
    _finish(axes)
    return Picture(
        figure,
        "Density and size of what is sent, weighted by elements.",
        f"Density went from {density[0]:.3g} to {density[-1]:.3g} %, sent bits per element from {bits[0]:.3g} to "
        f"{bits[-1]:.3g}. The smallest values were {min(density):.3g} % and {min(bits):.3g} bits.",
    )


def draw_shares(record: RunRecord) -> Picture | None:
    """Draw the share of the gradient's bytes under each codec, scheme and density over the whole run."""
    found = spans(record)
    kinds: dict[str, Mapping[str, float]] = {
        kind: shares_by(kind, record, found) for kind in ("codec", "scheme", "density")
    }
    # A bar of one colour says nothing that the plan does not.
    kinds = {kind: shares for kind, shares in kinds.items() if len(shares) > 1}
    if not kinds:
        return None
    figure, axes = _axes()
    for row, (kind, shares) in enumerate(kinds.items()):
        left, greys = 0.0, itertools.cycle(_GREYS)
        for name, share in shares.items():
            color = codec_color(name) if kind == "codec" or name == "dense" else next(greys)
            axes.barh(
                *(row, share), left=left, color=color, edgecolor="white", linewidth=0.8, height=0.62,
                label=label(f"{kind} {name} {share:.0%}"),
            )  # fmt: skip
            if share >= 0.13:
                axes.text(
                    left + share / 2,
                    row,
                    f"{label(name)}\n{share:.0%}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color="#111111",
                )
            left += share
    axes.set_yticks(range(len(kinds)), list(kinds))
    axes.set(xlim=(0, 1), xlabel="share of the gradients' bytes over all steps")
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _finish(axes, num_columns=3)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    texts = [
        f"{kind}: {', '.join(f'{name} {share:.0%}' for name, share in shares.items())}"
        for kind, shares in kinds.items()
    ]
    return Picture(
        figure, "Codecs, schemes and densities over the whole run.", f"Shares of all bytes. {'. '.join(texts)}."
    )


def draw_comparison(records: Sequence[RunRecord]) -> Picture | None:
    """Draw the step time of several runs over their steps."""
    drawn = [(record, found) for record in records if (found := spans(record))]
    if len(drawn) < 2:
        return None
    figure, axes = _axes()
    colors = itertools.cycle(_PALETTE)
    for record, found in drawn:
        color = DENSE_COLOR if record.name == "dense" else next(colors)
        axes.plot(
            [span.step for span in found],
            [span.step_s for span in found],
            color=color,
            linewidth=1.5,
            label=label(record.name),
        )
    axes.set(xlabel="step", ylabel="seconds per step")
    fit_values(axes)
    _finish(axes)
    names = ", ".join(record.name for record, _ in drawn)
    return Picture(figure, "Step time of all runs.", f"Seconds per step over the steps of the runs {names}.")


def draw_losses(records: Sequence[RunRecord]) -> Picture | None:
    """Draw the loss of several runs over seconds of training."""
    drawn = [record for record in records if record.steps]
    if len(drawn) < 2:
        return None
    figure, axes = _axes()
    colors = itertools.cycle(_PALETTE)
    for record in drawn:
        color = DENSE_COLOR if record.name == "dense" else next(colors)
        seconds = [line.time - record.start_time for line in record.steps]
        axes.plot(seconds, smooth_losses(record.steps), color=color, linewidth=1.8, label=label(record.name))
    axes.set(xlabel="seconds of training", ylabel="loss, mean of 10 steps")
    _finish(axes)
    ends = ", ".join(f"{record.name} {smooth_losses(record.steps)[-1]:.3g}" for record in drawn)
    return Picture(figure, "Loss of all runs over time.", f"Loss over seconds of training. Last values: {ends}.")


def _axes() -> tuple[Figure, Axes]:
    figure = new_figure(WIDTH, _HEIGHT)
    return figure, figure.subplots()


def _edges(found: Sequence[StepSpan]) -> list[float]:
    """Return the borders of the spans on an axis of steps. A restart repeats steps, so borders never go back."""
    edges = [found[0].step - found[0].num_steps + 0.5]
    for span in found:
        edges.append(max(span.step + 0.5, edges[-1] + 1e-9))
    return edges


def _mark_changes(axes: Axes, record: RunRecord) -> list[int]:
    """Draw a line after each step at which a new plan was decided; return the steps."""
    steps = [line["step"] for line in record.decisions if is_new_plan(line)]
    for step in steps:
        axes.axvline(step + 0.5, color=INK, linestyle="--", linewidth=0.9)
    return steps


def _finish(axes: Axes, num_columns: int = 2) -> None:
    clean(axes)
    figure = axes.get_figure(root=True)
    assert figure is not None
    handles, labels = axes.get_legend_handles_labels()
    entries = dict(zip(labels, handles, strict=True))
    style: dict[str, Any] = {"fontsize": 8, "columnspacing": 1.0, "handlelength": 1.3}
    add_bottom_legend(figure, entries, num_columns=num_columns, **style)


__all__ = ["Picture", "draw_comparison", "draw_losses", "run_pictures"]
