"""Telling a change from noise: CUSUM (Page 1954) on logarithms, with evidence counted in seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence

# A change by 2x is evidence of log 2 - DRIFT = 0.51 a second: noticed after 2.1 s, so a neighbour's burst that takes
# half of the link may last 2 s. However large it is it must last for 1.1 s. Less than 1.2x drifts along.
DRIFT = math.log(1.2)
CLIP = math.log(3)
ALARM = 1.05
# Nothing makes a network faster for a moment: a change for the better is noticed after 1.5 s.
RELIEF_ALARM = 0.75
# Until either, the level is being learned.
LEARN_S = 2.0
LEARN_SAMPLES = 10
# How fast what is normal follows what is seen, as long as nothing is suspected.
MEMORY_S = 10.0
# One sample says this much and no more, however long it took to take, and one alone is never enough.
MAX_SAMPLE_S = 3.0
MIN_SAMPLES = 2


class ChangeDetector:
    """Watches one positive quantity and says when its level has moved by about 2x or more, up or down.

    Samples may come at any rate: one that covers `seconds` counts as much as several that cover them together. After an
    alarm the level is what was seen since the suspicion began.
    """

    def __init__(
        self,
        better: int = 0,
        alarm: float = ALARM,
        relief_alarm: float = RELIEF_ALARM,
        learn_s: float = LEARN_S,
    ) -> None:
        """
        better        1 if more is better and cannot be a moment's luck, -1 if less is, 0 if neither
        alarm         how much evidence is enough for a change that is not for the better
        relief_alarm  and for one that is
        learn_s       how long the first samples only say what the level is; the very first one always does
        """
        self._better, self._alarm, self._relief_alarm, self._learn_s = better, alarm, relief_alarm, learn_s
        self._level: float | None = None
        self._seconds = 0.0
        self._num_samples = 0
        self._up = _Suspicion()
        self._down = _Suspicion()

    def add(self, value: float, seconds: float) -> float | None:
        """Take in a sample; returns for how many seconds the level has been another if that is now sure, else None.

        Raises ValueError if `value` is not a positive number.
        """
        if not 0 < value < math.inf:
            raise ValueError(f"value {value!r} has no logarithm; give a positive number")
        log_value, seconds = math.log(value), min(seconds, MAX_SAMPLE_S)
        self._num_samples += 1
        if self._level is None or (self._seconds < self._learn_s and self._num_samples <= LEARN_SAMPLES):
            self._learn(log_value, seconds)
            return None
        for suspicion, sign in ((self._up, 1), (self._down, -1)):
            suspicion.add(sign * (log_value - self._level), log_value, seconds)
            alarm = self._relief_alarm if sign == self._better else self._alarm
            if suspicion.num_samples >= MIN_SAMPLES and suspicion.evidence >= alarm:
                since_s = suspicion.seconds
                # Some of it was before the change, so the level has yet to settle.
                self._level, self._seconds = suspicion.sum / since_s, min(since_s, LEARN_S)
                self._up, self._down = _Suspicion(), _Suspicion()
                return since_s
        if not (self._up.seconds or self._down.seconds):
            self._learn(log_value, seconds)
        return None

    def _learn(self, log_value: float, seconds: float) -> None:
        level = self._level if self._level is not None else log_value
        self._seconds = min(self._seconds + seconds, MEMORY_S)
        self._level = level + (log_value - level) * min(1.0, seconds / self._seconds)


class _Suspicion:
    """What speaks for a change in one direction, and since when."""

    def __init__(self) -> None:
        self.evidence = 0.0
        self.num_samples = 0
        self.seconds = 0.0
        self.sum = 0.0

    def add(self, deviation: float, log_value: float, seconds: float) -> None:
        self.evidence = max(0.0, self.evidence + (min(deviation, CLIP) - DRIFT) * seconds)
        if not self.evidence:
            self.num_samples, self.seconds, self.sum = 0, 0.0, 0.0
            return
        self.num_samples += 1
        self.seconds += seconds
        self.sum += log_value * seconds


class SlowRanks:
    """Ranks whose compute takes more than 1.2x that of the others, for seconds on end; forgiven after as long."""

    def __init__(self, world_size: int) -> None:
        self._evidence = [0.0] * world_size
        self.ranks: frozenset[int] = frozenset()

    def add(self, ratios: Sequence[float], seconds: float) -> bool:
        """Take in each rank's compute time over the median of all; returns whether `ranks` is another set now."""
        before = self.ranks
        for rank, ratio in enumerate(ratios):
            deviation = max(-CLIP, min(math.log(ratio), CLIP)) if ratio > 0 else -CLIP
            step = (deviation - DRIFT) * min(seconds, MAX_SAMPLE_S)
            self._evidence[rank] = min(ALARM, max(0.0, self._evidence[rank] + step))
            if self._evidence[rank] >= ALARM:
                self.ranks |= {rank}
            elif self._evidence[rank] == 0:
                self.ranks -= {rank}
        return self.ranks != before
