"""The verdict of `cgx-ray why`: one sentence, and all that it comes from. Pure: from the records of the ranks alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cgx_ray.units import format_count, format_seconds
from cgx_ray.why.advice import Compression, compression
from cgx_ray.why.hints import hints
from cgx_ray.why.network_costs import network_costs, stalled_cost
from cgx_ray.why.paths import Path, paths_of
from cgx_ray.why.rank_costs import input_costs, rank_costs
from cgx_ray.why.records import RankRecord
from cgx_ray.why.step_cost import BOUND_SHARE, Bound, StepCost
from cgx_ray.why.step_parts import StepParts, parts_of

# Exit status of the command. 1: there is nothing to judge.
EXIT_STATUS: Mapping[Bound | None, int] = {
    Bound.NOTHING: 0,
    None: 1,
    Bound.NETWORK: 3,
    Bound.RANK: 4,
    Bound.INPUT: 5,
}
# Share of the step below which a cause is not worth a line.
_LEAST_SHARE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """Verdict on the steps of a training.

    bound        None if no step was seen
    costs        causes, the most expensive first
    hints        what else is not as it should be
    compression  None if there is nothing to plan for
    """

    bound: Bound | None
    sentence: str
    parts: StepParts | None
    paths: tuple[Path, ...]
    costs: tuple[StepCost, ...]
    hints: tuple[str, ...]
    compression: Compression | None

    @property
    def exit_status(self) -> int:
        return EXIT_STATUS[self.bound]

    def described(self) -> dict[str, Any]:
        """Return the verdict for JSON."""
        return {"exit_status": self.exit_status, **asdict(self)}


def verdict_of(records: Sequence[RankRecord]) -> StepVerdict:
    """Return the verdict on `records`: one per rank that was seen, in order of ranks."""
    paths = paths_of(records)
    parts = parts_of(records)
    if parts is None:
        return _without_steps(records, paths)
    found = [*network_costs(records, parts, paths), *rank_costs(records, parts), *input_costs(records, parts)]
    costs = sorted(
        (cost for cost in found if cost.seconds >= _LEAST_SHARE * parts.step_s), key=lambda cost: -cost.seconds
    )
    bound = _bound(parts, costs)
    return StepVerdict(
        bound=bound,
        sentence=_sentence(parts, bound, costs),
        parts=parts,
        paths=paths,
        costs=tuple(costs),
        hints=hints(records, paths),
        compression=compression(records, parts, paths),
    )


def _bound(parts: StepParts, costs: Sequence[StepCost]) -> Bound:
    """Return what costs the most, if that is enough to be noticed."""
    of_bound = {
        Bound.NETWORK: parts.network_s,
        **{bound: sum(cost.seconds for cost in costs if cost.bound == bound) for bound in (Bound.RANK, Bound.INPUT)},
    }
    bound = max(of_bound, key=lambda one: of_bound[one])
    return bound if of_bound[bound] >= BOUND_SHARE * parts.step_s else Bound.NOTHING


def _sentence(parts: StepParts, bound: Bound, costs: Sequence[StepCost]) -> str:
    step, compute = format_seconds(parts.step_s), format_seconds(parts.compute_s)
    top = next((cost for cost in costs if cost.bound == bound), None)
    if top is None:
        share = min(1.0, parts.compute_s / parts.step_s)
        return (
            f"Your step takes {step}, and {share:.0%} of it computes: the network, a slow rank or input each cost less "
            f"than {BOUND_SHARE:.0%}. Nothing large to mend there, and nothing to compress."
        )
    waits_s = parts.network_s if bound is Bound.NETWORK else top.seconds
    rest_s = parts.step_s - parts.compute_s - waits_s
    rest = f" {format_seconds(rest_s)} other waits," if rest_s >= _LEAST_SHARE * parts.step_s else ""
    return f"Your step takes {step}: {compute} compute,{rest} {format_seconds(waits_s)} waiting for {top.phrase}."


def _without_steps(records: Sequence[RankRecord], paths: tuple[Path, ...]) -> StepVerdict:
    seen_s = max((record.seen_s for record in records), default=0.0)
    stalled = stalled_cost(records, paths, seen_s)
    if stalled is not None:
        sentence = f"No step has ended in {format_seconds(seen_s)}: it waits for {stalled.phrase}."
    elif not records:
        sentence = (
            "The script made no process group and no DDP model: one process trains alone, another library exchanges "
            "gradients, or cgx_ray is not installed in its Python."
        )
    elif not any(record.num_models for record in records):
        sentence = (
            f"{format_count(len(records), 'rank')} made a process group and built no DDP model, so steps are unknown, "
            "as those of FSDP2 models: all that can be said are links and nodes."
        )
    else:
        most = max(record.num_warm for record in records)
        sentence = f"Too few steps to judge: the script ended after {format_count(most, 'step')} to warm up."
    return StepVerdict(
        bound=Bound.NETWORK if stalled is not None else None,
        sentence=sentence,
        parts=None,
        paths=paths,
        costs=() if stalled is None else (stalled,),
        hints=hints(records, paths),
        compression=None,
    )
