"""The control loop in a process of its own: beside a search for plans, the controller answers at once.

The controller starts the process and sends it work through a pair of sockets. Whichever of the two ends, the other one
ends too: Ray starts the controller again, and that goes on with the same snapshot and journal. The process does not
import Ray.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from logging.handlers import QueueHandler
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from cgx_ray.control.history import KEPT_PLANS, History, Snapshot
from cgx_ray.control.journal.facts import LoopFacts
from cgx_ray.control.journal.lines import QueuedJournal
from cgx_ray.control.loop import ControlLoop
from cgx_ray.control.policies.policy import Policy
from cgx_ray.errors import CGXError
from cgx_ray.logs import NAME
from cgx_ray.plan import Plan

logger = logging.getLogger(__name__)

# Seconds for which work is gathered before it is sent together: to send each report of 512 nodes by itself costs more.
GATHER_S = 0.02
# Longest time between two looks at whether samples come, and between two settings of all metrics, in seconds: as often
# as nodes report.
WATCH_S = 1.0
# Seconds the actor waits after the loop's process has ended, since Ray ends children first.
END_S = 0.5
# Seconds between two snapshots of the history without a new plan: as much may be learned again after a crash.
SNAPSHOT_INTERVAL_S = 60.0
# Longest wait for the last lines of the journal, in seconds. They take milliseconds unless the file system hangs.
# Less than callers wait for an answer, see HISTORY_TIMEOUT_S and FAULT_S of `ray_train`.
FLUSH_S = 2.0
# Methods after which this process may be ended: the journal is flushed first.
_LAST_METHODS = ("end", "add_fault")
# Objects made between two collections, and collections between two of older objects. Reports of thousands of ranks make
# a million objects in ten seconds, hardly any of them in a cycle; Python's own 700 cost a third of the loop's time.
GC_THRESHOLDS = 50_000, 20, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStart:
    """Start of the process, which goes on from the snapshot, if there is one, else from `history`.

    journal_path   of the journal
    snapshot_path  of a file that no other controller uses
    history        that of the controller of the worker group before, None for the first
    nodes          address of each rank's node
    warns          False if the user knows already that neither file can be written
    loop_type      a class of the loop that a bench can ask more
    """

    policy: Policy
    journal_path: Path
    snapshot_path: Path
    run_name: str
    history: History | None = None
    nodes: Sequence[str] = ()
    warns: bool = True
    loop_type: type[ControlLoop] = ControlLoop


class News(NamedTuple):
    """Values that have changed since the news before.

    plans  in the snapshot, oldest first, if there is a new one
    facts  for the metrics, with the number of lines that the journal has lost
    logged records for the log of the controller's process, as its logging is set up
    """

    plans: tuple[Plan, ...] | None = None
    facts: tuple[LoopFacts, int] | None = None
    logged: tuple[logging.LogRecord, ...] = ()


class _Asked(NamedTuple):
    """A call of a method of the loop."""

    number: int
    method: str
    arguments: tuple[Any, ...]


class _Done(NamedTuple):
    """Result of the call with this number, or the error that it met, as a line and with its traceback."""

    number: int
    result: Any = None
    error: tuple[str, str] | None = None


class LoopProcess:
    """The process, as the controller sees it."""

    def __init__(
        self,
        start: LoopStart,
        on_news: Callable[[News], None],
        on_end: Callable[[], None],
        after: str = "the controller ends too, and Ray starts it again",
    ) -> None:
        """Start it; it must be able to import the classes of `start`.

        Raises CGXError if that fails. If a signal ends it meanwhile, `on_end` is called before.

        on_news  gets what has changed, before the calls that came with it have their results; at first from here, then
                 from a thread
        on_end   called by a thread when the process has ended, other than by `close`
        after    says in the log what follows from that
        """
        own, its = socket.socketpair()
        # Ray gives its workers more paths than Python has. PYTHONPATH would come after the working folder.
        paths = [*map(str, sys.path)]
        code = f"import sys; sys.path[:] = {paths!r}; from {__name__} import main; main()"
        with its:
            argv = [sys.executable, "-c", code, str(its.fileno())]
            # Ctrl-C is for the training, which then ends this process in order.
            self._process = subprocess.Popen(argv, pass_fds=[its.fileno()], process_group=0)
        self._pipe = Connection(own.detach())
        self._on_news, self._on_end, self._after = on_news, on_end, after
        self._is_closing = False
        self._numbers = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        try:
            self._pipe.send(start)
            self._take(self._pipe.recv())
        except (EOFError, OSError) as error:
            status = self._process.wait()
            if status < 0:
                # A signal, perhaps for want of memory. Ray starts processes again that end, but no actor that raises.
                logger.error("the process of the control loop was ended while it started (exit status %s)", status)
                on_end()
            raise CGXError(
                f"the process of the control loop could not start (exit status {status}); the log has its error"
            ) from error
        for work in (self._send, self._receive):
            threading.Thread(target=work, name="cgx-ray-loop", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def num_waiting(self) -> int:
        """Number of calls without a result."""
        return len(self._calls)

    def ask(self, method: str, *arguments: Any) -> Future[Any]:
        """Have a method of the loop called, after all that was asked before. An error that it meets is a CGXError."""
        number = next(self._numbers)
        asked = pickle.dumps(_Asked(number, method, arguments), pickle.HIGHEST_PROTOCOL)
        call = self._calls[number] = Future[Any]()
        self._asked.put(asked)
        return call

    def close(self) -> None:
        """End the process, whatever it does. Ask for its history before."""
        self._is_closing = True
        self._process.kill()
        self._process.wait()
        # So that the sending thread meets its end.
        self._asked.put(b"")

    def _send(self) -> None:
        # `_receive` meets the end of the process too.
        with contextlib.suppress(OSError):
            while True:
                asked = [self._asked.get()]
                time.sleep(GATHER_S)
                self._pipe.send(asked + [self._asked.get() for _ in range(self._asked.qsize())])

    def _receive(self) -> None:
        try:
            while (received := self._received()) is not None:
                news, done = received
                self._take(news)
                for one in done:
                    self._end_call(one)
        except Exception:
            logger.exception("the controller has failed: %s", self._after)
        # No call shall wait for what can no longer come.
        while self._calls:
            with contextlib.suppress(KeyError):
                self._calls.popitem()[1].set_exception(CGXError(f"the control loop has ended: {self._after}"))
        if not self._is_closing:
            self._on_end()

    def _take(self, news: News) -> None:
        """Log what the process has logged, and hand on its news."""
        for record in news.logged:
            its = logging.getLogger(record.name)
            if its.isEnabledFor(record.levelno):
                its.handle(record)
        self._on_news(news)

    def _received(self) -> tuple[News, list[_Done]] | None:
        """Return what the process sends next, None if it has ended."""
        try:
            news, done = self._pipe.recv()
        except (EOFError, OSError):
            if self._is_closing:
                return None
            # Ray ends the children of an actor right before the actor. Do not log in that case.
            time.sleep(END_S)
            logger.error(
                "the process of the control loop has ended (exit status %s): %s", self._process.wait(), self._after
            )
            return None
        return news, done

    def _end_call(self, done: _Done) -> None:
        call = self._calls.pop(done.number)
        if done.error is None:
            call.set_result(done.result)
        else:
            text, trace = done.error
            error = CGXError(text)
            error.add_note(trace)
            call.set_exception(error)


# The rest runs in the process.


def main() -> None:
    """Do what the controller asks for, until it ends."""
    pipe = Connection(int(sys.argv[1]))
    # The controller's process shows them, by its own levels.
    logged: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    own = logging.getLogger(NAME)
    own.addHandler(QueueHandler(logged))
    own.setLevel(logging.DEBUG)
    own.propagate = False
    received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, received), daemon=True).start()
    kept = _KeptLoop(pickle.loads(received.get()), logged)
    # What the imports have made stays.
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    pipe.send(kept.news(time.monotonic()))
    while True:
        try:
            calls: list[bytes] = pickle.loads(received.get(timeout=WATCH_S))
        except queue.Empty:
            calls = []
        done = [kept.do(pickle.loads(asked)) for asked in calls]
        kept.loop.watch_samples(time.monotonic(), time.time())
        if done or not logged.empty():
            pipe.send((kept.news(time.monotonic()), done))


def _listen(pipe: Connection, received: queue.SimpleQueue[bytes]) -> None:
    """Receive what the controller sends. When it has ended, end at once, even in the middle of a decision."""
    while True:
        try:
            received.put(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


class _KeptLoop:
    """The loop with its files: a snapshot has each plan before any rank may get it."""

    def __init__(self, start: LoopStart, logged: queue.SimpleQueue[logging.LogRecord]) -> None:
        """`logged`: records of this process, for the news."""
        self._logged = logged
        self._journal = QueuedJournal(start.journal_path, warns=start.warns)
        self._snapshot = Snapshot(start.snapshot_path, warns=start.warns)
        own = self._snapshot.read()
        self.loop = start.loop_type(
            start.policy, self._journal, own or start.history, run_name=start.run_name, nodes=start.nodes
        )
        # Version of the newest plan in the news, and when snapshot and metrics were written.
        self._newest = -1
        self._snapshot_s = self._facts_s = -math.inf
        if own is not None:
            logger.warning("the controller was started again and goes on with plan %d", own.plans[-1].version)
            self.loop.resume()
        elif start.history is None and start.journal_path.exists():
            logger.warning(
                "%s is of an earlier run, and this one adds its lines to it: report counts both as one run, which is "
                "right for a training that was resumed; give any other its own folder or name",
                start.journal_path,
            )

    def do(self, asked: _Asked) -> _Done:
        """Call a method of the loop."""
        try:
            result = getattr(self.loop, asked.method)(*asked.arguments)
        except Exception as error:  # noqa: BLE001 - raised by the caller
            text = f"{type(error).__name__}: {error}"
            return _Done(asked.number, error=(text, traceback.format_exc()))
        if asked.method in _LAST_METHODS:
            self._journal.flush(FLUSH_S)
            self._facts_s = -math.inf
        return _Done(asked.number, result)

    def news(self, now_s: float) -> News:
        """Write a snapshot if there is a new plan, or if the last one is old; return what has changed."""
        plans, facts = None, None
        newest = self.loop.plans[-1].version if self.loop.plans else -1
        is_new, is_old = newest != self._newest, now_s >= self._snapshot_s + SNAPSHOT_INTERVAL_S
        # After the end the snapshot's folder may have been removed.
        if self.loop.is_registered and not self.loop.is_ended and (is_new or is_old):
            self._snapshot.write(self.loop.history())
            self._snapshot_s = now_s
        if is_new:
            self._newest, plans = newest, tuple(self.loop.plans[-KEPT_PLANS:])
        if self.loop.is_registered and now_s >= self._facts_s + WATCH_S:
            self._facts_s = now_s
            facts = self.loop.facts(), self._journal.num_errors
        return News(plans, facts, tuple(self._logged.get() for _ in range(self._logged.qsize())))
