"""Calls of the traced device: what each reads and writes, what is known to be done before it, and who made it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from cgx_ray.codecs.codec import Memory, PayloadRow

# By stream, the number of its calls that are known to be done.
Clock = dict[int, int]


class RaceError(RuntimeError):
    """Two accesses to the same memory, at least one of them a write, that nothing puts in order."""


class Access(NamedTuple):
    """An access to the bytes [start, stop): number `number` of `stream`."""

    start: int
    stop: int
    is_write: bool
    stream: int
    number: int
    what: str


class Call(NamedTuple):
    do: Callable[[], object]
    after: Clock


class Held(NamedTuple):
    """A row as the arguments of a kernel: a later commit changes what its `memory` holds."""

    row: PayloadRow
    reads: list[Tensor]
    writes: list[Tensor]


def held_row(row: PayloadRow) -> Held:
    memory = row.memory
    if memory is not None:
        memory = Memory(dict(memory.now), dict(memory.next), memory.scale)
        row = replace(row, memory=memory)
    now, next_ = ([*memory.now.values()], [*memory.next.values()]) if memory is not None else ([], [])
    return Held(row, [row.part_N, *now], [row.payload, *next_])


def copying(source: Tensor, target: Tensor) -> Callable[[], object]:
    return lambda: target.view(-1).copy_(source.view(-1))


def lies_in(memory: Sequence[tuple[int, int]], tensor: Tensor) -> bool:
    start, stop, _ = span(tensor, False)
    return start < stop and any(first <= start < last for first, last in memory)


def joined(one: Mapping[int, int], other: Mapping[int, int]) -> Clock:
    return {stream: max(one.get(stream, 0), other.get(stream, 0)) for stream in {*one, *other}}


def span(tensor: Tensor, is_write: bool) -> tuple[int, int, bool]:
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size() * (tensor.numel() > 0), is_write


def frames() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def call_site() -> str:
    """Return the first caller outside of the traced device and of what several callers use to copy messages."""
    own = {Path(__file__).name, "traced_device.py", "wire.py", "parcel.py"}
    for frame in frames():
        file, name = Path(frame.f_code.co_filename).name, frame.f_code.co_name
        if file not in own:
            return f"{file}:{name}:{frame.f_lineno}"
    raise AssertionError


def caller_name() -> str:
    """Return who asks for a mark: the first caller outside of the traced device."""
    _, name, _ = call_site().split(":")
    return name
