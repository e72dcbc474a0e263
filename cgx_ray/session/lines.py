"""Lines of the log at the start of a run and, where no control loop watches it, at its end."""

from __future__ import annotations

from pathlib import Path

from cgx_ray.control.journal.sentences import DENSE, MOSTLY
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.sharded.sharded_engine import ShardedEngine
from cgx_ray.plan import Plan
from cgx_ray.session.settings import Settings
from cgx_ray.units import format_count, format_seconds


def start_line(
    engine: Engine | ShardedEngine,
    settings: Settings | None,
    journal: Path | None,
    *,
    takes_folder: bool,
) -> str:
    """Return what begins now.

    settings      None if a plan was given, and nothing decides
    takes_folder  whether `attach` could write a journal if it were given a `folder`
    """
    plan, why = _in_force(engine), ""
    if plan != engine.plan:
        why = f" ({engine.plan.describe()} compresses between nodes only, and all ranks are on one)"
    size = f", {sum(layer.dense_bytes for layer in engine.layers) / 1e6:.3g} MB,"
    policy = ""
    if settings is not None and settings.decides:
        chosen_by = getattr(settings.policy, "fidelity", None)
        if candidates := getattr(settings.policy, "candidates", None):
            chosen_by = format_count(len(candidates), "candidate")
        policy = f"policy {type(settings.policy).__name__.lower()}{f' ({chosen_by})' if chosen_by else ''} begins "
    num_layers = format_count(sum(len(group.layers) for group in plan.groups), "layer")
    written = f"journal: {journal}" if journal is not None else f"no journal{': give folder=' if takes_folder else ''}"
    gathered = engine.parameter_codec if isinstance(engine, ShardedEngine) else None
    beside = f", parameters {gathered.describe()}" if gathered is not None else ""
    return (
        f"gradients of {num_layers}{size} go through cgx_ray on {plan.world_size} ranks; "
        f"{policy}{plan.describe()}{why}{beside}; {written}"
    )


def _in_force(engine: Engine | ShardedEngine) -> Plan:
    """Return the plan of the engine, as far as its ranks have nodes for it."""
    is_on_one_node = isinstance(engine, Engine) and engine.sums.num_nodes == 1
    return engine.plan.on_one_node() if is_on_one_node else engine.plan


def end_line(engine: Engine | ShardedEngine, *, takes_folder: bool) -> str:
    """Return what the steps have taken, from sums in memory. `takes_folder` as in `start_line`."""
    totals, plan = engine.telemetry.totals, _in_force(engine)
    said = f"{format_count(totals.num_steps, 'step')} under {plan.describe()}"
    if totals.num_steps:
        share = totals.compute_s / totals.all_s
        said += f", {format_seconds(totals.all_s / totals.num_steps)} each, compute is {share:.0%} of it"
        # What a ring of ranks sends.
        dense_share = 2 * (plan.world_size - 1) / plan.world_size
        gathers = False
        if isinstance(engine, ShardedEngine):
            dense_share, gathers = engine.dense_share, engine.parameter_codec is not None
        wire, dense = (
            f"{each / totals.num_steps / 1e6:.3g} MB" for each in (totals.wire_bytes, dense_share * totals.dense_bytes)
        )
        is_dense = plan.describe() == DENSE
        said += f"; a rank sent {wire}{' with the parameters' if gathers else ''} per step"
        said += f", dense sends {dense}" if not (is_dense or gathers) else ""
        if share >= MOSTLY and is_dense:
            said += "; compute bounds your steps, compression hardly pays here"
    return f"{said}{'; attach(folder=) writes a journal for `cgx-ray report`' if takes_folder else ''}"
