"""Steps under the plan in force, each beside its predictions, and the outcome of the last decision."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from cgx_ray.control.joined_steps import JoinedStep
from cgx_ray.control.journal.facts import When
from cgx_ray.control.journal.lines import outcome_entry
from cgx_ray.control.learned.evidence import MAX_STEPS
from cgx_ray.control.network.estimate import FEW
from cgx_ray.control.policies.policy import Decision

# Steps of a new plan that are not judged: the first one still allocates buffers.
WARM_UP_STEPS = 1


class PairedStep(NamedTuple):
    """Measured step beside the predictions for its own compute, on the network of the time when it was paired.

    compute_s   as it was measured
    over_plan   logarithm of its seconds over those predicted for its plan
    over_dense  logarithm of its seconds per progress over those predicted for a dense step
    log_kept    logarithm of its progress over that of a dense step
    """

    step_s: float
    compute_s: float
    codec_s: float
    over_plan: float
    over_dense: float
    log_kept: float = 0.0


@dataclass(slots=True)
class PlanRecord:
    """The newest steps of a plan, without those that warm it up.

    num_steps  all steps, with those that warm up
    """

    num_steps: int = 0
    window: deque[PairedStep] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))

    def add_step(self) -> bool:
        """Count a step; return whether it may be judged."""
        self.num_steps += 1
        return self.num_steps > WARM_UP_STEPS

    def shift(self, log_prediction: float) -> None:
        """Take into account that predictions for this plan have changed by this logarithm."""
        moved = [step._replace(over_plan=step.over_plan - log_prediction) for step in self.window]
        self.window = deque(moved, maxlen=MAX_STEPS)


@dataclass(slots=True, kw_only=True)
class PendingOutcome:
    """A decision whose prediction has not been compared with measured steps yet."""

    decision: Decision
    _steps: list[JoinedStep] = field(default_factory=list)

    def add_step(self, step: JoinedStep) -> bool:
        """Add a step under the decision's plan; return whether there are enough steps to judge."""
        self._steps.append(step)
        return len(self._steps) >= WARM_UP_STEPS + FEW

    @property
    def applied_step(self) -> int:
        return self._steps[0].step

    @property
    def step_s(self) -> float:
        """Median seconds of the judged steps."""
        return median(step.step_s for step in self._steps[WARM_UP_STEPS:])

    def line(self, version: int, at: When) -> dict[str, Any]:
        """Return the journal's line. `version`: of the decision's plan; `at`: the newest step."""
        return outcome_entry(
            self.decision.step_s,
            self.step_s,
            applied_step=self.applied_step,
            version=version,
            step=at.step,
            time_s=at.time_s,
        )
