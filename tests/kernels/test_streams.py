"""Marks, the threads that wait for them, and who may use the streams of torch.cuda."""

from __future__ import annotations

import ast
import queue
import threading
from pathlib import Path

import pytest
import torch
from support.device.marks import GivenMark

from cgx_ray.codecs.codec import HOST
from cgx_ray.runtime_ext.streams import DONE, Waiter, streams_of

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20.0
# `streams` for a training; the others measure or launch.
ALLOWED = {
    "runtime_ext/streams.py",
    "runtime_ext/cuda_launch.py",
    "cgx_ray/session/calibrate.py",
    "monitors/gradient_times.py",
}
WAYS = {"synchronize", "current_stream", "set_stream", "wait_stream", "wait_event", "record_stream", "elapsed_time"}


def test_on_a_cpu_all_calls_are_done_when_they_return() -> None:
    streams = streams_of(HOST)
    assert streams is streams_of(torch.device("cpu"))
    assert streams.current() is None
    assert not streams.is_capturing()
    mark = streams.mark()
    assert mark is DONE
    assert mark.is_done
    mark.wait()
    source, target = torch.arange(6).view(2, 3), streams.host_memory(6, torch.float32)
    streams.copy_each([(source, target)])
    assert target.tolist() == [0, 1, 2, 3, 4, 5]
    future = streams.future()
    future.set_result(target)
    assert future.wait() is target


def test_a_waiter_wakes_once_a_mark_is_done_and_notes_when() -> None:
    woken: queue.Queue[str] = queue.Queue()
    waiter = Waiter(lambda: woken.put(threading.current_thread().name))
    first, second, other = GivenMark(), GivenMark(), GivenMark()
    other.stream = 2
    for mark in (first, second, first, other):
        waiter.watch(mark)
    assert woken.empty()
    # A mark of another stream does not wait for those of this one.
    other.set()
    assert woken.get(timeout=PATIENCE_S) == "cgx-ray-waiter"
    assert other.seen_s is not None
    second.set()
    assert woken.empty()
    first.set()
    for _ in range(2):
        woken.get(timeout=PATIENCE_S)
    assert first.seen_s is not None
    assert second.seen_s is not None
    assert first.seen_s <= second.seen_s
    waiter.close()
    assert woken.empty()


def test_a_mark_that_is_done_needs_no_thread() -> None:
    num_threads = threading.active_count()
    waiter = Waiter(lambda: pytest.fail("nobody waits"))
    mark = GivenMark()
    mark.set()
    for one in (mark, DONE):
        waiter.watch(one)
    assert threading.active_count() == num_threads
    assert mark.seen_s is not None
    assert DONE.seen_s is None


class _Broken(GivenMark):
    def wait(self) -> None:
        super().wait()
        raise RuntimeError("CUDA error")


def test_a_broken_device_wakes_the_thread_that_will_find_out() -> None:
    woken: queue.Queue[None] = queue.Queue()
    waiter = Waiter(lambda: woken.put(None))
    broken, sound = _Broken(), GivenMark()
    for mark in (broken, sound):
        waiter.watch(mark)
        mark.set()
        woken.get(timeout=PATIENCE_S)
    assert broken.seen_s is None
    assert sound.seen_s is not None
    waiter.close()


def _uses_streams(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            is_of_cuda = isinstance(node.value, ast.Attribute) and node.value.attr == "cuda"
            if node.attr in WAYS or (is_of_cuda and node.attr in {"Stream", "Event", "stream", "ExternalStream"}):
                return True
    return False


def test_one_module_has_all_streams_events_and_waits_of_a_training() -> None:
    sources = [path for folder in ("cgx_ray", "monitors", "runtime_ext") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 100
    found = {str(path.relative_to(ROOT)) for path in sources if _uses_streams(path)}
    through_links = {f"cgx_ray/{name}" for name in ALLOWED if not name.startswith("cgx_ray/")}
    assert found - through_links == ALLOWED
