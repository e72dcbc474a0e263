"""Ranks in the hosts of a lab that obey lines and answer with pickles: the training that benches watch."""

from __future__ import annotations

import contextlib
import io
import pickle
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from bench.network.watched_loop import Watched
from bench.shared.ranks import BenchError, Ranks
from cgx_ray.control.journal.facts import LoopFacts

_START_TIMEOUT_S = 120.0
# Seconds between two looks at whether the ranks still live.
_LOOK_S = 0.05


class Job:
    """Ranks in a lab. `answers`: what rank 0 has sent."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.order, self.check = ranks.send_line, ranks.check

    def answer(self, timeout_s: float = _START_TIMEOUT_S) -> Any:
        """Return the next answer of rank 0. Raises BenchError if a rank has ended, or if none comes in time."""
        end_s = time.monotonic() + timeout_s
        while True:
            self.check()
            try:
                return self.answers.get(timeout=_LOOK_S)
            except queue.Empty:
                if time.monotonic() > end_s:
                    raise BenchError(f"{self._ranks.name}: rank 0 has not answered for {timeout_s:g} s") from None

    def _read(self) -> None:
        messages = self._ranks.processes[0].stdout
        assert isinstance(messages, io.TextIOWrapper)
        # The rank may be killed in the middle of a message, and its pipe closed while this reads.
        with contextlib.suppress(EOFError, ValueError, pickle.UnpicklingError):
            while True:
                self.answers.put(pickle.load(messages.buffer))


class WatchedJob(Job):
    """The job of `bench network`, which trains until it is closed, and what its control loop knows."""

    def start_over(self) -> None:
        """Start the loop again, as after a crash of its process: it estimates the network again, and knows the rest."""
        self._ask("start_over")

    def watched(self) -> Watched:
        found: Watched = self._ask("watched")
        return found

    def facts(self) -> LoopFacts:
        return self.watched().facts

    @property
    def num_steps(self) -> int:
        """Steps since the loop has started."""
        return self.watched().num_steps

    def wait_for(self, holds: Callable[[LoopFacts], bool], timeout_s: float) -> float | None:
        """Wait until `holds`; return the seconds, or None after `timeout_s`."""
        start_s = time.monotonic()
        while (passed_s := time.monotonic() - start_s) < timeout_s:
            if holds(self.facts()):
                return passed_s
            time.sleep(_LOOK_S)
        return None

    def _ask(self, method: str) -> Any:
        self.order(method, rank_0_only=True)
        return self.answer()
