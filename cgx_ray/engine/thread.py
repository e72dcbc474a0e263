"""What an engine's own thread takes from the training thread, and hands back, and how it ends."""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from cgx_ray.monitors.sample import StepSample

MAX_KEPT_SAMPLES = 1024
# To finish what a script that has come to its end has waited for, but not closed.
EXIT_GRACE_S = 1.0


def end_at_exit(
    owner: object, thread: threading.Thread, inbox: queue.SimpleQueue[Any], hang_up: Callable[[], None]
) -> weakref.finalize[..., Any]:
    """Let the thread of `owner` end before the interpreter does, if nobody ends it earlier; then `detach` the result.

    Python ends a daemon thread that comes back from native code by unwinding its stack, and C++ ends the process with
    SIGABRT for that.

    inbox    None in it lets the thread end
    hang_up  ends what it may be waiting for; must not hold `owner`
    """
    return weakref.finalize(owner, _end, thread, inbox, hang_up)


def _end(thread: threading.Thread, inbox: queue.SimpleQueue[Any], hang_up: Callable[[], None]) -> None:
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
