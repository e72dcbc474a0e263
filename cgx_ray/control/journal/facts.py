"""The controller's knowledge of the moment, as it is published as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from cgx_ray.control.network.estimate import Estimate

# Few and fixed, because each is a value of a metric's label, so in words that readers of boards know. The journal has
# the text of a cause, not its kind.
CauseKind = Literal[
    "first_measurements",
    "network",
    "compute",
    "prediction",
    "gain",
    "loss",
    "review",
    "ban",
    "slower_than_dense",
    "compare_with_dense",
    "trial_ended",
    "trial_expired",
    "restart",
]
# What lies between the ranks: a network, nothing but the memory of one machine, or a link that is simulated.
LinkKind = Literal["network", "machine", "simulated"]
# Why nothing but dense is tried, in the reason of a decision.
IN_MEMORY = "all ranks are on one machine, whose memory is faster than codecs"
CAUSE_KINDS: tuple[str, ...] = get_args(CauseKind)


def link_between(nodes: Collection[str]) -> LinkKind:
    """Return what lies between ranks, if no link is simulated. `nodes`: address of each rank's; empty if unknown."""
    return "machine" if len({*nodes}) == 1 else "network"


class When(NamedTuple):
    """Step after which the loop decides, its time by the controller's clock, and by that of the reporting node."""

    step: int
    now_s: float
    time_s: float


class Cause(NamedTuple):
    """Reason to decide again: its kind, and in words."""

    kind: CauseKind
    text: str


class DecisionCounts:
    """Decisions and reverts of one worker group.

    num_decisions  by kind of decision and kind of cause
    newest_s       time of the newest decision of each, in seconds since 1970 by the clock of the node that reported
    num_reverts    returns to an earlier plan, by cause
    """

    def __init__(self) -> None:
        self.num_decisions: Counter[tuple[str, str]] = Counter()
        self.newest_s: dict[tuple[str, str], float] = {}
        self.num_reverts: Counter[str] = Counter()

    def add_decision(self, kind: str, cause: CauseKind, time_s: float) -> None:
        self.num_decisions[kind, cause] += 1
        self.newest_s[kind, cause] = time_s

    def add_revert(self, cause: CauseKind) -> None:
        self.num_reverts[cause] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopFacts:
    """Network and step times as the controller knows them now; None if unknown.

    bandwidth         payload bytes per second of a worker's link, from the training's own messages or from probes
    is_link_known     False while the bandwidth is neither sure from messages nor measured by a probe
    num_impossible    rates so far that were dropped, as no link could have had them
    slow_link_bits_per_s
                      by rank, for ranks whose link is much slower than the others'
    slow_ranks        ranks whose compute takes much longer than the others'
    silent_nodes      ids of nodes that no longer answer the others
    silent_ranks      ranks whose samples have not come for seconds; steps count without them
    speed_up          of the newest steps over dense ones
    plan_version      of the newest plan
    num_decisions, newest_decision_s, num_reverts
                      see `DecisionCounts`
    num_faults        errors that ended the training on a rank, by rank and kind, over all worker groups
    report_age_s      by node, seconds from its last report to the last report of any node
    predicted_dense_step_s
                      of a dense step, predicted with the last decision; dense_step_s is the same as it is known now,
                      with the errors that dense steps have taught
    prediction_error  of the last outcome: measured over predicted seconds, less 1
    num_banned        options that are banned now
    is_dense_measured
                      dense steps were measured on the network of now
    """

    bandwidth: Estimate | None
    latency_s: float | None
    is_link_known: bool
    num_link_changes: int
    num_impossible: int
    slow_link_bits_per_s: Mapping[int, float]
    slow_ranks: frozenset[int]
    silent_nodes: frozenset[str]
    silent_ranks: frozenset[int]
    speed_up: float | None
    plan_version: int
    num_decisions: Mapping[tuple[str, str], int]
    newest_decision_s: Mapping[tuple[str, str], float]
    num_reverts: Mapping[str, int]
    report_age_s: Mapping[str, float]
    num_incomplete_steps: int
    predicted_step_s: float | None = None
    measured_step_s: float | None = None
    predicted_dense_step_s: float | None = None
    dense_step_s: float | None = None
    prediction_error: float | None = None
    num_banned: int = 0
    is_dense_measured: bool = False
    num_faults: Mapping[tuple[int, str], int] = field(default_factory=dict)

    @property
    def bandwidth_bits_per_s(self) -> float | None:
        return 8 * self.bandwidth.value if self.bandwidth is not None else None

    @property
    def bandwidth_spread_bits_per_s(self) -> Mapping[str, float]:
        """Lower and upper end of the bandwidth's spread; empty if the bandwidth is unknown."""
        rate = self.bandwidth
        return {"low": 8 * rate.low, "high": 8 * rate.high} if rate is not None else {}
