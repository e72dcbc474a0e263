"""Policies look at a run and answer with a decision. They change nothing themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cgx_ray.plan import DENSE, Option, Plan
from cgx_ray.planner.joint import BestPlan, best_plan
from cgx_ray.planner.prediction import Measured, Prediction, groups_of, predict

# A change must promise this much, or noise would flip plans back and forth.
MIN_IMPROVEMENT = 0.05
# The promise: never slower than dense by more than this.
MAX_SLOWDOWN = 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Stay with the plan in force. `dense_s`: predicted seconds of a dense step, in its own best groups."""

    reason: str
    predicted: Prediction
    dense_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """Go over to `plan`."""

    plan: Plan
    reason: str
    predicted: Prediction
    dense_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Disable:
    """Go back to dense, `plan`: what compression promised did not come true."""

    plan: Plan
    reason: str
    predicted: Prediction
    dense_s: float


Decision = Keep | Replace | Disable


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a policy decides on.

    cause   why it is asked now, in words
    banned  flat options that failed, in plans slower than dense or by a gain that fell; hierarchical ones of the same
            codec and scheme are banned too
    """

    cause: str
    plan: Plan
    measured: Measured
    banned: frozenset[Option] = field(default_factory=frozenset)


class Policy(Protocol):
    def decide(self, view: View) -> Decision | None:
        """None: this policy has no opinion."""


class StaticPolicy:
    """The user has chosen."""

    def decide(self, view: View) -> Decision | None:
        return None


class AdaptivePolicy:
    """The joint plan with the smallest score: predicted step time over the share of the gradient that it keeps."""

    def __init__(self, options: Sequence[Option], *, min_gain: float) -> None:
        self._options = tuple(options)
        self._min_gain = min_gain

    def decide(self, view: View) -> Decision:
        """The plan in force is scored under the new measurements as well, and only a better one takes its place."""
        measured = view.measured
        allowed = [option for option in self._options if option.flat() not in view.banned]
        found = best_plan(measured, allowed, min_gain=self._min_gain)
        best, dense_s = found.best, found.dense.step_s
        current = predict(measured, groups_of(view.plan, measured.layers))
        if best.groups == current.groups:
            return Keep(reason=f"{view.cause}; {_say(found)}", predicted=current, dense_s=dense_s)
        is_allowed = current.efficiency is not None and current.efficiency >= self._min_gain
        used = {option.flat() for option in current.options if option != DENSE}
        is_allowed = is_allowed and view.banned.isdisjoint(used)
        breaks_promise = not current.is_dense and current.step_s > MAX_SLOWDOWN * dense_s
        if is_allowed and not breaks_promise and best.score > current.score * (1 - MIN_IMPROVEMENT):
            return Keep(
                reason=f"{view.cause}; {best.describe()} would be less than {MIN_IMPROVEMENT:.0%} better than "
                f"{current.describe()}",
                predicted=current,
                dense_s=dense_s,
            )
        return Replace(
            plan=best.plan(version=view.plan.version + 1, world_size=view.plan.world_size),
            reason=f"{view.cause}; {_say(found)}",
            predicted=best,
            dense_s=dense_s,
        )


def _say(found: BestPlan) -> str:
    best, dense_s = found.best, found.dense.step_s
    if best.is_dense:
        return f"nothing beats dense, {dense_s:.3f} s a step, bound by {found.dense.bound_by}"
    assert best.efficiency is not None
    return (
        f"joint plan of {best.describe()}: {best.step_s:.3f} s a step predicted, dense {dense_s:.3f} s, keeps "
        f"{best.efficiency:.1%} of the gradient, gap {found.gap:.1%}"
    )
