"""Compression gains of all codecs, and the changes of a gain that call for a new decision.

All ranks measure gains every 20 steps, less often where measuring would take more than 0.5 % of the time. Plans are
made with the mean of the last five measurements. A CUSUM test (`changes.ChangeDetector`) watches the logarithm of each
codec's error, 1 - gain:

1. An error that doubles or halves is noticed after two measurements, an error that changes by 1.5x after five. One
   measurement is never enough.
2. If the gain of such a codec, in use or not, is then more than GAIN_CHANGE away from the gain that the last decision
   was made on, `cause` returns this as the reason for a new decision.
3. Errors above a half cannot double, and slow trends are followed without an alarm. Both are left to the regular
   review (`loop.REVIEW_STEPS`).

The error is watched instead of the gain because its noise is similar for all codecs: on byte-GPT the standard deviation
of the logarithm is 0.09 to 0.14, from qsgd (gain 0.98) to top-0.1 % (gain 0.27); that of the gain is 0.003 to 0.2. So
one threshold serves all codecs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cgx_ray.control.changes import ChangeDetector

# Smallest change of a gain that triggers a new decision. Smaller ones are left to the regular review.
GAIN_CHANGE = 0.1
# Measurements that are averaged, those of 100 steps: with small batches a single one is off by 3 to 20 %.
NUM_MEASUREMENTS = 5
# Evidence (`changes.ALARM`) for another error; one measurement counts like a second.
ALARM = 1.0
# Floor on the error, so that near-lossless codecs raise no alarm when a tiny error doubles.
MIN_ERROR = 0.05
# Floor on the gain, for codecs that drop more than the gradient holds: the planner needs positive gains.
MIN_GAIN = 1e-3


@dataclass(slots=True)
class _CodecGain:
    # No learning phase: the first measurement is the baseline, since the plan was chosen on it. Learning would make a
    # change part of the baseline.
    detector: ChangeDetector = field(default_factory=lambda: ChangeDetector(alarm=ALARM, learn_s=0.0))
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_MEASUREMENTS))
    is_outdated: bool = False


class GainWatch:
    """Gains under the plan in force, by `str(CodecSpec)`."""

    def __init__(self, in_use: Iterable[str] = ()) -> None:
        """`in_use`: the codecs of the first plan."""
        self._codecs: dict[str, _CodecGain] = {}
        self._changed: set[str] = set()
        self._in_use = frozenset(in_use)

    @property
    def gain(self) -> dict[str, float]:
        """Mean of each codec's last measurements, without those before its last change."""
        return {codec: math.fsum(one.recent) / len(one.recent) for codec, one in self._codecs.items()}

    def add(self, measured: Mapping[str, float]) -> None:
        """Add the gains that a step of the plan in force measured."""
        for codec, gain in measured.items():
            if not math.isfinite(gain):
                continue
            one = self._codecs.setdefault(codec, _CodecGain())
            if one.is_outdated:
                one.recent.clear()
                one.is_outdated = False
            one.recent.append(max(gain, MIN_GAIN))
            num_since = one.detector.add(max(1 - gain, MIN_ERROR), 1.0)
            if num_since is not None:
                self._changed.add(codec)
                while len(one.recent) > num_since:
                    one.recent.popleft()

    def cause(self, decided: Mapping[str, float]) -> str | None:
        """Return in words which gain has changed since `acknowledge` and differs from the one in `decided`, or None.

        If several have changed, one of a codec in use is named.
        """
        gain = self.gain
        for codec in sorted(self._changed, key=lambda codec: (codec not in self._in_use, codec)):
            now = gain[codec]
            before = decided.get(codec, now)
            if abs(now - before) > GAIN_CHANGE:
                return f"gain of {codec} {'fell' if now < before else 'rose'} from {before:.2f} to {now:.2f}"
        return None

    def acknowledge(self) -> None:
        """Forget the changes until now, because a decision has taken them into account."""
        self._changed.clear()

    def start_plan(self, in_use: Iterable[str]) -> None:
        """Start a plan with the codecs `in_use`.

        All gains change with the plan, since residuals are part of the gradient that is encoded. The codecs in use are
        compared with the gain that they were chosen for. For the others the next measurement is a new baseline.
        """
        self._in_use = frozenset(in_use)
        for codec, one in self._codecs.items():
            one.is_outdated = True
            if codec not in self._in_use:
                one.detector = _CodecGain().detector
