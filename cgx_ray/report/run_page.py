"""The report of one run, or of several that are compared, as HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median
from typing import Any

from markupsafe import Markup

from cgx_ray.report import page
from cgx_ray.report.live_view import change_of, drift_note, fault_note, outcomes_of, plan_in_force
from cgx_ray.report.record import RunRecord
from cgx_ray.report.run_facts import (
    SpeedUp,
    between_share,
    counted_steps,
    dense_of,
    left_out_steps,
    loss_note,
    mean_parts,
    mean_step_s,
    next_step,
    num_changes,
    prediction_errors,
    spans,
    steps_s,
    world_size,
)
from cgx_ray.report.run_pictures import Picture, draw_comparison, draw_losses, run_pictures
from cgx_ray.report.svg import page_style
from cgx_ray.units import format_bytes, format_count, format_seconds

# Broken lines that are named one by one.
_NAMED_LINES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Inputs of a report besides the files.

    usd_per_hour  price of one worker, None if it was not given
    verdict       what a run has brought, in one line, given the dense run beside it; it needs the journal's totals
    speed_up      the same as a number
    timelines     draws the predicted steps before and after the decisions of a run; it needs the planner
    """

    usd_per_hour: float | None = None
    verdict: Callable[[RunRecord, RunRecord | None], str] = lambda record, dense: ""
    speed_up: Callable[[RunRecord, RunRecord | None], SpeedUp | None] = lambda record, dense: None
    timelines: Callable[[RunRecord], Sequence[Picture]] = lambda record: ()


def report_page(title: str, records: Sequence[RunRecord], extras: Extras) -> str:
    """Return the report of `records`, the dense one first if there is one."""
    dense = dense_of(records)
    body = [page.heading(1, title)]
    with page_style():
        if len(records) > 1:
            body += _comparison(records, dense, extras)
        detailed = [record for record in records if record is not dense or len(records) == 1]
        for index, record in enumerate(detailed):
            body += _run(record, dense, extras, prefix=f"r{index}", has_title=len(records) > 1)
    body += _broken(records)
    body.append(page.paragraph(f"Written by cgx-ray report on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.", kind="dim"))
    return page.page(f"{title}: cgx_ray report", body)


def _comparison(records: Sequence[RunRecord], dense: RunRecord | None, extras: Extras) -> list[Markup]:
    """Return a table and pictures of all runs side by side."""
    headings = ["run", "steps", "time", "mean step", "speed-up", "new plans", "validation loss"]
    headings += ["cost (USD)"] if extras.usd_per_hour is not None else []
    rows = []
    # Plain DDP writes no journal. The runs of a folder are compared since they have the same ranks.
    ranks = next((ranks for record in records if (ranks := world_size(record)) is not None), None)
    for record in records:
        found = spans(record)
        gained = extras.speed_up(record, dense) if record is not dense else None
        step_s = mean_step_s(found)
        loss = record.end["validation_loss"] if record.end is not None else None
        cost = _cost(record, extras, ranks)
        row = [
            record.name,
            str(sum(span.num_steps for span in found)),
            format_seconds(record.duration_s),
            f"{step_s:.3g} s" if step_s is not None else "-",
            f"{gained.ratio:.2f}x" if gained is not None and not gained.is_predicted else "-",
            str(num_changes(record)),
            f"{loss:.4g}" if loss is not None else "-",
        ]
        rows.append(row + ([f"{cost:.4g}" if cost is not None else "-"] if extras.usd_per_hour is not None else []))
    drawn = [picture for draw in (draw_comparison, draw_losses) if (picture := draw(records)) is not None]
    return [page.heading(2, "All runs"), page.table(headings, rows), page.pictures(drawn, "c")]


def _run(record: RunRecord, dense: RunRecord | None, extras: Extras, *, prefix: str, has_title: bool) -> list[Markup]:
    gained = extras.speed_up(record, dense)
    body = [page.heading(2, f"Run {record.name}" if has_title else "Summary")]
    if verdict := extras.verdict(record, dense):
        body.append(page.paragraph(f"{verdict}.", kind="verdict"))
    body.append(page.paragraph(_what_and_where(record)))
    body.append(page.numbers(_numbers(record, gained, extras)))
    if gained is not None:
        what = "Dense steps are" if gained.is_predicted else "The speed-up is"
        body.append(page.paragraph(f"{what} {gained.known_by}."))
    notes = (*fault_note(record.faults), *drift_note(record.drifts), *loss_note(record))
    body += [page.paragraph(f"Note: {note}.") for note in notes]
    body.append(page.paragraph(f"What to try next: {next_step(record, gained)}", kind="next"))
    spoken = f"Run {record.name}. " if has_title else ""
    drawn = [one._replace(alt=spoken + one.alt) for one in run_pictures(record)]
    if drawn:
        body += [page.heading(3, "Over the run"), page.pictures(drawn, f"{prefix}p")]
    if record.decisions:
        body += [page.heading(3, "Decisions"), _decisions(record)]
    timelines = [one._replace(alt=spoken + one.alt) for one in extras.timelines(record)]
    if timelines:
        body += [page.heading(3, "Steps before and after"), page.pictures(timelines, f"{prefix}t")]
    plan = plan_in_force(record)
    if plan is not None and "options" in plan:
        body += [page.heading(3, "Plan at the end"), _plan(plan)]
    return body


def _what_and_where(record: RunRecord) -> str:
    """Return one or two sentences on model, ranks and time."""
    ranks = world_size(record)
    texts = []
    if record.starts:
        start = record.starts[-1]
        layers, policy = start["layers"], start["policy"]
        numel = sum(layer["numel"] for layer in layers)
        dtypes = ", ".join(sorted({layer["dtype"] for layer in layers}))
        nodes = format_count(len(set(start["nodes"])), "node") if start["nodes"] else "unknown nodes"
        texts.append(
            f"A model of {len(layers)} layers with {numel / 1e6:.3g} million parameters ({dtypes}), trained by "
            f"{format_count(ranks or 0, 'rank')} on {nodes}, with policy {policy.get('name', policy['kind'])}."
        )
        if len(record.starts) > 1:
            texts.append(f"The workers were started {len(record.starts)} times.")
    elif ranks is not None:
        texts.append(f"A training with {format_count(ranks, 'rank')}.")
    found = spans(record)
    begin = datetime.fromtimestamp(record.start_time, UTC)
    texts.append(f"It began on {begin:%Y-%m-%d %H:%M:%S} UTC and trained for {format_seconds(record.duration_s)}")
    if found:
        left_out = left_out_steps(record)
        num_steps = format_count(sum(span.num_steps for span in found), "step")
        texts[-1] += f". Means are over {num_steps}, {counted_steps(record)}"
        texts[-1] += f"; steps left out: {left_out}" if left_out else ""
    texts[-1] += "."
    return " ".join(texts)


def _numbers(record: RunRecord, gained: SpeedUp | None, extras: Extras) -> list[tuple[str, str]]:
    found = spans(record)
    step_s, parts, errors = mean_step_s(found), mean_parts(found), prediction_errors(record)
    pairs = [("speed-up of the run", "unknown" if gained is None else f"{gained.ratio:.2f}x")]
    if gained is not None and gained.is_predicted:
        pairs = [("dense step, predicted", "unknown" if gained.dense_s is None else f"{gained.dense_s:.3g} s")]
    if step_s is not None:
        pairs.append(("mean step", f"{step_s:.3g} s"))
    if parts is not None and sum(parts) > 0:
        pairs.append(("compute share", f"{parts[0] / sum(parts):.0%}"))
    if share := between_share(found):
        pairs.append(("share between steps", f"{share:.0%}"))
    pairs.append(("decisions, new plans", f"{len(record.decisions)}, {num_changes(record)}"))
    if errors:
        usual, largest = median(map(abs, errors)), max(errors, key=abs)
        pairs.append(("usual prediction error", f"{usual:.0%}, largest {largest:+.0%}"))
    if record.end is not None:
        pairs.append(("validation loss", f"{record.end['validation_loss']:.4g}"))
    cost = _cost(record, extras, world_size(record))
    if cost is not None:
        pairs.append(("cost so far", f"{cost:.4g} USD"))
        if gained is not None:
            # The time between steps stays as it is.
            longer = 1 + (gained.ratio - 1) * min(steps_s(found) / record.duration_s, 1.0)
            predicted = ", predicted" if gained.is_predicted else ""
            pairs.append((f"with dense gradients{predicted}", f"{cost * longer:.4g} USD"))
    return pairs


def _cost(record: RunRecord, extras: Extras, ranks: int | None) -> float | None:
    if extras.usd_per_hour is None or ranks is None:
        return None
    return extras.usd_per_hour * ranks * record.duration_s / 3600


def _decisions(record: RunRecord) -> Markup:
    measured = outcomes_of(record.decisions, record.outcomes)
    rows = []
    for line, found_s in zip(record.decisions, measured, strict=True):
        predicted_s = line["predicted_step_s"]
        rows.append(
            [
                str(line["step"]),
                change_of(line),
                line["reason"],
                f"{predicted_s:.3g} s",
                f"{found_s:.3g} s" if found_s is not None else "-",
                f"{found_s / predicted_s - 1:+.0%}" if found_s is not None else "-",
                f"{line['predicted_dense_s']:.3g} s",
            ]
        )
    headings = ["after step", "decision", "reason", "predicted", "measured", "error", "dense, predicted"]
    return page.table(headings, rows, num_left=3)


def _plan(plan: Mapping[str, Any]) -> Markup:
    """Return the plan as a table, the options with most bytes first. Old journals count groups and layers only."""
    options = sorted(plan["options"].items(), key=lambda one: -one[1].get("dense_bytes", 0))
    total = max(1, sum(option.get("dense_bytes", 0) for _, option in options))
    rows = []
    for name, option in options:
        row = [option.get("text", name), str(option["groups"]), str(option["layers"])]
        if "dense_bytes" in option:
            row += [f"{option['dense_bytes'] / total:.1%}", format_bytes(option["dense_bytes"])]
            row += [format_bytes(option["wire_bytes"]), f"{option['dense_bytes'] / max(1, option['wire_bytes']):.3g}x"]
        rows.append(row + ["-"] * (7 - len(row)))
    return page.table(["option", "groups", "layers", "share of bytes", "dense", "encoded", "smaller"], rows)


def _broken(records: Sequence[RunRecord]) -> list[Markup]:
    broken = [line for record in records for line in record.broken]
    notes = [
        page.paragraph(line, kind="dim")
        for record in records
        for line in (*record.cut, *filter(None, [record.clipped]))
    ]
    if not broken:
        return notes
    more = [page.paragraph(f"... and {len(broken) - _NAMED_LINES} more")] if len(broken) > _NAMED_LINES else []
    lines = [page.paragraph(line, kind="dim") for line in broken[:_NAMED_LINES]]
    return [page.heading(2, f"Skipped: {format_count(len(broken), 'broken line')}"), *lines, *more, *notes]
