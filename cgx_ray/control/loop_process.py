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
import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from cgx_ray.control.loop_work import LoopWork, News
from cgx_ray.errors import CGXError

logger = logging.getLogger(__name__)

# Seconds for which work is gathered before it is sent together: to send each report of 512 nodes by itself costs more.
GATHER_S = 0.02
# Longest time between two looks at whether samples come, in seconds.
WATCH_S = 1.0
# Seconds the actor waits after the loop's process has ended, since Ray ends children first.
END_S = 0.5
# Objects made between two collections, and collections between two of older objects. Reports of thousands of ranks make
# a million objects in ten seconds, hardly any of them in a cycle; Python's own 700 cost a third of the loop's time.
GC_THRESHOLDS = 50_000, 20, 20


class _Asked(NamedTuple):
    """A call of a method of `LoopWork`."""

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
        make: Callable[..., LoopWork],
        arguments: tuple[Any, ...],
        on_news: Callable[[News], None],
        on_end: Callable[[], None],
        after: str = "the controller ends too, and Ray starts it again",
    ) -> None:
        """Start it; it calls `make` with `arguments`, whose classes it must be able to import.

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
            self._process = subprocess.Popen(argv, pass_fds=[its.fileno()])
        self._pipe = Connection(own.detach())
        self._on_news, self._on_end, self._after = on_news, on_end, after
        self._is_closing = False
        self._numbers = itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._asked: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        try:
            self._pipe.send((make, arguments))
            on_news(self._pipe.recv())
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
        """Have a method of the work called, after all that was asked before. An error that it meets is a CGXError."""
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
                self._on_news(news)
                for one in done:
                    self._end_call(one)
        except Exception:
            logger.exception("the controller has failed: %s", self._after)
        # Nobody shall wait for what can no longer come.
        while self._calls:
            with contextlib.suppress(KeyError):
                self._calls.popitem()[1].set_exception(CGXError(f"the control loop has ended: {self._after}"))
        if not self._is_closing:
            self._on_end()

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
    logging.basicConfig(level=logging.INFO)
    pipe = Connection(int(sys.argv[1]))
    received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, received), daemon=True).start()
    make, arguments = pickle.loads(received.get())
    work: LoopWork = make(*arguments)
    # What the imports have made stays.
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    pipe.send(work.news())
    while True:
        try:
            calls: list[bytes] = pickle.loads(received.get(timeout=WATCH_S))
        except queue.Empty:
            calls = []
        done = [_do(work, pickle.loads(asked)) for asked in calls]
        work.watch_samples(time.monotonic(), time.time())
        if done:
            pipe.send((work.news(), done))


def _listen(pipe: Connection, received: queue.SimpleQueue[bytes]) -> None:
    """Receive what the controller sends. When it has ended, end at once, even in the middle of a decision."""
    while True:
        try:
            received.put(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def _do(work: LoopWork, asked: _Asked) -> _Done:
    try:
        return _Done(asked.number, getattr(work, asked.method)(*asked.arguments))
    except Exception as error:  # noqa: BLE001 - told to the caller
        text = f"{type(error).__name__}: {error}"
        return _Done(asked.number, error=(text, traceback.format_exc()))
