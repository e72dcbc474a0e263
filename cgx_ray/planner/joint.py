"""From measurements to the best plan: codec, scheme, hierarchy and where groups end, decided together."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from cgx_ray.errors import ConfigError
from cgx_ray.plan import DEFAULT_GROUP_BYTES, DENSE, NONE, Intra, Option, Scheme
from cgx_ray.planner.chain import FoundGroups, LayerChain
from cgx_ray.planner.planned_group import PlannedGroup
from cgx_ray.planner.prediction import Measured, Prediction, predict

MAX_GAP = 0.001
# Relative difference of scores that counts as none.
TIE = 1e-9
# Share by which a simulated step may be longer than the model's before the search is repeated: less is not worth the
# time.
MAX_ERROR = 0.01
_UNCOMPRESSED = Option(codec=NONE, scheme=Scheme.SRA)
# Factor by which links and codecs may take longer than measured before a step that compute bounds takes longer, where
# groups allow: real steps share processors and links with more than the model knows.
SLACK = 1.5
# Share by which such a plan may be longer, as measured.
SLACK_COST = 0.002
# Options that are simulated for the last group of the answer: about 1 ms each with 314 layers.
NUM_ENDS = 3
# Largest groups, in bytes of gradient, of plans that are simulated besides the answer of the search. The first is
# preferred: the engine overlaps several groups better than the pieces of one, which the model takes for perfect.
FINER_BYTES = (DEFAULT_GROUP_BYTES, 4 << 20, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestPlan:
    """Best plan, compared with dense.

    best   prediction of the best plan
    dense  nothing compressed except in fixed groups, summed by the vendor over all workers as in DDP
    gap    largest share of the score that a better plan could save: the simulated score of `best` against a lower bound
           that is proven for the model of `Pipeline`
    """

    best: Prediction
    dense: Prediction
    gap: float

    @property
    def speedup(self) -> float:
        """Speed-up of progress over dense, 1 if nothing is better than dense."""
        return self.dense.score / self.best.score if self.best.score > 0 else 1.0

    @property
    def is_compute_bound(self) -> bool:
        """True if compute takes 97 % or more of a dense step: no plan can save more than the rest."""
        return self.dense.compute_s >= 0.97 * self.dense.step_s


def best_plan(
    measured: Measured,
    options: Iterable[Option],
    *,
    min_gain: float = 0.0,
    max_gap: float = MAX_GAP,
    dense_groups: Sequence[PlannedGroup] = (),
) -> BestPlan:
    """Return the plan with the least step seconds / efficiency, over all groupings and all choices from `options`.

    min_gain      leaves out options with a smaller efficiency. Also left out: options of unknown gain, options that
                  cannot carry the largest layer (4 GiB per payload, 2^31 elements of sparse codecs), and hierarchies if
                  nodes have one rank
    max_gap       largest gap, as a share; 0 is exact
    dense_groups  DDP's groups; empty: the best grouping for dense

    The score is that of GraVAC, throughput times gain. The efficiency of a plan is that of its options, weighted by
    the elements that layers count as (`Measured.counted_numel`), so what it loses is a sum over its layers:

    1. For a score s, at first a guess, `search` finds the least finish + s x lost share: each layer has a toll for the
       share that its option loses in it.
    2. If that is no less than s, no plan has a smaller score than s, since finish / (1 - lost) < s means finish + s x
       lost < s. Else the search is repeated with the score of the plan that was found (Dinkelbach 1967), until no plan
       can be better by more than `max_gap`: one to four times.
    3. Nothing is searched if a lower bound of the finish of all plans (compute and the cheapest last exchange, or the
       cheapest network time) is no better than a plan without loss.
    4. Options that another one beats or equals in all costs (`GroupCost.terms`) and tolls are left out. So `_var` and
       `_auto` need gains of their own.
    5. Dense and all plans found so are simulated as the engine's thread runs them (`predict`), also
       with their groups cut into smaller ones. The best of these counts. The model knows one busiest resource per
       group. Where groups need different ones in turns, the simulated step may be longer than the model's. If it is by
       more than MAX_ERROR, the search is repeated as if a group's work hid behind its own messages only, and what it
       finds is simulated too.
    6. Where compute hides the exchange, many plans are equally good. The same search, over the options of the answer
       and with links and codecs SLACK times as slow, finds one that begins sooner. It is taken if its step, as
       measured, is longer by at most SLACK_COST.
    7. The last group takes the lossless or used option with which the simulated step is the best, of the NUM_ENDS that
       take the least time for it alone.

    Groups are made as in `make_plan`: small layers (`Layer.is_small`) are not compressed and go into groups of their
    own before the last one; so do layers of another dtype than most of the model. With nothing compressed, small layers
    stay in their place. Their backward counts with that of the next large layer. If scores are equal within 1e-9, the
    plan that keeps more wins. 314 tensors and 115 options take 15 to 110 ms, with hierarchies 45 to 200.
    """
    if not (math.isfinite(min_gain) and 0 <= min_gain <= 1):
        raise ConfigError(f"min_gain {min_gain!r} is not allowed; give a number from 0 to 1")
    if sum(len(group.layers) for group in measured.fixed) == len(measured.layers):
        only = predict(measured, dense_groups or measured.fixed)
        return BestPlan(best=only, dense=only, gap=0.0)
    large = LayerChain(measured, keeps_small=False)
    kept = _allowed(measured, large, options, min_gain)
    best, dense, bound = _simulated(measured, kept, max_gap)
    best = _polished(measured, large, kept, best, max_gap)
    if dense_groups:
        # DDP's groups are what users had, and measured. Others that seem a little better were up to 1.8x slower, where
        # ranks share processors. A compressed plan that is better than DDP's dense alone is not found.
        dense = predict(measured, dense_groups)
        best = dense if best.is_dense else best
    return BestPlan(best=best, dense=dense, gap=max(0.0, 1 - bound / best.score) if best.score > 0 else 0.0)


def best_round(measured: Measured, options: Iterable[Option], period: int, *, min_gain: float = 0.0) -> Prediction:
    """Return the plan with the least seconds / efficiency if ranks train alone for `period` steps in between.

    All groups are ready at once, when the steps are computed: so it is `best_plan` of a step with that compute.
    """
    found = (
        as_round(best_plan(of_round, pool, min_gain=min_gain).best.groups, period, pool)
        for of_round, pool in measured.rounds(period, list(options))
    )
    return min((predict(measured, groups) for groups in found), key=lambda plan: plan.score)


def as_round(groups: Iterable[PlannedGroup], period: int, options: Iterable[Option]) -> tuple[PlannedGroup, ...]:
    """Return `groups` with another period. Dense ones go over sra: in 2 hops, where the vendor's ring takes 2(N-1).

    They sum inside nodes first if all `options`, of which `groups` were chosen, do.
    """
    sums_inside = all(option.intra is not Intra.FLAT for option in options)
    dense = replace(_UNCOMPRESSED, intra=Intra.DENSE) if sums_inside else _UNCOMPRESSED
    return tuple(
        group._replace(period=period, option=dense if group.option == DENSE else group.option) for group in groups
    )


def _polished(
    measured: Measured, large: LayerChain, kept: dict[Option, float], best: Prediction, max_gap: float
) -> Prediction:
    """Take steps 6 and 7 of `best_plan`."""
    chosen = dict.fromkeys(group.option for group in best.groups if not group.is_fixed)
    used = {option: kept[option] for option in (DENSE, *chosen)}
    sooner = predict(measured, _simulated(measured.slowed(SLACK), used, max_gap)[0].groups)
    if sooner.score <= best.score * (1 + SLACK_COST):
        best = sooner
    ends = [option for option in kept if option.codec == NONE or option in used]
    return _with_best_end(measured, best, large.soonest(ends, best.groups[-1].numel)[:NUM_ENDS])


def _allowed(measured: Measured, large: LayerChain, options: Iterable[Option], min_gain: float) -> dict[Option, float]:
    """Return the efficiency of each option that may be chosen, and of dense."""
    kept = {DENSE: 1.0}
    for option in options:
        share = measured.efficiency(option)
        is_twin = option.intra is not Intra.FLAT and measured.network.is_flat(option.intra)
        if share is not None and share >= min_gain and large.fits(option) and not is_twin:
            kept[option] = measured.in_round(share)
    return kept


def _simulated(
    measured: Measured, kept: Mapping[Option, float], max_gap: float
) -> tuple[Prediction, Prediction, float]:
    """Return the best plan when simulated, dense, and a lower bound of the score. `kept`: efficiencies."""
    found = _search_plans(measured, kept, max_gap)
    dense, *others = (_best_cut(measured, plan.groups) for plan in found.plans)
    best = min((dense, *others), key=lambda plan: plan.score)
    if best.score > found.score * (1 + MAX_ERROR):
        serial = _search_plans(measured, kept, max_gap, shares_time=False)
        others = [_best_cut(measured, plan.groups) for plan in serial.plans]
        best = min(best, *others, key=lambda plan: plan.score)
    return best, dense, found.bound


def _with_best_end(measured: Measured, plan: Prediction, options: Iterable[Option]) -> Prediction:
    """Return `plan` with the best of `options` for its last group, as simulated.

    The search counts small layers as sent after all others, so the hops of the last group hide behind them. In a step
    they are sent before it, and nothing hides its hops.
    """
    *others, last = plan.groups
    if last.is_fixed or plan.is_dense:
        return plan
    plans = (predict(measured, (*others, last._replace(option=option))) for option in options)
    return min((plan, *plans), key=lambda found: found.score)


def _best_cut(measured: Measured, groups: Sequence[PlannedGroup]) -> Prediction:
    """Return the best prediction of `groups`, cut into parts of at most each of FINER_BYTES or as they are.

    Others than the first must gain more than MAX_ERROR: smaller groups keep processors busy with more than the model
    knows.
    """
    sizes = {layer.name: (layer.numel, layer.dense_bytes) for layer in measured.layers}
    cuts: list[tuple[PlannedGroup, ...]] = []
    for limit in (*FINER_BYTES, sys.maxsize):
        cut = tuple(part for group in groups for part in _parts(group, sizes, limit))
        # Limits that cut nothing more give the same groups, which are predicted once.
        if cut not in cuts:
            cuts.append(cut)
    preferred, *others = (predict(measured, cut) for cut in cuts)
    best = min(others, key=lambda plan: plan.score, default=preferred)
    return best if best.score < preferred.score * (1 - MAX_ERROR) else preferred


def _parts(group: PlannedGroup, sizes: Mapping[str, tuple[int, int]], limit: int) -> Iterator[PlannedGroup]:
    """Yield `group` cut into parts of at most `limit` bytes, as far as layers allow. Fixed groups stay whole.

    sizes  elements and bytes of each layer
    """
    if group.is_fixed or group.dense_bytes <= limit:
        yield group
        return
    names: list[str] = []
    numel = num_bytes = 0
    for name in group.layers:
        own_numel, own_bytes = sizes[name]
        if names and num_bytes + own_bytes > limit:
            yield PlannedGroup(tuple(names), numel, num_bytes, group.option)
            names, numel, num_bytes = [], 0, 0
        names.append(name)
        numel, num_bytes = numel + own_numel, num_bytes + own_bytes
    yield PlannedGroup(tuple(names), numel, num_bytes, group.option)


class _Found(NamedTuple):
    """Plans found by the model of `Pipeline`, dense first; the least score of them; a lower bound of all scores."""

    plans: list[FoundGroups]
    score: float
    bound: float


def _search_plans(
    measured: Measured, kept: Mapping[Option, float], max_gap: float, *, shares_time: bool = True
) -> _Found:
    """Search the best plans without loss and of all. `kept`: efficiencies; `shares_time` as in `group_cost`."""
    chain, large = (LayerChain(measured, keeps_small=small, shares_time=shares_time) for small in (True, False))
    dense = chain.solve([DENSE], max_gap)
    plans, score, bound = [dense], dense.finish_s, dense.bound_s
    lossless = [option for option in kept if option.codec == NONE]
    same_s = chain.bound_s(lossless)
    if same_s < score * (1 - TIE):
        found = chain.solve(lossless, max_gap)
        plans.append(found)
        score, same_s = min(score, found.finish_s), found.bound_s
    bound = min(bound, same_s)
    if not large.layers or len(lossless) == len(kept):
        # Fixed groups may be sent meanwhile, so all that is sure is that they make no step shorter.
        return _Found(plans, score, bound - chain.fixed_s)
    least_s = lossy = large.bound_s(list(kept))
    numel = sum(layer.numel for layer in measured.layers)
    lost = {option: (1 - share) / numel for option, share in kept.items()}
    # By all plans. Layers may count as more elements under one option than under another one.
    least_kept = 1 - large.most_toll_s(lost)
    tried = min(score, _guess(large, kept))
    while lossy < score * (1 - max(TIE, max_gap)):
        found = large.solve(list(kept), max_gap, {option: tried * share for option, share in lost.items()})
        # A plan with a smaller score keeps more than this, so it is better by no more than the lack over it.
        lack = found.bound_s - tried
        lossy = max(lossy, tried + min(lack, lack / max(least_s / score, least_kept)))
        if found.groups not in [plan.groups for plan in plans]:
            plans.append(found)
        share = 1 - found.toll_s / tried
        found_score = found.finish_s / share if share > 0 else math.inf
        if tried == score and found_score >= score * (1 - TIE):
            break
        tried = score = min(score, found_score)
    bound = min(bound, lossy)
    if chain.fixed_s:
        share = max((least_s - chain.fixed_s) / score, least_kept)
        bound = max(0.0, bound - chain.fixed_s / share) if share > 0 else 0.0
    return _Found(plans, score, bound)


def _guess(large: LayerChain, kept: Mapping[Option, float]) -> float:
    """Return a score near the least one: the least lower bound, over the shares that all options of a plan may keep."""
    shares = {share for option, share in kept.items() if option.codec != NONE}
    return min(large.bound_s([option for option in kept if kept[option] >= share]) / share for share in shares)
