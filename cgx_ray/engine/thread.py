"""The thread of an engine: what it takes from the training thread, and hands back, and how it ends."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

from cgx_ray.errors import CGXError
from cgx_ray.monitors.sample import StepSample

T = TypeVar("T")

MAX_KEPT_SAMPLES = 1024
# To finish what a script that has come to its end has waited for, but not closed.
EXIT_GRACE_S = 1.0


class Inbox(Iterator[T]):
    """Gives one thread what others put, in order, until there is no more."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()

    def put(self, item: T | None) -> None:
        """Queue one thing more, or None: there is no more."""
        self._queue.put(item)

    def take(self, timeout_s: float | None = None) -> T | None:
        """The next thing, or None. Raises TimeoutError if none comes for `timeout_s`; None: it waits."""
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"nothing came for {timeout_s} s") from None

    def __next__(self) -> T:
        if (item := self.take()) is None:
            raise StopIteration
        return item


class WorkThread(Generic[T]):
    """A daemon thread that works through what is `put`, and ends before the interpreter does if nobody ends it earlier.

    Python ends a daemon thread that comes back from native code after its end by unwinding its stack, and C++ ends the
    process with SIGABRT for that.
    """

    def __init__(self, name: str, work: Callable[[Inbox[T]], None], hang_up: Callable[[], None]) -> None:
        """Start the thread.

        work     takes what is put, as it comes; returns when there is no more
        hang_up  ends what the thread may be waiting for when the interpreter ends
        """
        inbox: Inbox[T] = Inbox()
        thread = threading.Thread(target=work, args=(inbox,), name=name, daemon=True)
        thread.start()
        self._inbox, self._thread = inbox, thread
        self._end_at_exit = weakref.finalize(self, _end, thread, inbox, hang_up)

    def put(self, item: T) -> None:
        """Queue one thing more."""
        self._inbox.put(item)

    @property
    def has_ended(self) -> bool:
        """Whether nobody takes what is put."""
        return not self._thread.is_alive()

    def check(self, where: str) -> None:
        """Raise CGXError if the thread has ended, so that nobody waits for what it would not do."""
        if self.has_ended:
            raise CGXError(
                f"{where}: the engine's thread has ended, as when Python ends, or in a fork of the process that "
                "attached; attach in the process that trains, and train on before it ends"
            )

    def end(self) -> None:
        """Return once the thread has finished what was put."""
        self._inbox.put(None)
        self._thread.join()
        self._end_at_exit.detach()


def _end(thread: threading.Thread, inbox: Inbox[Any], hang_up: Callable[[], None]) -> None:
    inbox.put(None)
    thread.join(EXIT_GRACE_S)
    if thread.is_alive():
        hang_up()
        thread.join(EXIT_GRACE_S)


def follow_num_threads(num_threads: int) -> None:
    """Let operators of the calling thread use as many threads as those of the training thread.

    The number is each thread's own.
    """
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


def take_all(samples: deque[StepSample]) -> list[StepSample]:
    """Empty `samples`, oldest first, while another thread may add to them."""
    taken = []
    while samples:
        taken.append(samples.popleft())
    return taken
