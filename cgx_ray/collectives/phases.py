"""Where the time of one group's exchange went."""

from __future__ import annotations

import time
from typing import Literal


class Phases:
    """Stop watch with one running total for each phase. Seconds.

    encode, decode  this thread's time with the codec, whether messages were under way meanwhile or not
    exchange        wall time of the rounds of messages, each from this rank's first send to its last receive; where
                    rounds overlap it counts once. What is encoded and decoded in between is not taken off, so the
                    three overlap and their sum may be more than the time that passed.

    Schemes that do one thing after the other only call `lap`.
    """

    def __init__(self) -> None:
        self.encode = 0.0
        self.exchange = 0.0
        self.decode = 0.0
        self._last = time.perf_counter()
        self._num_open = 0
        self._opened = 0.0

    def lap(self, phase: Literal["encode", "exchange", "decode"]) -> None:
        """Count the time since the last lap as `phase`. Waiting within a round is the round's."""
        now = time.perf_counter()
        if phase != "exchange" or self._num_open == 0:
            setattr(self, phase, getattr(self, phase) + now - self._last)
        self._last = now

    def begin_round(self) -> None:
        """The first message of a round is ready to go."""
        if self._num_open == 0:
            self._opened = time.perf_counter()
        self._num_open += 1

    def end_round(self) -> None:
        """The last message of a round is here."""
        assert self._num_open > 0
        self._num_open -= 1
        if self._num_open == 0:
            now = time.perf_counter()
            self.exchange += now - self._opened
            self._last = now
