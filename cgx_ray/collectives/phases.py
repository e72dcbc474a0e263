"""`Phases`: when one group was encoded, exchanged and decoded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal


class Phases:
    """Stop watch of one group's exchange, while other groups may be under way on the same thread.

    encode, decode  seconds of this thread in the codec for this group, even while messages are under way
    laps            (phase, begin, end) of each of these, by `time.perf_counter`
    rounds          (begin, end) of the times in which messages of this group were under way, each from the first send
                    to the last receive. Rounds that overlap are one
    """

    def __init__(self) -> None:
        self.encode = 0.0
        self.decode = 0.0
        self.laps: list[tuple[str, float, float]] = []
        self.rounds: list[tuple[float, float]] = []
        self._last = time.perf_counter()
        self._num_open = 0
        self._opened = 0.0

    @property
    def exchange(self) -> float:
        """Seconds in which messages were under way."""
        return sum(end - begin for begin, end in self.rounds)

    def lap(self, phase: Literal["encode", "decode"]) -> None:
        """Count the time since the last lap or `resume` as `phase`."""
        now = time.perf_counter()
        setattr(self, phase, getattr(self, phase) + now - self._last)
        self.laps.append((phase, self._last, now))
        self._last = now

    def resume(self) -> None:
        """Begin a lap: leave out the time since the last one, in which the thread waited or did other work."""
        self._last = time.perf_counter()

    def begin_round(self) -> None:
        """Begin a round: call it when its first message is ready to go."""
        if self._num_open == 0:
            self._opened = time.perf_counter()
        self._num_open += 1

    def end_round(self) -> None:
        """End a round: call it when its last message has arrived."""
        assert self._num_open > 0
        self._num_open -= 1
        self.resume()
        if self._num_open == 0:
            self.rounds.append((self._opened, self._last))

    def leave_out_before(self, time_s: float) -> None:
        """Begin rounds not before `time_s`: a device waits for what it was given to send before it has computed it."""
        self.rounds = [(max(begin, time_s), max(end, time_s)) for begin, end in self.rounds]

    @contextmanager
    def round(self) -> Iterator[None]:
        """Count the time inside as a round."""
        self.begin_round()
        yield
        self.end_round()
