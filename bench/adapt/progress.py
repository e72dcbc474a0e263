"""Progress on a schedule of networks: of single plans, of the best one of each phase (the oracle), and of the loop.

The progress of a step is its efficiency, as a share of a dense step's: the weight by which the loop chooses plans. The
schedule is one of times, so that progress in the same time is compared. Its ratio is that of times for the same
progress.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.adapt.lab_cases import DDP, LabPhase
from bench.shared.picture import Line, Plot
from bench.step.cases import StepNetwork
from cgx_ray.plan import Plan
from cgx_ray.planner.planned_group import PlannedGroup, groups_of
from cgx_ray.planner.prediction import Measured, predict


class WeightedStep(NamedTuple):
    """A step, in seconds after the start, and its progress as a share of a dense step's."""

    began_s: float
    ended_s: float
    efficiency: float

    @property
    def pace_s(self) -> float:
        """Seconds for the progress of a dense step."""
        return (self.ended_s - self.began_s) / self.efficiency


def progress_in(steps: Iterable[WeightedStep], begin_s: float, end_s: float) -> float:
    """Return the progress between two times. A step that lies partly between them counts as partly."""
    return math.fsum(
        step.efficiency
        * max(0.0, min(step.ended_s, end_s) - max(step.began_s, begin_s))
        / (step.ended_s - step.began_s)
        for step in steps
    )


def groups_by_version(plans: Iterable[Plan], measured: Measured) -> dict[int, tuple[PlannedGroup, ...]]:
    """Return the groups of each version that may be in force: those of plans, and of the fallbacks of their leases."""
    fallbacks = (plan.lease.fallback for plan in plans if plan.lease is not None)
    return {plan.version: groups_of(plan, measured.layers) for plan in (*fallbacks, *plans)}


def weighted_steps(
    ends_s: Sequence[float], versions: Mapping[int, int], plans: Sequence[Plan], measured: Measured
) -> list[WeightedStep]:
    """Return the steps of a training after its first one, which allocates memory.

    ends_s    when the first step began, then when each step ended
    versions  of the plan by step, from 0; one that is missing is that of the step before
    """
    groups = groups_by_version(plans, measured)
    efficiency = {version: predict(measured, found).efficiency for version, found in groups.items()}
    steps, version = [], plans[0].version
    for step, (began_s, ended_s) in enumerate(itertools.pairwise(ends_s)):
        version = versions.get(step, version)
        share = efficiency[version]
        assert share is not None
        if step > 0:
            steps.append(WeightedStep(began_s, ended_s, share))
    return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleScore:
    """Progress over one schedule, in dense steps.

    static    by the name of a plan
    oracle    of the best static plan of each phase
    adaptive  of the loop
    pace_s    of each phase, seconds for the progress of a dense step by static plan
    paces     of each adaptive step: when it began, and its seconds for the progress of a dense step
    """

    phases: Sequence[LabPhase]
    static: Mapping[str, float]
    oracle: float
    adaptive: float
    pace_s: Sequence[Mapping[str, float]]
    paces: Sequence[tuple[float, float]]

    @property
    def over_oracle(self) -> float:
        """Time of the loop over that of the oracle, for the same progress."""
        return self.oracle / self.adaptive

    @property
    def over_best_static(self) -> float:
        """Time of the loop over that of the best single plan, for the same progress."""
        return max(self.static.values()) / self.adaptive


def score_schedule(
    phases: Sequence[LabPhase], pace_s: Mapping[StepNetwork, Mapping[str, float]], steps: Sequence[WeightedStep]
) -> ScheduleScore:
    """Compare the loop's `steps` with static plans.

    phases  as they were played; times as those of `steps`
    pace_s  seconds for the progress of a dense step, by network and static plan
    """
    names = list(pace_s[phases[0].network])
    return ScheduleScore(
        phases=phases,
        static={name: math.fsum(one.seconds / pace_s[one.network][name] for one in phases) for name in names},
        oracle=math.fsum(phase.seconds / min(pace_s[phase.network].values()) for phase in phases),
        adaptive=math.fsum(progress_in(steps, phase.begin_s, phase.end_s) for phase in phases),
        pace_s=[pace_s[phase.network] for phase in phases],
        paces=[(one.began_s, one.pace_s) for one in steps if phases[0].begin_s <= one.began_s < phases[-1].end_s],
    )


def schedule_panel(name: str, score: ScheduleScore) -> Plot:
    """Return a panel of what the loop and static plans take for the progress of a dense step, over the schedule."""
    ends_s = [at_s for phase in score.phases for at_s in (phase.begin_s, phase.end_s)]
    began_s, plan_s = zip(*score.paces, strict=True)
    lines = [
        Line(label="plain DDP", x=ends_s, y=[one[DDP.name] for one in score.pace_s for _ in range(2)], style="-"),
        Line(label="best plan", x=ends_s, y=[min(one.values()) for one in score.pace_s for _ in range(2)], style="-"),
        Line(label="adaptive", x=began_s, y=plan_s, style="-"),
    ]
    return Plot(title=name, x="seconds", y="seconds for the progress of a dense step", lines=lines, log="y")
