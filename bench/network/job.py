"""Ranks in the hosts of a lab that obey lines and answer with pickles: the training that benches watch."""

from __future__ import annotations

import contextlib
import json
import pickle
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.network.watched_work import Watched
from cgx_ray.control.journal.facts import LoopFacts
from cgx_ray.errors import CGXError
from cgx_ray.lab.namespaces import Lab

_START_TIMEOUT_S = 120.0
# Seconds between two looks at whether the ranks still live.
_LOOK_S = 0.05


class NetworkBenchError(CGXError, RuntimeError):
    """A process of the job ended too early. The message holds its last lines."""


class Job:
    """Ranks in a lab. `answers`: what rank 0 has sent."""

    def __init__(self, lab: Lab, folder: Path, module: str, *, given: Mapping[str, Any] | None = None) -> None:
        """
        folder  for the store, the journals and the ranks' errors
        module  runs a rank
        given   to each rank, besides rank, world size and store
        """
        self._errors = folder / "errors"
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        whole = {**(given or {}), "world_size": len(lab.hosts), "store": str(folder / "store")}
        with self._errors.open("w") as errors:
            self._ranks = [
                lab.popen(
                    rank,
                    [sys.executable, "-m", module, json.dumps({**whole, "rank": rank})],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stderr=errors,
                )
                for rank in range(len(lab.hosts))
            ]
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        self._reader.join()
        for rank in self._ranks:
            assert rank.stdin is not None
            # The buffered rest of an order cannot be written, as the rank that reads it is gone.
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.close()

    def check(self) -> None:
        """Raise NetworkBenchError if a rank has ended."""
        if any(rank.poll() is not None for rank in self._ranks):
            raise NetworkBenchError(f"a rank ended too early:\n{self._errors.read_text()[-2000:]}")

    def order(self, line: str, *, rank_0_only: bool = False) -> None:
        """Send a line to all ranks, or to rank 0."""
        for rank in self._ranks[:1] if rank_0_only else self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(line.encode() + b"\n")
            rank.stdin.flush()

    def answer(self, timeout_s: float = _START_TIMEOUT_S) -> Any:
        """Return the next answer of rank 0. Raises NetworkBenchError if a rank has ended, or if none comes in time."""
        end_s = time.monotonic() + timeout_s
        while True:
            self.check()
            try:
                return self.answers.get(timeout=_LOOK_S)
            except queue.Empty:
                if time.monotonic() > end_s:
                    raise NetworkBenchError(f"rank 0 does not answer:\n{self._errors.read_text()[-2000:]}") from None

    def _read(self) -> None:
        messages = self._ranks[0].stdout
        assert messages is not None
        # The rank may be killed in the middle of a message.
        with messages, contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                self.answers.put(pickle.load(messages))


class WatchedJob(Job):
    """The job of `bench network`, which trains until it is closed, and what its control loop knows."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        super().__init__(lab, folder, "bench.network.rank")

    def start_over(self) -> None:
        """Start the loop again, as after a crash of its process: it estimates the network anew, and knows the rest."""
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
