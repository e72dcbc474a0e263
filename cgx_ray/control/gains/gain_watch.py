"""Compression gains of all options, and the changes of a gain that call for a new decision.

All ranks measure gains every 20 steps, less often where measuring would take more than 0.5 % of the time. Plans are
made with the median of the last five measurements, which no single one moves. Gains have names: those of options
(`str(Option)`) where schemes differ, else those of codecs.

What error feedback keeps is predicted by the ranks before an option is used, and measured while it is in use
(`StepSample.gain`, `StepSample.kept`):

1. In use, the measured gain counts once the option has settled. Until then its residual still grows, so the gain
   counts only if it is less than predicted.
2. The ratio of measured to predicted is learned by option. It corrects the predictions of that option afterwards, also
   in later worker groups. Before it is known it counts as 1: on a small GPT the ratio was 0.9 to 1.4.
3. A sparse codec may be chosen (`usable`) once two predictions agree. The first ones know one gradient only.

If the gain of an option in use is more than GAIN_CHANGE away from the one that the last decision was made on, `cause`
returns this as the reason for a new decision: three measurements after a change. Those of other options are left to the
regular review.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

from cgx_ray.control.gains.loss_trend import LearningPhase
from cgx_ray.control.joined_steps import JoinedStep
from cgx_ray.control.learned.measured import non_dense_options
from cgx_ray.control.network.estimate import FEW
from cgx_ray.control.policies.policy import MIN_IMPROVEMENT
from cgx_ray.plan import CodecSpec, Device, Option, Plan, spoken

# Smallest change of a gain that triggers a new decision. Smaller ones are left to the regular review.
GAIN_CHANGE = 0.1
# Measurements whose median counts, those of 100 steps: with small batches a single one is off by 3 to 20 %.
NUM_MEASUREMENTS = 5
# Floor on the gain, for codecs that drop more than the gradient holds: the planner needs positive gains.
MIN_GAIN = 1e-3
# Weight of the newest measurement in a learned ratio: that of ten measurements, as one differs by up to 20 %.
RATIO_WEIGHT = 0.1

T = TypeVar("T")


@dataclass(slots=True)
class _KnownGain:
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_MEASUREMENTS))
    is_outdated: bool = False
    is_agreed: bool = False

    @property
    def usual(self) -> float:
        return median(self.recent)


class GainWatch:
    """Gains by name: `str(CodecSpec)`, or `str(Option)` where schemes differ or an option has been in use.

    ratios  measured gain over predicted gain by `str(Option)`, of all options whose measured gain has counted
    """

    def __init__(
        self,
        in_use: Iterable[str] = (),
        ratios: Mapping[str, float] | None = None,
        gain: Mapping[str, float] | None = None,
    ) -> None:
        """
        in_use  the options of the first plan
        ratios  learned in earlier worker groups
        gain    that plans could be made with in earlier worker groups; the first measurement replaces it
        """
        self.ratios = dict(ratios or {})
        self._known = {
            name: _KnownGain(recent=deque([value], maxlen=NUM_MEASUREMENTS), is_outdated=True, is_agreed=True)
            for name, value in (gain or {}).items()
        }
        self._in_use = frozenset(in_use)
        # All names that had a prediction.
        self._predicted: set[str] = set()

    @property
    def gain(self) -> dict[str, float]:
        """Median of the last measurements by name."""
        return {name: one.usual for name, one in self._known.items()}

    @property
    def usable(self) -> dict[str, float]:
        """Gains that plans may be made with: sparse codecs once two measurements agree, or when in use."""
        return {
            name: one.usual
            for name, one in self._known.items()
            if one.is_agreed or self.is_in_use(name) or _codec_of(name).density is None
        }

    def add_gains(
        self, predicted: Mapping[str, float], kept: Mapping[str, float] | None = None, settled: Collection[str] = ()
    ) -> None:
        """Add what a step of the plan in force measured.

        predicted  by codec or option
        kept       by option in use
        settled    the options in use whose residuals no longer grow
        """
        now = self._corrected({name: gain for name, gain in predicted.items() if math.isfinite(gain)})
        self._predicted |= now.keys()
        for option, gain in (kept or {}).items():
            if not math.isfinite(gain):
                continue
            unused, expected = _lookup(predicted, option), _lookup(now, option)
            counts = option in settled or expected is None or gain < expected
            if counts and unused is not None and unused > MIN_GAIN:
                self._learn(option, gain / unused)
            now[option] = gain if counts or expected is None else expected
        for name, gain in now.items():
            self._add(name, gain)

    def cause(self, decided: Mapping[str, float]) -> str | None:
        """Return in words which gain of an option in use differs from the one in `decided`, or None."""
        for option in sorted(self._in_use):
            before, known = _lookup(decided, option), _lookup(self._known, option)
            if before is None or known is None or len(known.recent) < FEW:
                continue
            now = known.usual
            if abs(now - before) > GAIN_CHANGE:
                return f"gain of {spoken(option)} {'fell' if now < before else 'rose'} from {before:.2f} to {now:.2f}"
        return None

    def start_plan(self, in_use: Iterable[str]) -> None:
        """Start a plan with the options `in_use`.

        For those that were in use before, or that are from now on, the next measurement replaces those so far.
        """
        before, self._in_use = self._in_use, frozenset(in_use)
        for name in (before - self._in_use) & self._known.keys():
            if name not in self._predicted:
                # Nothing would ever replace it, and it would hide the prediction of the codec.
                del self._known[name]
        for name in (before ^ self._in_use) & self._known.keys():
            self._known[name].is_outdated = True

    def _add(self, name: str, gain: float) -> None:
        one = self._known.setdefault(name, _KnownGain())
        gain = max(gain, MIN_GAIN)
        if one.is_outdated:
            one.recent.clear()
            one.is_outdated = False
        elif one.recent and abs(gain - one.recent[-1]) <= GAIN_CHANGE:
            one.is_agreed = True
        one.recent.append(gain)

    def _learn(self, option: str, ratio: float) -> None:
        before = self.ratios.get(option, ratio)
        self.ratios[option] = before + RATIO_WEIGHT * (ratio - before)

    def _corrected(self, predicted: Mapping[str, float]) -> dict[str, float]:
        """Return predictions with learned ratios, by option for options that have one."""
        known = {option: _lookup(predicted, option) for option in self.ratios}
        return dict(predicted) | {
            option: min(1.0, self.ratios[option] * gain) for option, gain in known.items() if gain is not None
        }

    def is_in_use(self, name: str) -> bool:
        """Return True for an option in use and for its codec."""
        return any(option == name or option.startswith(f"{name} over ") for option in self._in_use)


def _lookup(gain: Mapping[str, T], option: str) -> T | None:
    """Return what is known under the option's name, else under its codec's."""
    return gain.get(option, gain.get(option.partition(" over ")[0]))


def _codec_of(name: str) -> CodecSpec:
    return CodecSpec.parse(name.partition(" over ")[0])


class KnownGains:
    """Gains under the plan in force, by codec or option as in `GainWatch`."""

    def __init__(
        self, plan: Plan, ratios: Mapping[str, float], gain: Mapping[str, float], *, is_cautious: bool = True
    ) -> None:
        """
        ratios, gain  from earlier worker groups, see `GainWatch`
        is_cautious   plans take up nothing with a small gain while gradients change fast, nor before two gains agree
        """
        self._plan, self._is_cautious = plan, is_cautious
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
        """Gains that plans may be made with: all; for cautious ones those of `GainWatch.usable`.

        In a learning phase cautious ones take those in use, and large ones.
        Gains that were measured on other gradients may be off by much, and steps that change the loss fast are the ones
        where lost progress costs most.
        """
        if not self._is_cautious:
            return self.gain
        usable = self._watch.usable
        if not self.is_learning:
            return usable
        least = 1 - MIN_IMPROVEMENT
        return {name: gain for name, gain in usable.items() if gain >= least or self._watch.is_in_use(name)}

    @property
    def is_learning(self) -> bool:
        """True while gradients change fast."""
        return self._learning.is_on

    def add_step(self, step: JoinedStep) -> bool:
        """Add what a step of the plan in force measured; return whether the learning rate has changed."""
        self._plan_step = step.step if self._plan_step is None else self._plan_step
        num_steps = step.step - self._plan_step
        # The residuals of an option no longer grow once each element has been sent once, on average.
        settled = {
            _name(option) for option in non_dense_options(self._plan) if num_steps * (option.codec.density or 1.0) >= 1
        }
        self._learning.add_norm(step.norm)
        self._watch.add_gains(step.gain, step.kept, settled)
        return self._learning.add_rate(step.lr, step.num_steps)

    def cause(self, decided: Mapping[str, float]) -> str | None:
        """Return in words which gain calls for a new decision, or None. `decided`: of the last decision."""
        cause = self._watch.cause(decided)
        new = sorted(name for name in self.usable.keys() - self._offered if not self._watch.is_in_use(name))
        return f"gain of {spoken(new[0])} is known now" if cause is None and new else cause

    def acknowledge(self, decided: Mapping[str, float]) -> None:
        """Note that a decision has taken the gains `decided` into account."""
        self._offered |= decided.keys()

    def start_plan(self, plan: Plan) -> None:
        """Begin with `plan`."""
        self._plan, self._plan_step = plan, None
        self._watch.start_plan(map(_name, non_dense_options(plan)))


def _name(option: Option) -> str:
    """Return the name of the option's gain, which is the same on every device."""
    return str(option.on(Device.AUTO))
