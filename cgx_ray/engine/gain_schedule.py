"""Chooses the steps in which an engine measures gains, so that measuring costs little time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cgx_ray.codecs import Codec, make_codec
from cgx_ray.engine.gain_history import GradientHistory
from cgx_ray.engine.gain_meter import GainMeter
from cgx_ray.plan import CodecSpec, Layer

# Step 0 has the buckets that DDP has not rebuilt yet, and cold caches. Step 1 is the first one worth measuring.
FIRST_STEP = 1
INTERVAL_STEPS = 20
# Largest share of the training time that measuring may take. Where it takes more, as in steps of milliseconds or with
# many groups, gains are measured less often.
MAX_TIME_SHARE = 0.005


class GainSchedule:
    """The candidate codecs of an engine, and the steps in which their gains are measured.

    affordable_from  first step in which this rank can afford the next measurement. All ranks measure in the same
                     steps, so the largest value over ranks counts
    """

    def __init__(self, candidates: Sequence[CodecSpec], layers: Sequence[Layer]) -> None:
        self.affordable_from = 0
        self._history = GradientHistory(layers)
        self._candidates = _by_name(candidates)
        self._interval_steps = INTERVAL_STEPS
        self._max_time_share: float | None = MAX_TIME_SHARE

    @contextmanager
    def replaced(self, candidates: Sequence[CodecSpec], interval_steps: int) -> Iterator[None]:
        """Measure `candidates` every `interval_steps` instead, at any cost. Enter and leave between steps."""
        before = self._candidates, self._interval_steps, self._max_time_share
        self._candidates, self._interval_steps, self._max_time_share = _by_name(candidates), interval_steps, None
        try:
            yield
        finally:
            self._candidates, self._interval_steps, self._max_time_share = before

    def is_due(self, step: int, affordable_from: int) -> bool:
        """Return True if `step` measures gains. `affordable_from`: the largest over ranks."""
        is_affordable = self._max_time_share is None or step >= affordable_from
        return bool(self._candidates) and step % self._interval_steps == FIRST_STEP and is_affordable

    def meter(self, key: int) -> GainMeter:
        """Return a meter of all candidates for one step. `key` seeds their random numbers."""
        return GainMeter(self._candidates, self._history, key)

    def charge(self, step: int, step_s: float, meter_s: float) -> None:
        """Postpone the next measurement until `meter_s`, spent in `step`, is no more than the allowed share."""
        if self._max_time_share is not None:
            self.affordable_from = step + math.ceil(meter_s / (self._max_time_share * (step_s - meter_s)))


def _by_name(candidates: Sequence[CodecSpec]) -> dict[str, Codec]:
    return {str(spec): make_codec(spec) for spec in candidates}
