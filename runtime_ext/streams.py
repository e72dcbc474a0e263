"""Streams, events and copies of a device: the only module of a training that uses those of torch.cuda.

Calls on a CUDA device return before the device has done them. Each is enqueued on the current stream of its thread, and
the device does the calls of one stream in order. On a CPU a call is done when it returns, so there are no streams.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

# Seconds that the end of Python waits for a `Waiter`.
EXIT_GRACE_S = 1.0


Stream = torch.cuda.Stream


class Mark:
    """A point in a stream, done when the device has done all calls before it. This one is a CPU's: done at once.

    stream      number of the stream
    seen_s      host time, as of `time.perf_counter`, at which a `Waiter` found it done; None before that
    is_watched  True once a `Waiter` has it
    """

    stream = 0
    seen_s: float | None = None
    is_watched = False

    @property
    def is_done(self) -> bool:
        """True if the device has come to it. Never waits."""
        return True

    def wait(self) -> None:
        """Let this thread wait until it is done."""

    def seconds_since(self, earlier: Mark) -> float:
        """Return the device's time from `earlier` to this mark. Both must be done."""
        return 0.0


# The mark of all that a CPU has computed.
DONE = Mark()


class _CudaMark(Mark):
    def __init__(self, stream: Stream) -> None:
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)
        self._event.record(stream)
        self.stream: int = stream.cuda_stream

    def hold(self, stream: Stream) -> None:
        """Let `stream` go on after this mark."""
        stream.wait_event(self._event)

    @property
    def is_done(self) -> bool:
        is_done: bool = self._event.query()
        return is_done

    def wait(self) -> None:
        self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, _CudaMark)
        since_ms: float = earlier._event.elapsed_time(self._event)
        return 1e-3 * since_ms


class Streams:
    """Streams of one device, by which this process uses it. This one is a CPU's, which has none."""

    def enter(self) -> None:
        """Let the calling thread use the device, on a stream of its own from now on."""

    def current(self) -> Stream | None:
        """Return the stream of the calling thread; None on a CPU."""
        return None

    def is_capturing(self) -> bool:
        """Return True if the calls of this thread are recorded into a CUDA graph instead of being done."""
        return False

    def mark(self, stream: Stream | None = None) -> Mark:
        """Return the point to which `stream` has come with the calls so far; by default that of the calling thread."""
        return DONE

    def join(self, streams: Iterable[Stream]) -> None:
        """Let the stream of the calling thread go on after all that `streams` have been given so far."""

    @contextmanager
    def apart(self, after: Iterable[Mark] = ()) -> Iterator[None]:
        """Let this thread's calls in the block go on the stream of the vendor's sums, for which no codec waits.

        That stream goes on after all calls of this thread so far and after the marks in `after`, and the thread does
        not wait. Nothing but marks says when the calls are done.
        """
        yield

    def wait_for_all(self) -> None:
        """Let the calling thread wait for all calls of all threads so far."""

    def future(self) -> torch.futures.Future[Tensor]:
        """Return a future. Whoever waits for it goes on after what the thread that sets it has enqueued before."""
        return torch.futures.Future()

    def copy_each(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy the first of each pair to the second, of any shape, type and device. Does not wait for the device.

        Memory on the host that a device copies from or to must be from `host_memory`, and stay until that is done.
        """
        for source, target in pairs:
            target.view(-1).copy_(source.view(-1), non_blocking=True)

    def host_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory on the host, without initial values, that the device copies from and to at full speed."""
        return torch.empty(numel, dtype=dtype, device="cpu")


class _CudaStreams(Streams):
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def enter(self) -> None:
        # Both are set per thread.
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(torch.cuda.Stream(self._device))

    def current(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def mark(self, stream: Stream | None = None) -> Mark:
        return _CudaMark(stream if stream is not None else self.current())

    def join(self, streams: Iterable[Stream]) -> None:
        current = self.current()
        for other in streams:
            if other != current:
                current.wait_stream(other)

    @cached_property
    def _apart(self) -> Stream:
        return torch.cuda.Stream(self._device)

    @contextmanager
    def apart(self, after: Iterable[Mark] = ()) -> Iterator[None]:
        self._apart.wait_stream(self.current())
        for mark in after:
            # A mark that is done at once orders nothing.
            if isinstance(mark, _CudaMark):
                mark.hold(self._apart)
        with torch.cuda.stream(self._apart):
            yield

    def wait_for_all(self) -> None:
        torch.cuda.synchronize(self._device)

    def copy_each(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        kinds = {(source.device, target.device, source.dtype, target.dtype) for source, target in pairs}
        if len(pairs) < 2 or len(kinds) > 1 or any(tensor.device != self._device for tensor in pairs[0]):
            super().copy_each(pairs)
            return
        # One call for all layers of a group, and hardly more launches.
        sources, targets = ([tensor.view(-1) for tensor in side] for side in zip(*pairs, strict=True))
        torch._foreach_copy_(targets, sources, non_blocking=True)

    def future(self) -> torch.futures.Future[Tensor]:
        return torch.futures.Future(devices=[self._device])

    def host_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)


# By device, once they are used. Tests put those of a device that they make up here.
STREAMS: dict[torch.device, Streams] = {}


def streams_of(device: torch.device) -> Streams:
    """Return the streams of `device`, the same object at every call."""
    if device not in STREAMS:
        STREAMS[device] = _CudaStreams(device) if device.type == "cuda" else Streams()
    return STREAMS[device]


class Reading(NamedTuple):
    """A place in `DeviceNumbers`: the values [start, stop) of those of one type on one device."""

    kind: tuple[str, torch.dtype]
    start: int
    stop: int


class DeviceNumbers:
    """Numbers that a device computes, which the host reads together: one copy, and one wait for its end.

    They are read as float64, which has all values of the types that gradients, their norms and counts have. Some may
    lie on the host.
    """

    def __init__(self, device: torch.device) -> None:
        """Use the stream of the calling thread, in all calls."""
        self._device = device
        self._values: dict[tuple[str, torch.dtype], list[Tensor]] = {}
        self._numels: dict[tuple[str, torch.dtype], int] = {}
        self._read: dict[tuple[str, torch.dtype], Tensor] = {}

    def add(self, values: Tensor) -> Reading:
        """Note `values`, of any shape, which must stay as they are until they are read."""
        kind = values.device.type, values.dtype
        start = self._numels.get(kind, 0)
        self._values.setdefault(kind, []).append(values.reshape(-1))
        self._numels[kind] = start + values.numel()
        return Reading(kind, start, start + values.numel())

    def read(self) -> None:
        """Wait for all that was noted, and forget the tensors."""
        joined = {kind: torch.cat(values).double() for kind, values in self._values.items()}
        away = {kind: part for kind, part in joined.items() if kind[0] == self._device.type}
        if away:
            streams = streams_of(self._device)
            host = streams.host_memory(sum(map(len, away.values())), torch.float64)
            streams.copy_each([(torch.cat([*away.values()]), host)])
            streams.mark().wait()
            joined |= zip(away, host.split([len(part) for part in away.values()]), strict=True)
        self._read, self._values = joined, {}

    def host(self, reading: Reading) -> Tensor:
        """Return what was read, (values,) float64 on the host."""
        return self._read[reading.kind][reading.start : reading.stop]

    def number(self, reading: Reading) -> float:
        """Return what was read of a single value."""
        return float(self.host(reading))


class Waiter:
    """Threads that wait for marks and call `wake` after each, one thread for each stream.

    It starts with the first mark of its stream that is not done, so on a CPU there is none.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._marks: dict[int, queue.SimpleQueue[Mark | None]] = {}

    def watch(self, mark: Mark) -> None:
        """Call `wake` once `mark` is done, and set its `seen_s`. Does nothing if it is done or watched already."""
        if mark.is_watched:
            return
        if mark.is_done:
            if mark is not DONE:
                mark.seen_s = time.perf_counter()
            return
        mark.is_watched = True
        if mark.stream not in self._marks:
            marks = self._marks[mark.stream] = queue.SimpleQueue()
            thread = threading.Thread(
                target=_wait_for_each, args=(marks, self._wake), name="cgx-ray-waiter", daemon=True
            )
            thread.start()
            # As `WorkThread`, it must not return from native code after Python has ended.
            weakref.finalize(self, _end, marks, thread)
        self._marks[mark.stream].put(mark)

    def close(self) -> None:
        """Let the threads end once the marks that they have are done."""
        for marks in list(self._marks.values()):
            marks.put(None)


def _wait_for_each(marks: queue.SimpleQueue[Mark | None], wake: Callable[[], None]) -> None:
    while (mark := marks.get()) is not None:
        # If the device has failed, the thread that is woken gets the same error from `is_done`.
        with suppress(RuntimeError):
            mark.wait()
            mark.seen_s = time.perf_counter()
        wake()
        del mark


def _end(marks: queue.SimpleQueue[Mark | None], thread: threading.Thread) -> None:
    marks.put(None)
    thread.join(EXIT_GRACE_S)
