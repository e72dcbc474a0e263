"""A cause that costs a step its time: who it is, what shows it, what mends it, and what that would gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from cgx_ray.why.records import RankRecord

# Share of the step that the network, a rank or input must cost to bound it: whoever mends less hardly notices.
BOUND_SHARE = 0.15
# Share of the time in which threads wait for a processor that is worth telling; more than on other ranks, a reason.
CROWDED = 0.05


class Bound(StrEnum):
    """Bound of the step."""

    NOTHING = "nothing"
    NETWORK = "network"
    RANK = "rank"
    INPUT = "input"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """One cause.

    seconds   of each step that it costs
    who       the path, rank or node
    phrase    as it ends "... s waiting for"
    evidence  what was measured
    remedy    the command or setting that mends it
    saves_s   seconds of each step that the remedy would gain; 0 if that cannot be said
    """

    bound: Bound
    seconds: float
    who: str
    phrase: str
    evidence: str
    remedy: str
    saves_s: float


def waiting_threads(records: Sequence[RankRecord]) -> str:
    """Return for how long threads of the usual rank wait for a processor, in words; "" if that is not worth telling."""
    waited = median(record.waited_share for record in records)
    return f"threads wait {waited:.0%} of the time for a processor" if waited > CROWDED else ""
