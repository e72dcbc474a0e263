"""Choice of the best plan with the errors that were learned, on one network or on average over several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean, harmonic_mean

from cgx_ray.control.learned_errors import LearnedErrors
from cgx_ray.plan import DENSE, Option
from cgx_ray.planner.cost import Link
from cgx_ray.planner.joint import BestPlan, best_plan
from cgx_ray.planner.prediction import Measured, PlannedGroup, Prediction, predict

# Searches per network, each of 3 to 260 ms, with thousands of layers 400.
MAX_SEARCHES = 4
# Share of the score below which a better plan is not searched for.
TOLERANCE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """Measurements to plan for.

    now           the measurements
    states        `now`; or several if the network changes too fast to follow, each as likely as the others
    errors        factors that predictions are multiplied with
    dense_groups  of dense, those of DDP; empty: the best ones for dense, as predicted
    """

    now: Measured
    states: Sequence[Measured]
    errors: LearnedErrors = field(default_factory=LearnedErrors)
    dense_groups: tuple[PlannedGroup, ...] = ()

    def score(self, groups: Sequence[PlannedGroup]) -> float:
        """Return seconds for the progress of a dense step, on average over the time."""
        scores = [predict(measured, groups).score for measured in self.states]
        return self.errors.factor(groups) * harmonic_mean(scores) if max(scores) < math.inf else math.inf

    def dense(self) -> Prediction:
        """Return the prediction of dense."""
        return predict(self.now, self.dense_groups) if self.dense_groups else best_plan(self.now, ()).dense

    def best(self, options: Sequence[Option], min_gain: float) -> BestPlan:
        """Return the best plan and dense, both predicted for `now`."""
        found = [plan for measured in self.states for plan in self._candidates(measured, options, min_gain)]
        if len(self.states) > 1:
            # A plan that is the best one in no state may be good in all.
            between = self._between()
            for codec in dict.fromkeys(option.codec for option in options):
                same = [option for option in options if option.codec == codec]
                found.append(best_plan(between, same, min_gain=min_gain, dense_groups=self.dense_groups))
        best = min(found, key=lambda plan: self.score(plan.best.groups))
        return replace(best, best=predict(self.now, best.best.groups), dense=predict(self.now, best.dense.groups))

    def _between(self) -> Measured:
        """Return the measurements with the geometric mean of all links."""
        links = [measured.network.between for measured in self.states]
        mean = Link(
            alpha_s=geometric_mean(link.alpha_s for link in links),
            beta_s_per_byte=geometric_mean(link.beta_s_per_byte for link in links),
        )
        return replace(self.now, network=replace(self.now.network, between=mean))

    def _candidates(self, measured: Measured, options: Sequence[Option], min_gain: float) -> list[BestPlan]:
        """Return plans of which one is the best under `measured`, with learned errors.

        The planner knows no errors of options. So while the plan that it finds has an option with a larger error than
        others have, it searches again among those with smaller errors.
        """
        errors, pool, plans = self.errors, list(options), []
        best_s = math.inf
        for _ in range(MAX_SEARCHES):
            found = best_plan(measured, pool, min_gain=min_gain, dense_groups=self.dense_groups)
            for plan in (found, replace(found, best=found.dense, gap=0.0)):
                plans.append(plan)
                best_s = min(best_s, errors.factor(plan.best.groups) * plan.best.score)
            used = [option for option in found.best.options if option in pool and option != DENSE]
            least = min((errors.option_factor(option) for option in pool), default=1.0)
            if not used or least * found.best.score > best_s * (1 - TOLERANCE):
                break
            worst = max(map(errors.option_factor, used))
            pool = [option for option in pool if errors.option_factor(option) < worst]
        return plans
