"""Plans that a user would write by hand, which others must clearly beat.

Others rest on more predictions and are harder to understand. Those with several schemes that promised to save 5 to 14 %
saved at most 3 % on nine emulated networks, and took up to 1.8 times as long where links are fast (log 131).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from cgx_ray.plan import LEAST_SHARE, CodecSpec, Option, Scheme, make_plan
from cgx_ray.planner.chain import max_numel
from cgx_ray.planner.joint import BestPlan
from cgx_ray.planner.planned_group import PlannedGroup, groups_of
from cgx_ray.planner.prediction import Measured, predict

# Codecs and schemes. Each is tried with every `intra` and device.
BY_HAND = (
    (CodecSpec.parse("bf16"), Scheme.ALLREDUCE),
    (CodecSpec.parse("qsgd:bits=3"), Scheme.SRA),
    (CodecSpec.parse("qsgd:bits=4"), Scheme.SRA),
    (CodecSpec.parse("qsgd:bits=4"), Scheme.ALLGATHER),
    (CodecSpec.parse("qsgd:bits=8"), Scheme.SRA),
)
# Shares of the score that others must save over them: with several schemes, and with one.
MIXTURE_SAVING, LEAST_SAVING = 0.15, 0.05


def plans_by_hand(
    measured: Measured, options: Iterable[Option], min_gain: float = 0.0
) -> list[tuple[PlannedGroup, ...]]:
    """Return the groups of the plans of BY_HAND with those of `options`; none if some layers have fixed options.

    min_gain  as for `best_plan`
    """
    layers, found = measured.layers, []
    longest = max((layer.numel for layer in layers), default=0)
    for option in options if not measured.fixed else ():
        keeps_enough = (measured.efficiency(option) or 0.0) >= min_gain
        if (option.codec, option.scheme) in BY_HAND and keeps_enough and longest <= max_numel(option):
            plan = make_plan(
                layers,
                version=0,
                world_size=measured.network.num_workers,
                codec=option.codec,
                scheme=option.scheme,
                intra=option.intra,
                device=option.device,
            )
            found.append(groups_of(plan, layers))
    return found


def unless_by_hand(
    found: BestPlan,
    measured: Measured,
    options: Iterable[Option],
    score: Callable[[Sequence[PlannedGroup]], float],
    *,
    min_gain: float = 0.0,
) -> BestPlan:
    """Return `found` unless its best plan saves less than LEAST_SAVING over plans by hand and dense.

    With several schemes it must save MIXTURE_SAVING. Plans by hand must save LEAST_SAVING over dense.

    options   of plans by hand that may be taken
    score     of the groups of a plan, smaller is better
    min_gain  as for `best_plan`
    """
    by_hand = plans_by_hand(measured, options, min_gain)
    if not by_hand:
        return found
    dense = found.dense.groups
    best = min((*by_hand, dense), key=lambda groups: score(groups) * (1 - LEAST_SAVING if groups == dense else 1))
    promised = MIXTURE_SAVING if _mixes_schemes(found.best.groups) else LEAST_SAVING
    return with_best(found, best, measured, score, promised=promised)


def _mixes_schemes(groups: Sequence[PlannedGroup]) -> bool:
    """Return whether several schemes have LEAST_SHARE of the gradient each."""
    least_bytes = LEAST_SHARE * sum(group.dense_bytes for group in groups)
    return len({group.option.scheme for group in groups if group.dense_bytes >= least_bytes}) > 1


def with_best(
    found: BestPlan,
    other: Sequence[PlannedGroup],
    measured: Measured,
    score: Callable[[Sequence[PlannedGroup]], float],
    *,
    promised: float,
) -> BestPlan:
    """Return `found` if its best plan saves the share `promised` of the score of `other`, else with `other` as best."""
    if other == found.best.groups:
        return found
    own, others = score(found.best.groups), score(other)
    if own <= (1 - promised) * others:
        return found
    gap = max(0.0, 1 - (1 - found.gap) * own / others)
    return replace(found, best=predict(measured, other), gap=gap)
