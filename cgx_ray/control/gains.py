"""How much of the gradient each codec keeps, and which of them keep another share than before."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cgx_ray.control.changes import ChangeDetector

# What counts as another gradient: a codec keeps so much more or less of it.
GAIN_CHANGE = 0.1
# Plans are made on means of so many measurements: those of 100 steps, as one alone is off by 3 to 20 % with small
# batches.
NUM_MEASUREMENTS = 5
# Twice the error, or half, is noticed after two measurements, 1.5 times after five. One is never enough.
ALARM = 1.0
# Errors below it count as it, or one of 1.4 % would be watched as closely as one that decides.
MIN_ERROR = 0.05
# Of codecs that drop more than there is.
MIN_GAIN = 1e-3


@dataclass(slots=True)
class _Watched:
    # What is measured first is what the plan was chosen on: learning more would take in what it has to be held against.
    detector: ChangeDetector = field(default_factory=lambda: ChangeDetector(alarm=ALARM, learn_s=0.0))
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_MEASUREMENTS))
    is_stale: bool = False


class GainWatch:
    """Gains of the plan in force, by `str(CodecSpec)`.

    What is watched is the error, 1 - gain. On byte-GPT its logarithm scatters by 0.09 to 0.14 from qsgd, which keeps
    98 %, to top-0.1 %, which keeps 27 %, that of the gain by 0.003 to 0.2. So one threshold serves all codecs. One
    measurement, which comes every 20 steps, is as much evidence as a second is for the network.
    """

    def __init__(self, in_use: Iterable[str] = ()) -> None:
        """`in_use`: the codecs of the plan that is in force at first."""
        self._watched: dict[str, _Watched] = {}
        self._changed: set[str] = set()
        self._in_use = frozenset(in_use)

    @property
    def gain(self) -> dict[str, float]:
        """Mean of each codec's last measurements, of those since its gain changed if it did."""
        return {codec: math.fsum(one.recent) / len(one.recent) for codec, one in self._watched.items()}

    def add(self, measured: Mapping[str, float]) -> None:
        """Take in what a step of the plan in force measured."""
        for codec, gain in measured.items():
            if not math.isfinite(gain):
                continue
            one = self._watched.setdefault(codec, _Watched())
            if one.is_stale:
                one.recent.clear()
                one.is_stale = False
            one.recent.append(max(gain, MIN_GAIN))
            lasted = one.detector.add(max(1 - gain, MIN_ERROR), 1.0)
            if lasted is not None:
                self._changed.add(codec)
                while len(one.recent) > lasted:
                    one.recent.popleft()

    def cause(self, decided: Mapping[str, float]) -> str | None:
        """In words, which gain has changed since `look` and is another than in `decided`; of several, one in use."""
        gain = self.gain
        for codec in sorted(self._changed, key=lambda codec: (codec not in self._in_use, codec)):
            now = gain[codec]
            before = decided.get(codec, now)
            if abs(now - before) > GAIN_CHANGE:
                return f"gain of {codec} {'fell' if now < before else 'rose'} from {before:.2f} to {now:.2f}"
        return None

    def look(self) -> None:
        """The gains have been looked at: what has changed until now is known."""
        self._changed.clear()

    def enter(self, in_use: Iterable[str]) -> None:
        """A plan with these codecs comes into force.

        What is owed becomes part of the gradient and all gains become others, those in use by what the exchange drops
        as well. These are held against what was expected of them; for the others it is no news.
        """
        self._in_use = frozenset(in_use)
        for codec, one in self._watched.items():
            one.is_stale = True
            if codec not in self._in_use:
                one.detector = _Watched().detector
