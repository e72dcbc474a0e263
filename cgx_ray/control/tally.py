"""Causes of decisions, and counts of decisions and reverts for the metrics."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple, get_args

# Few and fixed, because each is a value of a metric's label.
CauseKind = Literal[
    "first_measurements",
    "network",
    "step_time",
    "gain",
    "loss",
    "review",
    "failed_plan",
    "slower_than_dense",
    "compare_with_dense",
    "excursion_ended",
    "lease_ended",
    "restart",
]
CAUSE_KINDS: tuple[str, ...] = get_args(CauseKind)


class Cause(NamedTuple):
    """Reason to decide anew: its kind, and in words."""

    kind: CauseKind
    text: str


class Tally:
    """Counts of one worker group.

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
