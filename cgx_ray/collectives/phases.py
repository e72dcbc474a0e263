"""`Phases`: the seconds of one group's exchange, by phase."""

from __future__ import annotations

import time
from typing import Literal


class Phases:
    """Stop watch with a running total of seconds for each phase.

    encode, decode  time of this thread in the codec, even while messages are under way
    exchange        wall time of the rounds of messages, each from this rank's first send to its last receive. Time in
                    which several rounds overlap counts once. Encoding and decoding within a round are not taken off, so
                    the sum of the three may exceed the time that passed

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
        """Count the time since the last lap as `phase`, except time to wait within a round, which the round counts."""
        now = time.perf_counter()
        if phase != "exchange" or self._num_open == 0:
            setattr(self, phase, getattr(self, phase) + now - self._last)
        self._last = now

    def begin_round(self) -> None:
        """Begin a round: call it when its first message is ready to go."""
        if self._num_open == 0:
            self._opened = time.perf_counter()
        self._num_open += 1

    def end_round(self) -> None:
        """End a round: call it when its last message has arrived."""
        assert self._num_open > 0
        self._num_open -= 1
        if self._num_open == 0:
            now = time.perf_counter()
            self.exchange += now - self._opened
            self._last = now
