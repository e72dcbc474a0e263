"""The thread of an engine at the end of a script."""

from __future__ import annotations

import subprocess
import sys

import pytest

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

thread = WorkThread("test", work, is_hung_up.set)
thread.put(1)
time.sleep(0.1)
sys.stdout.write("the end")
"""


@pytest.mark.parametrize("busy", ["time.sleep(0.4)", "is_hung_up.wait()"])
def test_a_thread_in_native_code_ends_before_the_interpreter(busy: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(busy=busy)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end", "")
