"""The thread of an engine: what it accepts, and how it ends."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading

import pytest
from support.meshes import in_threads

from cgx_ray.engine.thread import Inbox, WorkThread
from cgx_ray.errors import CGXError

pytestmark = pytest.mark.long

# A daemon thread that returns from native code after Python's end makes the process abort with SIGABRT.
SCRIPT = """
import sys, threading, time, torch
from cgx_ray.engine.thread import WorkThread

is_hung_up = threading.Event()

def work(items):
    for _ in items:
        future = torch.futures.Future()
        future.then(lambda _: {busy})
        future.set_result(None)

thread = WorkThread("test", work, is_hung_up.set, closed="closed")
thread.put(1, "test")
time.sleep(0.1)
sys.stdout.write("the end")
"""


@pytest.mark.parametrize("busy", ["time.sleep(0.4)", "is_hung_up.wait()"])
def test_a_thread_in_native_code_ends_before_the_interpreter(busy: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(busy=busy)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end", "")


def test_all_that_is_accepted_while_the_thread_is_ended_is_taken() -> None:
    taken, under_way = list[int](), threading.Barrier(4)

    def work(inbox: Inbox[int]) -> None:
        taken.extend(inbox)

    thread = WorkThread("test", work, lambda: None, closed="the engine is closed")

    def put_until_refused() -> int:
        for item in itertools.count():
            if item == 100:
                under_way.wait()
            try:
                thread.put(item, "rank 0")
            except CGXError:
                return item
        raise AssertionError

    def end() -> int:
        under_way.wait()
        assert thread.end()
        return 0

    accepted = in_threads([end, *[put_until_refused] * 3])
    assert min(accepted[1:]) >= 100
    assert sorted(taken) == sorted(itertools.chain.from_iterable(map(range, accepted)))
