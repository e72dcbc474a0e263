"""Chooses the steps in which an engine measures gains, so that measuring costs little time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from cgx_ray.codecs import Codec, make_codec
from cgx_ray.codecs.codec import HOST
from cgx_ray.engine.gains.gain_history import GradientHistory
from cgx_ray.engine.gains.gain_meter import GainMeter
from cgx_ray.plan import CodecSpec, Layer

# Step 0 has the buckets that DDP has not rebuilt yet, and cold caches. Step 1 is the first one worth measuring.
FIRST_STEP = 1
INTERVAL_STEPS = 20
# Steps since the start that are measured too: a sparse codec is not taken up before two measurements agree. Ranks learn
# at step 3 what step 1 took on all of them.
EARLY_STEPS = FIRST_STEP, 3
# Steps within which the share of time must have covered the first measurement, if another is to follow it at once: the
# two then take the time of one step at most.
ADVANCE_STEPS = 100
# Largest share of the training time that measuring may take. Where it takes more, as in steps of milliseconds or with
# many groups, gains are measured less often. After the early measurements the third comes later.
MAX_TIME_SHARE = 0.005


class GainSchedule:
    """The candidate codecs of an engine, and the steps in which their gains are measured.

    affordable_from  first step in which this rank can afford the next measurement. All ranks measure in the same
                     steps, so the largest value over ranks counts
    """

    def __init__(
        self,
        candidates: Sequence[CodecSpec],
        layers: Sequence[Layer],
        by_layer: Sequence[CodecSpec] = (),
        device: torch.device = HOST,
        *,
        sums_layers: bool = False,
    ) -> None:
        """
        by_layer     codecs whose errors are measured by layer, one per measurement, in turn
        device       where the gradients are
        sums_layers  also sum their gradients, for `LayerError.top`
        """
        self.start(0)
        self._device, self._sums_layers = device, sums_layers
        self._by_layer, self._num_measured = [make_codec(spec, device=device) for spec in by_layer], 0
        self._history = GradientHistory(layers)
        self._candidates = self._by_name(candidates)
        self._interval_steps = INTERVAL_STEPS
        self._max_time_share: float | None = MAX_TIME_SHARE

    @contextmanager
    def replaced(self, candidates: Sequence[CodecSpec], interval_steps: int) -> Iterator[None]:
        """Measure `candidates` every `interval_steps` instead, at any cost. Enter and leave between steps."""
        before = self._candidates, self._interval_steps, self._max_time_share
        self._candidates, self._interval_steps, self._max_time_share = self._by_name(candidates), interval_steps, None
        try:
            yield
        finally:
            self._candidates, self._interval_steps, self._max_time_share = before

    def _by_name(self, candidates: Sequence[CodecSpec]) -> dict[str, Codec]:
        return {str(spec): make_codec(spec, device=self._device) for spec in candidates}

    def start(self, step: int) -> None:
        """Begin at `step`, after the engine has been made or a checkpoint loaded."""
        self._started_step = self.affordable_from = step

    def is_due(self, step: int, affordable_from: int) -> bool:
        """Return True if `step` measures gains. `affordable_from`: the largest over ranks."""
        if not self._candidates:
            return False
        if self._max_time_share is None:
            return step % self._interval_steps == FIRST_STEP
        return is_measured(step - self._started_step, affordable_from - self._started_step)

    def meter(self, key: int) -> GainMeter:
        """Return a meter of all candidates for one step. `key` seeds their random numbers."""
        by_layer = self._by_layer[self._num_measured % len(self._by_layer)] if self._by_layer else None
        self._num_measured += 1
        return GainMeter(self._candidates, self._history, key, by_layer, self._device, sums_layers=self._sums_layers)

    def charge(self, step: int, step_s: float, meter_s: float) -> None:
        """Postpone the next measurement until `meter_s`, spent in `step`, is no more than the allowed share."""
        if self._max_time_share is not None:
            num_steps = math.ceil(meter_s / (self._max_time_share * (step_s - meter_s)))
            self.affordable_from = max(step, self.affordable_from) + num_steps


def is_measured(num_steps: int, affordable_from: int) -> bool:
    """Return True if gains are measured `num_steps` steps after the start.

    affordable_from  steps after the start from which the share of time covers the measurements so far
    """
    if num_steps in EARLY_STEPS:
        return affordable_from <= num_steps + ADVANCE_STEPS
    return num_steps % INTERVAL_STEPS == FIRST_STEP and num_steps >= affordable_from
