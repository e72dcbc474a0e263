"""A training in the hosts of a lab, and its control loop: the job that benches watch."""

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

from cgx_ray.control.adaptive import Adaptive
from cgx_ray.control.journal.facts import LoopFacts
from cgx_ray.control.journal.lines import Journal
from cgx_ray.control.loop import ControlLoop
from cgx_ray.errors import CGXError
from cgx_ray.lab.namespaces import Lab
from cgx_ray.monitors.sample import NodeSample
from cgx_ray.plan import Plan

_START_TIMEOUT_S = 120.0
# Speed of the clock of probes in `bench network`, which are due once per minute: it must not wait for minutes.
_FAST_PROBES = 12


class NetworkBenchError(CGXError, RuntimeError):
    """A process of the job ended too early. The message holds its last lines."""


class Job:
    """A training in the lab and its control loop.

    num_steps  of rank 0, since the loop started
    versions   of the plans in these steps, by step
    answers    other messages of the ranks
    """

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        module: str = "bench.network.rank",
        *,
        given: Mapping[str, Any] | None = None,
        probe_clock: float = _FAST_PROBES,
    ) -> None:
        """
        folder        for the store, the journal and the ranks' errors
        module        runs a rank
        given         to each rank, besides rank, world size, store and address
        probe_clock   speed of the clock by which probes are due
        """
        self._lab = lab
        self._module, self._given, self._probe_clock = module, dict(given or {}), probe_clock
        self._world_size = len(lab.hosts)
        self._folder = folder
        self._errors = folder / "errors"
        self._lock = threading.Lock()
        self._registered = threading.Event()
        self._registration: tuple[Any, ...] = ()
        self._loop: ControlLoop | None = None
        self.num_steps = 0
        self.versions: dict[int, int] = {}
        self.answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.neighbour_bytes_per_s: float | None = None
        with self._errors.open("w") as errors:
            self._ranks = [self._start(rank, errors) for rank in range(self._world_size)]
        self._readers = [threading.Thread(target=self._read, args=(rank,), daemon=True) for rank in self._ranks]
        for reader in self._readers:
            reader.start()

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()
        for reader in self._readers:
            reader.join()
        for rank in self._ranks:
            assert rank.stdin is not None
            # The buffered rest of a plan cannot be written, as the rank that reads it is gone.
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.close()

    def check(self) -> None:
        """Raise NetworkBenchError if a rank has ended."""
        if any(rank.poll() is not None for rank in self._ranks):
            raise NetworkBenchError(f"a rank ended too early:\n{self._errors.read_text()[-2000:]}")

    def start_over(self) -> None:
        """Start the loop again, as after a crash of its process: it estimates the network anew, and knows the rest."""
        with self._lock:
            journal = Journal(self._folder / "decisions.jsonl")
            if self._loop is None:
                self._loop = ControlLoop(Adaptive(), journal)
                self._loop.register(*self._registration)
            else:
                self._loop = ControlLoop(Adaptive(), journal, self._loop.history())
                self._loop.resume()
            self.num_steps, self.versions = 0, {}

    def await_model(self) -> None:
        """Forget loop and plans, for `wait_registered`: the ranks are about to attach another model."""
        with self._lock:
            self._loop = None
            self._registered.clear()

    def order(self, line: str) -> None:
        """Send a line to all ranks."""
        with self._lock:
            for rank in self._ranks:
                _write(rank, line)

    @property
    def plans(self) -> list[Plan]:
        """Plans of the loop so far, the newest last."""
        with self._lock:
            return list(self._loop.plans) if self._loop is not None else []

    def facts(self) -> LoopFacts:
        with self._lock:
            assert self._loop is not None
            return self._loop.facts()

    def wait_for(self, holds: Callable[[LoopFacts], bool], timeout_s: float) -> float | None:
        """Wait until `holds`; return the seconds, or None after `timeout_s`."""
        start_s = time.monotonic()
        while (passed_s := time.monotonic() - start_s) < timeout_s:
            self.check()
            if holds(self.facts()):
                return passed_s
            time.sleep(0.02)
        return None

    def wait_registered(self) -> None:
        end_s = time.monotonic() + _START_TIMEOUT_S
        while not self._registered.wait(0.1):
            self.check()
            if time.monotonic() > end_s:
                raise NetworkBenchError(f"the job did not start:\n{self._errors.read_text()[-2000:]}")
        self.start_over()

    def _start(self, rank: int, errors: Any) -> subprocess.Popen[bytes]:
        job = {
            **self._given,
            "rank": rank,
            "world_size": self._world_size,
            "store": str(self._folder / "store"),
            "address": self._lab.hosts[rank].address,
        }
        argv = [sys.executable, "-m", self._module, json.dumps(job)]
        return self._lab.popen(rank, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)

    def _read(self, rank: subprocess.Popen[bytes]) -> None:
        assert rank.stdout is not None
        # A rank may be killed in the middle of a message.
        with rank.stdout as messages, contextlib.suppress(EOFError, pickle.UnpicklingError, BrokenPipeError):
            while True:
                message = pickle.load(messages)
                if isinstance(message, tuple):
                    self._registration = message
                    self._registered.set()
                elif isinstance(message, NodeSample):
                    self._observe(message)
                else:
                    self.answers.put(message)

    def _observe(self, sample: NodeSample) -> None:
        with self._lock:
            if self._loop is None:
                return
            known = len(self._loop.plans)
            now_s = time.monotonic()
            self._loop.observe(sample, now_s)
            if sample.node_id == "host 0":
                self.num_steps += len(sample.steps)
                self.versions.update((step.step, step.plan_version) for step in sample.steps)
                self.neighbour_bytes_per_s = sample.host.neighbour_bytes_per_s
            for plan in self._loop.plans[known:]:
                for rank in self._ranks:
                    _write(rank, plan.to_json().replace("\n", " "))
            target = self._loop.next_probe(sample.node_id, self._probe_clock * now_s)
            if target is not None:
                _write(self._ranks[int(sample.node_id.removeprefix("host "))], target)


def _write(rank: subprocess.Popen[bytes], line: str) -> None:
    assert rank.stdin is not None
    rank.stdin.write(line.encode() + b"\n")
    rank.stdin.flush()
