"""Comparison of a decision's prediction with the steps that follow it."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from cgx_ray.control.joined_steps import JoinedStep
from cgx_ray.control.policy import Decision
from cgx_ray.plan import Option

# Steps of a new plan that are not judged: the first one still allocates buffers.
WARM_UP_STEPS = 1
# Steps that are judged. Their median ignores one disturbed step, and a bad plan is left soon.
JUDGED_STEPS = 4


@dataclass(slots=True, kw_only=True)
class PendingOutcome:
    """A decision whose prediction has not been compared with measured steps yet.

    options  those of the decision's plan, plain dense left out
    """

    decision: Decision
    options: frozenset[Option]
    _steps: list[JoinedStep] = field(default_factory=list)

    def add(self, step: JoinedStep) -> bool:
        """Add a step under the decision's plan; return whether there are enough steps to judge."""
        self._steps.append(step)
        return len(self._steps) >= WARM_UP_STEPS + JUDGED_STEPS

    @property
    def applied_step(self) -> int:
        return self._steps[0].step

    @property
    def step_s(self) -> float:
        """Median seconds of the judged steps."""
        return median(step.step_s for step in self._steps[WARM_UP_STEPS:])

    @property
    def codec_s(self) -> float:
        """Median seconds of encoding and decoding in the judged steps."""
        return median(step.codec_s for step in self._steps[WARM_UP_STEPS:])
