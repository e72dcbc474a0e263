"""Marks, the threads that wait for them, and who may use the streams of torch.cuda."""

from __future__ import annotations

import ast
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from support.device.marks import GivenMark

from cgx_ray.codecs.codec import HOST
from cgx_ray.runtime_ext.streams import DONE, Streams, Waiter, streams_of

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20.0
ALLOWED = {"runtime_ext/streams.py", "runtime_ext/cuda_launch.py"}
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


class _FakeCuda:
    """Takes the place of torch.cuda's streams and events; `calls` gets what streams are given, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.now = self.stream("usual")

    def stream(self, name: str) -> MagicMock:
        stream = MagicMock(cuda_stream=len(name))
        stream.name = name
        stream.wait_stream.side_effect = lambda other: self.calls.append(f"{name} after {other.name}")
        stream.wait_event.side_effect = lambda event: self.calls.append(f"{name} after {event.name}")
        return stream

    @contextmanager
    def on(self, stream: MagicMock) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def event(self, **options: object) -> MagicMock:
        event = MagicMock()

        def record(stream: MagicMock) -> None:
            event.name = f"mark {len(self.calls)} of {stream.name}"
            self.calls.append(event.name)

        event.record.side_effect = record
        return event


def test_a_sum_waits_on_the_device_for_its_gradients_and_codecs_do_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, made = _FakeCuda(), list[object]()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.now)
    monkeypatch.setattr(torch.cuda, "stream", fake.on)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or fake.stream("sums"))
    monkeypatch.setattr("cgx_ray.runtime_ext.streams.STREAMS", {})
    streams = streams_of(torch.device("cuda", 0))
    computed = streams.mark(fake.stream("gradient"))
    for _ in range(2):
        with streams.apart([computed, DONE]):
            fake.calls.append(f"sum on {fake.now.name}")
            summed = streams.mark()
        fake.calls.append(f"encode on {fake.now.name}")
    assert summed.stream == len("sums")
    assert len(made) == 1, "one stream for all sums, so that they stay in order"
    first, again = fake.calls[1:6], fake.calls[6:]
    assert fake.calls[0] == "mark 0 of gradient"
    assert first[:3] == ["sums after usual", "sums after mark 0 of gradient", "sum on sums"]
    assert first[3:] == ["mark 4 of sums", "encode on usual"]
    assert [call for call in again if "mark 9" not in call] == [call for call in first if "mark 4" not in call]


def test_on_a_cpu_nothing_is_apart() -> None:
    with Streams().apart([DONE]):
        assert Streams().current() is None


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
