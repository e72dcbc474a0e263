"""A trace of some steps of a training: what each group of this rank did when, in a file."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from cgx_ray.engine.chrome_trace import STEP, PhaseSpan, chrome_trace
from cgx_ray.engine.step_sample import Span
from cgx_ray.errors import ConfigError

logger = logging.getLogger(__name__)


class StepTrace:
    """Collects the spans of the steps `first` to `last` and writes them to `path` after the last of them.

    An unwritable file costs the trace and one warning; training goes on.
    """

    def __init__(self, path: Path, rank: int, first: int, last: int) -> None:
        if not 0 <= first <= last:
            raise ConfigError(f"no steps from {first!r} to {last!r} to trace; give the first and the last, from 0 on")
        self._path, self._rank = path, rank
        self._first, self._last = first, last
        self._began_s: float | None = None
        self._spans: list[PhaseSpan] = []
        self._is_written = False

    def add_step(self, step: int, spans: Sequence[Span], began_s: float, ended_s: float) -> None:
        """Add a step that lasted from `began_s` to `ended_s`."""
        if self._is_written or step < self._first:
            return
        if step <= self._last:
            zero_s = self._began_s = began_s if self._began_s is None else self._began_s
            self._spans.append(PhaseSpan(self._rank, step, STEP, began_s - zero_s, ended_s - zero_s))
            # A layer whose gradient came before the step did counts from the step's begin.
            self._spans += [
                PhaseSpan(self._rank, one.group, one.phase, max(one.begin_s, began_s) - zero_s, one.end_s - zero_s)
                for one in spans
            ]
        if step >= self._last:
            self._write()

    def _write(self) -> None:
        self._is_written = True
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(chrome_trace({"training": self._spans})))
        except OSError as error:
            logger.warning("the trace of rank %d could not be written to %s: %s", self._rank, self._path, error)
        self._spans = []
