"""Sentences that a user reads about a run: one per new plan, and the verdict at its end.

Both are made from lines of the journal, so the log, `cgx-ray report` and a journal that is read years later say the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any, NamedTuple

from cgx_ray.control.journal.facts import IN_MEMORY, link_between
from cgx_ray.control.policies.policy import MAX_SLOWDOWN
from cgx_ray.plan import STEPS_TOGETHER, plan_under
from cgx_ray.planner.fidelity import describe_loss
from cgx_ray.units import format_count, format_seconds

# Characters of a line of the log.
MAX_LINE = 120
# Share of the time from which a run counts as dense, and of a step from which compute bounds it.
MOSTLY = 0.85
DENSE = "dense"
# Share of the time between steps from which the verdict names it.
BETWEEN_IN_VERDICT = 0.1
# `made_by` of decisions for a few steps.
TRIALS = ("codec_trial", "dense_trial", "plan_trial")


def decision_line(entry: Mapping[str, Any], codec: str | None = None, *, first_step: int | None = None) -> str:
    """Return a decision of the journal in at most MAX_LINE characters, the cause last.

    codec       timed by a trial
    first_step  with the plan, which ranks get some steps after its decision; None until it is known
    """
    old, new, made_by = entry["old"]["plan"], entry["new"]["plan"], entry.get("made_by")
    at = f"decided at step {entry['step']}: " if first_step is None else f"from step {first_step} on: "
    is_tried = "cause" in entry
    cause = entry["cause"] if is_tried else entry["situation"]["cause"]
    if made_by in TRIALS:
        trials = {
            "codec_trial": f"trying {codec} on one layer, to time it",
            "dense_trial": f"{DENSE} for a few steps, to compare {old} with it",
            "plan_trial": f"trying {new} for a few steps",
        }
        return _line(at + trials[made_by], cause=cause if is_tried else "")
    if made_by == "return":
        before, _, found = entry["reason"].partition(": ")
        return _line(f"{at}back to {new}", cause=found if is_tried else before)
    if entry["kind"] == "keep":
        return _line(f"{at}stays with {new}", cause=cause)
    if made_by == "guard":
        cause = entry["reason"].partition(";")[0]
    step_s, dense_s = (format_seconds(float(f"{entry[f'predicted_{name}_s']:.2g}")) for name in ("step", "dense"))
    if is_tried:
        return _line(f"{at}{new}", f"; measured {step_s} per step, {DENSE} {dense_s}", cause)
    head = f"{at}{new}" if new != old else f"{at}other groups of {new}"
    if made_by == "guard" and new == old:
        # It ran already, to be compared with what is given up.
        head = f"{at}stays {new}"
    if new != DENSE:
        tail = f"; predicted {step_s} per step, {DENSE} {dense_s}"
    elif made_by == "policy":
        tail = f"; nothing promises less than its {step_s} per step"
    else:
        tail = f"; predicted {step_s} per step"
    # The old plan is in an earlier line, the cause is not.
    instead = f" instead of {old}" if new != old else ""
    if len(head) + len(instead) + len(tail) + 2 + len(cause) <= MAX_LINE:
        head += instead
    return _line(head, tail, cause)


def _line(head: str, tail: str = "", cause: str = "") -> str:
    """Join the parts. The tail gives way to a cause that has no room else, from its end."""
    first = tail.partition(", ")[0]
    tails = (tail, first, first.removesuffix(" per step"), "")
    with_cause = [f"{head}{kept}{'; ' if tail else ': '}{cause}" for kept in tails if cause]
    said = [*with_cause, *(head + kept for kept in tails)]
    return next((line for line in said if len(line) <= MAX_LINE), shorten(head, MAX_LINE, placeholder=" ..."))


class _InForce(NamedTuple):
    """A plan in words.

    loss      expected over dense's, None if it was not measured
    has_loss  False in journals of old versions, which say nothing of it
    is_trial  for a few measuring steps
    """

    plan: str
    loss: float | None
    has_loss: bool
    is_trial: bool = False

    @property
    def is_dense(self) -> bool:
        return self.plan == DENSE


@dataclass(kw_only=True)
class RunTotals:
    """Sums over the steps of a run, from lines of its journal. Times between steps are in `between_s` alone.

    plan      of the last steps, but for measuring steps; since which step. Ranks get a plan some steps after its
              decision, or never
    num_all   steps
    num_known those for which dense ones are known, `as_dense_s` the seconds of these
    in_dense_s
              seconds of steps that were dense, of which there are `num_in_dense`
    measured_s
              seconds of others, on networks where dense was measured
    num_ruled_layers
              layers with codecs of overrides=, which dense plans have too
    is_in_memory
              the newest decision keeps dense as all ranks are on one machine
    """

    plan: str = DENSE
    since: int = 0
    num_all: int = 0
    num_known: int = 0
    as_dense_s: float = 0.0
    in_dense_s: float = 0.0
    num_in_dense: int = 0
    measured_s: float = 0.0
    compute_s: float = 0.0
    all_s: float = 0.0
    between_s: float = 0.0
    num_ruled_layers: int = 0
    is_static: bool = False
    link: str = "network"
    is_in_memory: bool = False
    # Version, plan and step of a decision whose plan no step is known to have had.
    _decided: tuple[int, str, int] | None = None
    _plans: dict[int, _InForce] = field(default_factory=dict)
    # A line had a speed-up. Without any, dense steps alone say nothing.
    _has_speed_up: bool = False
    # Plan on trial of the last steps, "" if there was none.
    _tried: str = ""

    def add_line(self, entry: Mapping[str, Any]) -> None:
        """Add a line of the journal, in its order. Lines of other events change nothing."""
        if entry["event"] == "start":
            self.is_static = entry["policy"]["kind"] == "static"
            self.num_ruled_layers = entry.get("num_ruled_layers", 0)
            self.link = entry.get("link") or link_between(entry.get("nodes", ()))
            if entry["plan"].get("version", 0) <= max(self._plans, default=-1):
                # A run without the history of the one before: its plans have the same numbers.
                self._plans = {}
            self._take_plan(entry["plan"])
            if not self.num_all:
                self.plan = entry["plan"]["plan"]
        elif entry["event"] == "decision":
            self._take_plan(entry["old"])
            is_trial = entry.get("made_by") in TRIALS
            self.is_in_memory = entry.get("reason", "").endswith(IN_MEMORY)
            is_decided = entry["kind"] != "keep" and not is_trial
            self._take_plan(entry["new"], is_trial=is_trial, is_decided=is_decided)
            if is_decided:
                self._decided = entry["new"].get("version", 0), entry["new"]["plan"], entry["step"]
        elif entry["event"] == "progress" and entry["num_steps"] and entry["step_s"] > 0:
            self._add_progress(entry)

    def _take_plan(self, plan: Mapping[str, Any], *, is_trial: bool = False, is_decided: bool = False) -> None:
        # A plan on trial may be the one that is decided on.
        if "version" in plan and (is_decided or plan["version"] not in self._plans):
            new = _InForce(plan["plan"], plan.get("expected_loss"), "expected_loss" in plan, is_trial)
            self._plans[plan["version"]] = new

    def add_version(self, step: int, version: int) -> _InForce | None:
        """Take in that the ranks had the plan of this `version` from `step` on, and return the plan."""
        plan = plan_under(version, self._plans)
        if self._decided is not None and version >= self._decided[0]:
            self._decided = None
        if plan is not None and not plan.is_trial and plan.plan != self.plan:
            self.plan, self.since = plan.plan, step
        return plan

    def _add_progress(self, entry: Mapping[str, Any]) -> None:
        num_steps, seconds = entry["num_steps"], entry["num_steps"] * entry["step_s"]
        plan = self.add_version(entry["step"] - num_steps + 1, entry["version"])
        speed_up = entry.get("speed_up")
        self._has_speed_up |= speed_up is not None
        self._tried = plan.plan if plan is not None and plan.is_trial else ""
        self.num_all += num_steps
        self.all_s += seconds
        self.between_s += num_steps * entry.get("between_s", 0.0)
        self.compute_s += num_steps * min(entry["compute_s"], entry["step_s"])
        if plan is not None and plan.is_dense:
            # Those that end after the next decision have no speed-up in their line.
            speed_up = 1.0
            self.in_dense_s += seconds
            self.num_in_dense += num_steps
        elif entry.get("is_dense_measured"):
            self.measured_s += seconds
        if speed_up is not None:
            self.num_known += num_steps
            self.as_dense_s += speed_up * seconds

    @property
    def is_predicted(self) -> bool:
        """True if most other steps ran on networks where no dense step was measured."""
        return self.measured_s < (self.all_s - self.in_dense_s) / 2

    @property
    def expected_loss(self) -> float | None:
        """Loss over dense's that is expected of the plan at the end; None if it was not measured."""
        losses = [one.loss for one in self._plans.values() if one.plan == self.plan]
        return 1.0 if self.plan == DENSE else losses[-1] if losses else None

    @property
    def step_s(self) -> float:
        """Mean seconds of a step; 0 without steps."""
        return self.all_s / self.num_all if self.num_all else 0.0

    @property
    def dense_s(self) -> float | None:
        """Mean seconds of a dense step in place of those of the run, None if nothing is known of them."""
        return self.as_dense_s / self.num_known if self._has_speed_up else None

    @property
    def speed_up(self) -> float | None:
        """`dense_s` over `step_s`."""
        return self.dense_s / self.step_s if self.dense_s is not None else None

    def verdict(self, beside: tuple[float, float] | None = None) -> str:
        """Return what the run has brought, in one line. It holds for whole runs, also under several plans.

        beside  mean seconds of a step of this run, and of a run that was dense and trained beside it
        """
        besides, rules = (self._time_between, self._rules) if beside is None else ("", [])
        known = beside or (self.dense_s is not None and (self.step_s, self.dense_s))
        if not known:
            took = f", {format_seconds(self.step_s)} per step{besides}" if self.num_all else ""
            steps = format_count(self.num_all, "step")
            unknown = f"; how fast {DENSE} would be is not known" if self.plan != DENSE else ""
            return f"{steps} under {self.plan}{took}{unknown}"
        is_dense = self.in_dense_s >= MOSTLY * self.all_s
        if beside is None and is_dense and (self.plan == DENSE or self._compute_share >= MOSTLY):
            return self._dense_verdict()
        step_s, dense_s = known
        ratio, (took, dense_took) = dense_s / step_s, map(format_seconds, known)
        if beside is None and self.is_predicted:
            # A prediction may be far off: no ratio is made of it.
            ran = "was not measured"
            if self.num_in_dense:
                ran = f"took {format_seconds(self.in_dense_s / self.num_in_dense)} where it ran"
            said = (
                f"{took} per step on average{besides}; {DENSE} {ran}, and is predicted to take {dense_took} over the "
                "whole run"
            )
            return "; ".join([said, *self._about_plan()])
        digits = ".2f" if ratio < 1.1 else ".2g" if ratio < 9.95 else ".0f"
        said = f"{ratio:{digits}}x faster than {DENSE}"
        if ratio < MAX_SLOWDOWN:
            said = f"{1 / ratio:.2f}x slower than {DENSE}" if ratio < 1 / MAX_SLOWDOWN else f"as fast as {DENSE}"
        times = f"on average {took} instead of {dense_took} per step{besides}"
        return "; ".join([f"{said} ({times})", *rules, *self._about_plan()])

    def _about_plan(self) -> list[str]:
        # Rounds begin later.
        first = f"after {STEPS_TOGETHER} steps" if ", every " in self.plan else "from the first step on"
        since = f"since step {self.since}" if self.since else first
        since += f"; the last steps tried {self._tried}" if self._tried else ""
        since += f"; {late}" if (late := self._decided_late) else ""
        loss = self.expected_loss
        if self.plan == DENSE or not any(one.has_loss for one in self._plans.values()):
            return [f"{self.plan} {since}"]
        cost = f"expected loss {describe_loss(loss)}" if loss is not None else "its cost in loss was not measured"
        return [f"{self.plan} {since}", cost]

    @property
    def _decided_late(self) -> str:
        """A plan that was decided so late that no step is known to have had it, in words; empty if there is none."""
        if self._decided is None or self._decided[1] == self.plan:
            return ""
        _, plan, step = self._decided
        return f"{plan}, decided once step {step} was reported, came after the last reported step"

    @property
    def _compute_share(self) -> float:
        return self.compute_s / self.all_s if self.all_s > 0 else 0.0

    @property
    def _time_between(self) -> str:
        """How much of the time passed between steps, in words; "" if it was little."""
        share = self.between_s / (self.between_s + self.all_s) if self.between_s else 0.0
        return f", and {share:.0%} of the time passed between steps" if share >= BETWEEN_IN_VERDICT else ""

    @property
    def _rules(self) -> list[str]:
        num_layers = format_count(self.num_ruled_layers, "layer")
        return [f"both with the codecs of overrides= in {num_layers}"] if self.num_ruled_layers else []

    def _dense_verdict(self) -> str:
        compute = self._compute_share
        why = "no other plan promised enough"
        if self.is_in_memory:
            why = "all ranks are on one machine; on a network, or with simulated_link, compression may pay"
        elif compute >= MOSTLY:
            why = "compute bounds your steps, compression would not pay here"
        elif late := self._decided_late:
            why = late
        elif self.is_static:
            rest = f"{1 - compute:.0%} of a step is not compute"
            helps = "so policy adaptive may help"
            if self.link == "machine":
                helps = "but within a machine compression saves little of it"
            why = f"as policy static keeps it; {rest}, {helps}"
        share, step = self.in_dense_s / self.all_s, format_seconds(self.step_s)
        return f"{DENSE} {100 * share:.0f} % of the time, {step} per step{self._time_between}: {why}"
