"""Costs of a rank that comes last, with why it does; and of input that all wait for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from cgx_ray.units import format_seconds
from cgx_ray.why.records import RankRecord
from cgx_ray.why.step_cost import CROWDED, Bound, StepCost, waiting_threads
from cgx_ray.why.step_parts import LateRank, StepParts

# Share of the time that a hypervisor gives to others, and that a container's limit stops it.
_STOLEN, _THROTTLED = 0.03, 0.03
_LOADER_REMEDY = "`DataLoader(num_workers=8, persistent_workers=True, prefetch_factor=4)`; less work between two steps"
_SCRIPT_REMEDY = "less work between two steps, or a process or thread that makes the next batch meanwhile"


def rank_costs(records: Sequence[RankRecord], parts: StepParts) -> Iterator[StepCost]:
    late = parts.late
    if late is not None:
        yield _late_cost(records, parts, late)
    crowd = waiting_threads(records)
    yield StepCost(
        bound=Bound.RANK,
        seconds=parts.uneven_s - parts.uneven_input_s,
        who="ranks in turns",
        phrase="ranks that come last in turns",
        evidence="they end backward at different times, now one later and now another one"
        + (crowd and f"; their {crowd}"),
        remedy="batches of equal work on all ranks, such as texts sorted by length; processors that nobody else uses",
        saves_s=parts.uneven_s - parts.uneven_input_s,
    )


def _late_cost(records: Sequence[RankRecord], parts: StepParts, late: LateRank) -> StepCost:
    bar = next(bar for bar in parts.bars if bar.rank == late.rank)
    others = [one for one in parts.bars if one is not bar]
    record = next(record for record in records if record.rank == late.rank)
    who = f"rank {late.rank} on {bar.node}"
    if late.waits_input:
        usual_s = median(one.input_s for one in others)
        return StepCost(
            bound=Bound.INPUT,
            seconds=late.cost_s,
            who=who,
            phrase=f"the input of {who}",
            evidence=f"last in {late.share:.0%} of the steps: {format_seconds(bar.input_s)} before forward, others "
            f"{format_seconds(usual_s)}",
            remedy=_input_remedy(records),
            saves_s=late.cost_s,
        )
    usual_s = median(one.compute_s + one.rest_s for one in others)
    reason, remedy = _why_slow(record, [one for one in records if one is not record])
    return StepCost(
        bound=Bound.RANK,
        seconds=late.cost_s,
        who=who,
        phrase=who,
        evidence=f"last in {late.share:.0%} of the steps: it computes {format_seconds(bar.compute_s + bar.rest_s)}, "
        f"others {format_seconds(usual_s)}{reason}",
        remedy=remedy,
        saves_s=late.cost_s,
    )


def _why_slow(record: RankRecord, others: Sequence[RankRecord]) -> tuple[str, str]:
    """Return what of a rank's node explains that it computes longer, and what mends that."""
    node, waited = record.node, record.waited_share
    others_waited = median(other.waited_share for other in others)
    if node.throttled_s > _THROTTLED * record.seen_s:
        return (
            f"; the limit of its container stops it {node.throttled_s / record.seen_s:.0%} of the time",
            "raise the container's limit of processors (`docker run --cpus`, `resources.limits.cpu`)",
        )
    if node.stolen_share > _STOLEN:
        return (
            f"; the hypervisor gives {node.stolen_share:.0%} of its processors to others",
            "move it to another machine, or to one with processors of its own",
        )
    if waited > others_waited + CROWDED:
        return (
            f"; its threads wait {waited:.0%} of the time for a processor, others {others_waited:.0%}",
            f"`top` on {node.name} shows what else runs there: end it, or give ranks processors of their own",
        )
    # The first rank of a node has asked its GPUs.
    gpus = [line for one in (record, *others) if one.node.name == node.name for line in one.node.gpus]
    for uuid, _, gpu in (line.partition(", ") for line in gpus):
        if uuid == record.gpu and _is_slowed(gpu):
            return f"; its GPU: {gpu}", f"`nvidia-smi -q -d PERFORMANCE,TEMPERATURE -i {uuid}` on {node.name}"
    return "", f"compare its batch size and device with the others'; `nvidia-smi`, `lscpu` on {node.name}"


def _is_slowed(gpu: str) -> bool:
    # Bits of nvidia-smi: power caps, thermal and hardware slowdowns. Idle clocks and the user's own are none.
    reasons = gpu.rpartition(",")[2].strip()
    return reasons.startswith("0x") and bool(int(reasons, 16) & 0xEC)


def _input_remedy(records: Sequence[RankRecord]) -> str:
    return _LOADER_REMEDY if any(record.has_loader for record in records) else _SCRIPT_REMEDY


def input_costs(records: Sequence[RankRecord], parts: StepParts) -> Iterator[StepCost]:
    remedy = _input_remedy(records)
    yield StepCost(
        bound=Bound.INPUT,
        seconds=parts.input_s,
        who="all ranks",
        phrase="input before each forward pass",
        evidence="on every rank that time passes between the optimizer's step and the next forward pass",
        remedy=remedy,
        saves_s=parts.input_s,
    )
    yield StepCost(
        bound=Bound.INPUT,
        seconds=parts.uneven_input_s,
        who="ranks in turns",
        phrase="the input of ranks in turns",
        evidence="before forward ranks take longer in turns, now one and now another one, and the others wait for it",
        remedy=remedy,
        saves_s=parts.uneven_input_s,
    )
