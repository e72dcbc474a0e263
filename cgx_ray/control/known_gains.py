"""Gains that plans may be made with, and the ones that call for a new decision."""

from __future__ import annotations

from collections.abc import Mapping

from cgx_ray.control.gains import GainWatch
from cgx_ray.control.joined_steps import JoinedStep
from cgx_ray.control.learning_phase import LEARNING_GAIN, LearningPhase
from cgx_ray.control.measured import non_dense_options
from cgx_ray.plan import Device, Option, Plan


class KnownGains:
    """Gains under the plan in force, by codec or option as in `GainWatch`."""

    def __init__(self, plan: Plan, ratios: Mapping[str, float], gain: Mapping[str, float]) -> None:
        """`ratios`, `gain`: from earlier worker groups, see `GainWatch`."""
        self._plan = plan
        self._watch = GainWatch(map(_name, non_dense_options(plan)), ratios, gain)
        self._learning = LearningPhase()
        self._plan_step: int | None = None
        # Names of the gains that a decision has known.
        self._offered = frozenset(gain)

    @property
    def ratios(self) -> dict[str, float]:
        """Measured gain over predicted gain by option."""
        return self._watch.ratios

    @property
    def gain(self) -> dict[str, float]:
        """All gains, also those that no plan may be made with yet."""
        return self._watch.gain

    @property
    def usable(self) -> dict[str, float]:
        """Gains that plans may be made with; in a learning phase those in use, and large ones."""
        usable = self._watch.usable
        if not self._learning.is_on:
            return usable
        return {name: gain for name, gain in usable.items() if gain >= LEARNING_GAIN or self._watch.is_in_use(name)}

    def add(self, step: JoinedStep) -> bool:
        """Add what a step of the plan in force measured; return whether the learning rate has changed."""
        self._plan_step = step.step if self._plan_step is None else self._plan_step
        num_steps = step.step - self._plan_step
        # The residuals of an option no longer grow once each element has been sent once, on average.
        settled = {
            _name(option) for option in non_dense_options(self._plan) if num_steps * (option.codec.density or 1.0) >= 1
        }
        self._learning.add(step.norm)
        self._watch.add(step.gain, step.kept, settled)
        return self._learning.add_rate(step.lr)

    def cause(self, decided: Mapping[str, float]) -> str | None:
        """Return in words which gain calls for a new decision, or None. `decided`: of the last decision."""
        cause = self._watch.cause(decided)
        new = sorted(name for name in self.usable.keys() - self._offered if not self._watch.is_in_use(name))
        return f"gain of {new[0]} is known now" if cause is None and new else cause

    def acknowledge(self, decided: Mapping[str, float]) -> None:
        """Note that a decision has taken the gains `decided` into account."""
        self._watch.acknowledge()
        self._offered |= decided.keys()

    def start_plan(self, plan: Plan) -> None:
        """Begin with `plan`."""
        self._plan, self._plan_step = plan, None
        self._watch.start_plan(map(_name, non_dense_options(plan)))


def _name(option: Option) -> str:
    """Return the name of the option's gain, which is the same on every device."""
    return str(option.on(Device.AUTO))
