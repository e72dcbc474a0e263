"""Policies look at a run and answer with a decision. They change nothing themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cgx_ray.plan import Layer, Plan, Scheme, make_plan
from cgx_ray.planner.options import DENSE, Estimate, Option, StepInputs, choose, estimate

# A change must promise this much, or noise would flip plans back and forth.
MIN_IMPROVEMENT = 0.05
# The promise: never slower than dense by more than this.
MAX_SLOWDOWN = 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Stay with the plan in force."""

    reason: str
    predicted: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """Go over to `plan`."""

    plan: Plan
    reason: str
    predicted: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Disable:
    """Go back to dense, `plan`: what compression promised did not come true."""

    plan: Plan
    reason: str
    predicted: Estimate


Decision = Keep | Replace | Disable


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a policy decides on.

    cause   why it is asked now, in words
    banned  options that were tried and were slower than dense
    """

    cause: str
    layers: tuple[Layer, ...]
    plan: Plan
    inputs: StepInputs
    banned: frozenset[Option] = field(default_factory=frozenset)


class Policy(Protocol):
    def decide(self, view: View) -> Decision | None:
        """None: this policy has no opinion."""


class StaticPolicy:
    """The user has chosen."""

    def decide(self, view: View) -> Decision | None:
        return None


class AdaptivePolicy:
    """The option with the smallest effective step time: predicted step time over the share of the gradient it keeps."""

    def __init__(self, options: Sequence[Option], *, min_gain: float, group_bytes: int) -> None:
        self._options = tuple(options)
        self._min_gain = min_gain
        self._group_bytes = group_bytes

    def decide(self, view: View) -> Decision:
        allowed = [option for option in self._options if option not in view.banned]
        ranked = choose(view.inputs, allowed, min_gain=self._min_gain)
        best = ranked[0]
        current = estimate(view.inputs, option_of(view.plan))
        dense = next(entry for entry in ranked if entry.option == DENSE)
        if best.option == current.option:
            return Keep(reason=f"{view.cause}; {_say(best, dense)}", predicted=current)
        is_allowed = any(entry.option == current.option for entry in ranked)
        breaks_promise = current.step_s > MAX_SLOWDOWN * dense.step_s
        if is_allowed and not breaks_promise and best.score > current.score * (1 - MIN_IMPROVEMENT):
            return Keep(
                reason=f"{view.cause}; {best.option} would be less than {MIN_IMPROVEMENT:.0%} better than "
                f"{current.option}",
                predicted=current,
            )
        return Replace(
            plan=next_plan(view.plan, view.layers, best.option, self._group_bytes),
            reason=f"{view.cause}; {_say(best, dense)}",
            predicted=best,
        )


def next_plan(plan: Plan, layers: Sequence[Layer], option: Option, group_bytes: int) -> Plan:
    """The plan after `plan`, with `option` for every layer worth compressing."""
    return make_plan(
        layers,
        version=plan.version + 1,
        world_size=plan.world_size,
        codec=option.codec,
        scheme=option.scheme,
        group_bytes=group_bytes,
    )


def option_of(plan: Plan) -> Option:
    """What a plan made by `make_plan` uses for the layers worth compressing."""
    group = next((group for group in plan.groups if group.scheme is not Scheme.DENSE), plan.groups[0])
    return Option(codec=group.codec, scheme=group.scheme)


def _say(chosen: Estimate, dense: Estimate) -> str:
    if chosen.option == DENSE:
        return f"nothing beats dense, {dense.step_s:.3f} s a step, bound by {dense.bound_by}"
    kept = f", keeps {chosen.gain:.1%} of the gradient" if chosen.gain is not None else ""
    return f"{chosen.option}: {chosen.step_s:.3f} s a step predicted, dense {dense.step_s:.3f} s{kept}"
