"""Decisions of a journal, made again from their recorded inputs by the policy of this version, or by another one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cgx_ray.control.journal.lines import FORMAT
from cgx_ray.control.journal.recorded import read_groups, read_layers, read_policy, read_situation
from cgx_ray.control.policies.adaptive import Adaptive
from cgx_ray.control.policies.policy import Decision, Policy, Situation
from cgx_ray.control.trial.measuring_steps import codec_trial
from cgx_ray.errors import CGXError, ConfigError
from cgx_ray.plan import NONE, CodecSpec, GroupPlan, Layer

# Decisions that the policy did not make, by `made_by`.
_BY_THE_LOOP = {
    "dense_trial": "dense measured for a few steps",
    "return": "return from measuring steps",
    "guard": "taken back by the guard",
}
# Why decisions for sharded models are not made again.
OF_SHARDED = "codecs are tried, and only measured steps tell which one comes next"
# Raised by inputs that make no sense to this version.
READ_ERRORS = (CGXError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionSummary:
    """A decision in short: "keep", "replace" or "disable", the plan in one phrase, and predicted seconds per step."""

    kind: str
    plan: str
    step_s: float
    dense_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedDecision:
    """A decision of the journal beside the one of now.

    recorded, step  None if the line is broken
    now      None if it was not made again, or if making it failed
    differs  another plan, or no decision where there was one
    note     why it was not made again, or what differs beyond the phrases of the two plans; else empty
    """

    step: int | None
    made_by: str
    recorded: DecisionSummary | None
    now: DecisionSummary | None
    differs: bool
    note: str

    @property
    def is_made_again(self) -> bool:
        return self.now is not None or self.differs

    @property
    def has_other_prediction(self) -> bool:
        """Return whether the decision is the same, but its predicted seconds are not, beyond the rounding of exp."""
        if self.now is None or self.recorded is None or self.differs:
            return False
        pairs = ((self.recorded.step_s, self.now.step_s), (self.recorded.dense_s, self.now.dense_s))
        return not all(math.isclose(was, now) for was, now in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Changes to the recorded policy. None leaves a part as it was.

    other  in place of the recorded one, with its least gain, and its periods if `other` has candidates
    """

    other: Adaptive | None = None
    min_gain: float | None = None

    def __bool__(self) -> bool:
        return self.other is not None or self.min_gain is not None

    def policy(self, start: Mapping[str, Any]) -> Policy:
        """Return the policy of a `start` line with these changes."""
        fields = start["policy"]
        if self.other is None:
            return read_policy({"policy": fields | ({} if self.min_gain is None else {"min_gain": self.min_gain})})
        # Candidates say nothing of periods.
        periods = self.other.periods if self.other.candidates is None else tuple(fields.get("periods", (1,)))
        min_gain = fields.get("min_gain", self.other.min_gain) if self.min_gain is None else self.min_gain
        return replace(self.other, min_gain=min_gain, periods=periods)


class Replay:
    """Makes the decisions of one journal again, line by line.

    num_again, num_same, num_other_prediction
                 decisions that were made again; the same ones; those of them with other predicted seconds
    not_again    number of the others, by reason
    kinds        kinds of policy in the journal's start lines
    unmeasured   candidates without a measured gain in any decision that was made again: no plan can have them
    """

    def __init__(self, what_if: WhatIf) -> None:
        self._what_if = what_if
        self._layers: Sequence[Layer] = ()
        self._policy: Policy | None = None
        self._no_start = "no start line before it"
        self._candidates: set[CodecSpec] = set()
        self._measured: set[CodecSpec] = set()
        self.num_again = self.num_same = self.num_other_prediction = 0
        self.not_again: Counter[str] = Counter()
        self.kinds: set[str] = set()

    @property
    def num_different(self) -> int:
        return self.num_again - self.num_same

    @property
    def unmeasured(self) -> list[str]:
        return sorted(map(str, self._candidates - self._measured))

    def add_line(self, entry: Mapping[str, Any]) -> ReplayedDecision | None:
        """Add a line; return what became of its decision, or None for a line of another event.

        Raises ConfigError for a journal of a later format.
        """
        if entry["event"] == "start":
            self._start(entry)
        if entry["event"] != "decision":
            return None
        try:
            found = self._again(entry)
        except READ_ERRORS as error:
            self.not_again["its line is broken"] += 1
            return _skipped(entry, f"its line is broken ({type(error).__name__}: {error!s:.100})")
        if not found.is_made_again:
            self.not_again[found.note] += 1
            return found
        self.num_again += 1
        self.num_same += not found.differs
        self.num_other_prediction += found.has_other_prediction
        return found

    def _start(self, entry: Mapping[str, Any]) -> None:
        self._policy, self._no_start = None, "the start line before it is broken"
        number = entry.get("format")
        if isinstance(number, int) and number > FORMAT:
            raise ConfigError(f"the journal has format {number}, this version of cgx_ray reads {FORMAT}; update it")
        kind = None
        try:
            kind = entry["policy"]["kind"]
            self.kinds.add(kind)
            if kind == "paper":
                # Errors by layer would make the journal long, and "flexible" goes by what it decided last.
                self._no_start = f"the journal lacks the inputs of policy {entry['policy']['name']}"
                return
            self._layers, policy = read_layers(entry), self._what_if.policy(entry)
        except READ_ERRORS as error:
            if kind == "own":
                self._no_start = str(error)
            return
        self._policy = policy
        self._candidates |= {option.codec for option in self._policy.options} - {NONE}

    def _again(self, entry: Mapping[str, Any]) -> ReplayedDecision:
        made_by = entry.get("made_by")
        if "cause" in entry:
            return _skipped(entry, OF_SHARDED)
        if "situation" not in entry or made_by is None:
            return _skipped(entry, "its inputs were not recorded: an old version wrote it")
        if made_by not in ("policy", "codec_trial"):
            return _skipped(entry, _BY_THE_LOOP.get(made_by, "made by a part of the loop that this version lacks"))
        if self._policy is None:
            return _skipped(entry, self._no_start)
        situation = read_situation(entry["situation"], self._layers)
        groups = read_groups(entry["new_groups"], self._layers)
        recorded = _recorded(entry)
        now = situation.planner_input.now
        self._measured |= {option.codec for option in self._policy.options if now.gain_of(option) is not None}
        # A policy that others wrote may raise anything.
        errors = CGXError if isinstance(self._policy, Adaptive) else Exception
        try:
            decision = decide_again(self._policy, situation)
        except errors as error:
            return _replayed(entry, recorded, None, differs=True, note=f"fails: {error}")
        if decision is None:
            return _replayed(entry, recorded, None, differs=True, note="no decision")
        return _compare(entry, recorded, groups, decision, situation)


def decide_again(policy: Policy, situation: Situation) -> Decision | None:
    """Return what the loop makes of the policy's answer: if that changes nothing, a codec may be timed in one layer."""
    decision = policy.decide(situation)
    trial = codec_trial(policy, situation, decision) if decision is not None and decision.kind == "keep" else None
    return trial[1] if trial is not None else decision


def _compare(
    entry: Mapping[str, Any],
    recorded: DecisionSummary,
    groups: tuple[GroupPlan, ...],
    decision: Decision,
    situation: Situation,
) -> ReplayedDecision:
    plan = decision.plan
    now = DecisionSummary(kind=decision.kind, plan=plan.describe(), step_s=decision.step_s, dense_s=decision.dense_s)
    same_period = plan.period == entry.get("new_period", plan.period)
    same_plan = decision.kind == "keep" or (plan.groups == groups and same_period)
    differs = recorded.kind != now.kind or not same_plan
    note = "in other groups" if differs and (recorded.kind, recorded.plan) == (now.kind, now.plan) else ""
    return _replayed(entry, recorded, now, differs=differs, note=note)


def _recorded(entry: Mapping[str, Any]) -> DecisionSummary:
    return DecisionSummary(
        kind=entry["kind"],
        plan=entry["new"]["plan"],
        step_s=float(entry["predicted_step_s"]),
        dense_s=float(entry["predicted_dense_s"]),
    )


def _replayed(
    entry: Mapping[str, Any], recorded: DecisionSummary, now: DecisionSummary | None, *, differs: bool, note: str
) -> ReplayedDecision:
    return ReplayedDecision(
        step=entry["step"], made_by=entry["made_by"], recorded=recorded, now=now, differs=differs, note=note
    )


def _skipped(entry: Mapping[str, Any], why: str) -> ReplayedDecision:
    """Return the decision as one that was not made again; of a broken line, as far as it can be read."""
    try:
        recorded = _recorded(entry)
    except READ_ERRORS:
        recorded = None
    step = entry.get("step")
    return ReplayedDecision(
        step=step if isinstance(step, int) else None,
        made_by=str(entry.get("made_by", "unknown")),
        recorded=recorded,
        now=None,
        differs=False,
        note=why,
    )
