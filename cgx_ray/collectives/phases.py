"""Where the time of one group's exchange went."""

from __future__ import annotations

import time
from typing import Literal


class Phases:
    """Stop watch with one running total for each phase. Seconds."""

    def __init__(self) -> None:
        self.encode = 0.0
        self.exchange = 0.0
        self.decode = 0.0
        self._last = time.perf_counter()

    def lap(self, phase: Literal["encode", "exchange", "decode"]) -> None:
        """Count the time since the last lap as `phase`."""
        now = time.perf_counter()
        setattr(self, phase, getattr(self, phase) + now - self._last)
        self._last = now
