"""The thread of an engine: its queue, and how it ends."""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

from cgx_ray.errors import CGXError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Time to finish queued work when Python ends and the script has not closed the engine.
EXIT_GRACE_S = 1.0
# Seconds in which work that is queued when an engine is closed should end. Ranks that close together are hardly apart.
CLOSE_S = 60.0


class Inbox(Iterator[T]):
    """A queue that one thread reads, in order, until its end. Nothing comes after the end."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False

    def put(self, item: T) -> bool:
        """Add `item`. Return False if the inbox is closed: then no thread takes it."""
        with self._lock:
            if not self._is_closed:
                self._queue.put(item)
            return not self._is_closed

    def close(self) -> None:
        """Mark the end."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._queue.put(None)

    def take(self, timeout_s: float | None = None) -> T | None:
        """Return the next item, or None at the end. Raise TimeoutError if none arrives within `timeout_s` seconds.

        Without `timeout_s` it waits as long as needed.
        """
        try:
            return self._queue.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"nothing came for {timeout_s} s") from None

    def take_now(self) -> T | None:
        """Return the next item, or None if there is none yet. The end stays in the queue."""
        if self._queue.empty():
            return None
        item = self._queue.get()
        if item is None:
            self._queue.put(None)
        return item

    @property
    def is_empty(self) -> bool:
        """True if there is neither an item nor the end."""
        return self._queue.empty()

    def __next__(self) -> T:
        if (item := self.take()) is None:
            raise StopIteration
        return item


class WorkThread(Generic[T]):
    """A daemon thread that works on its inbox. It ends before the interpreter does, even without a call of `end`.

    A daemon thread that returns from native code after the interpreter has ended has its stack unwound by Python, and
    C++ then aborts the process with SIGABRT.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Inbox[T]], None],
        hang_up: Callable[[], None],
        wake: Callable[[], None] = lambda: None,
        *,
        closed: str,
    ) -> None:
        """Start the thread.

        work     reads the inbox until its end, then returns. It must answer all that it has taken
        hang_up  interrupts a wait of the thread for other ranks; called if the interpreter ends meanwhile
        wake     called after something was added to the inbox, for a thread that waits elsewhere
        closed   what `put` says after `end`
        """
        inbox: Inbox[T] = Inbox()
        thread = threading.Thread(target=work, args=(inbox,), name=name, daemon=True)
        thread.start()
        self._inbox, self._thread, self._wake = inbox, thread, wake
        self._closed, self._is_closed = closed, False
        self._end_at_exit = weakref.finalize(self, _end, thread, inbox, hang_up, wake)

    def put(self, item: T, where: str) -> None:
        """Add `item` to the inbox. The thread will take it, else this raises CGXError. `where` begins the message."""
        # First, since a fork may have copied a lock of the inbox that was held.
        self.check(where)
        if not self._inbox.put(item):
            raise self._ended(where)
        self._wake()

    def check(self, where: str) -> None:
        """Raise CGXError if the thread has ended."""
        if not self._thread.is_alive():
            raise self._ended(where)

    def _ended(self, where: str) -> CGXError:
        if self._is_closed:
            return CGXError(f"{where}: {self._closed}")
        return CGXError(
            f"{where}: the engine's thread has ended, because Python is ending or because this process is a fork of "
            "the one that attached; attach in the process that trains, and finish training before Python ends"
        )

    def end(self, timeout_s: float | None = None) -> bool:
        """Return True once the thread has finished everything in its inbox; False after `timeout_s`."""
        self._is_closed = True
        self._inbox.close()
        self._wake()
        self._thread.join(timeout_s)
        if has_ended := not self._thread.is_alive():
            self._end_at_exit.detach()
        return has_ended


def _end(thread: threading.Thread, inbox: Inbox[Any], hang_up: Callable[[], None], wake: Callable[[], None]) -> None:
    inbox.close()
    wake()
    thread.join(EXIT_GRACE_S)
    if thread.is_alive():
        hang_up()
        thread.join(EXIT_GRACE_S)


def follow_num_threads(num_threads: int) -> None:
    """Let torch's operators use `num_threads` threads when the calling thread runs them.

    Torch keeps this number per thread, so the engine's thread must set the number of the training thread.
    """
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)


@contextmanager
def noting_more(failure: CGXError) -> Iterator[None]:
    """Note an error within the block on `failure` and go on: memory may be short, and training waits for the thread."""
    try:
        yield
    except BaseException as another:  # noqa: BLE001 - noted, and raised with `failure`
        failure.add_note(f"an error followed while it was reported: {another!r}")


def overdue_at_close(rank: int, step: int, timeout_s: float) -> str:
    """Log that an engine disconnects because its work does not end; return it for the other ranks."""
    said = f"rank {rank}, step {step}: closed, and {timeout_s:g} s later other ranks had not taken part in the exchange"
    logger.warning("%s: it disconnects. Close on all ranks after the same step", said)
    return said
