"""Pictures of the predicted step before and after each change of plan, from what the journal says of the decision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cgx_ray.commands.plan.plan_picture import draw_change
from cgx_ray.control.journal.recorded import read_groups, read_layers, read_situation
from cgx_ray.errors import CGXError
from cgx_ray.plan import Plan
from cgx_ray.planner.planned_group import groups_of
from cgx_ray.planner.prediction import predict
from cgx_ray.report.record import RunRecord
from cgx_ray.report.run_pictures import Picture
from cgx_ray.report.svg import WIDTH

# Changes of plan that are drawn, the last ones: each picture takes some 50 KB of the page.
MAX_DRAWN = 6


def decision_steps(record: RunRecord) -> list[Picture]:
    """Return a picture per change of plan that the journal holds all inputs of.

    One whose inputs make no sense is left out, and named in `record.broken`.
    """
    changes = [line for line in record.decisions if line.get("new_groups") and "situation" in line]
    drawn = []
    for line in changes[-MAX_DRAWN:]:
        try:
            if _start_of(line, record) is not None:
                drawn.append(_draw(line, record))
        except (CGXError, LookupError, TypeError, ValueError, ArithmeticError) as error:
            record.name_broken(f"{record.run_dir}: the decision after step {line['step']} cannot be drawn ({error!r})")
    return drawn


def _start_of(line: Mapping[str, Any], record: RunRecord) -> Mapping[str, Any] | None:
    """Return the first line of the worker group that a decision was made for."""
    return next((start for start in reversed(record.starts) if start["time"] <= line["time"]), None)


def _draw(line: Mapping[str, Any], record: RunRecord) -> Picture:
    start = _start_of(line, record)
    assert start is not None
    layers = read_layers(start)
    situation = read_situation(line["situation"], layers)
    new = Plan(
        version=line["new"]["version"],
        world_size=situation.plan.world_size,
        groups=read_groups(line["new_groups"], layers),
        # Earlier journals have none.
        period=line.get("new_period", 1),
    )
    measured = situation.planner_input.now
    before, after = (predict(measured, groups_of(plan, layers)) for plan in (situation.plan, new))
    return Picture(
        draw_change(before, after, width=WIDTH),
        f"After step {line['step']}: the planner's model of the step before and after, without learned errors. "
        f"New: {after.describe()}.",
        f"Predicted step before and after the decision at step {line['step']}: {1e3 * before.step_s:.3g} ms, bound by "
        f"{before.bound_by}, and {1e3 * after.step_s:.3g} ms, bound by {after.bound_by}.",
    )
