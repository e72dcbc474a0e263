"""A device that does not exist, for tests of what is done in which order.

Its memory is the host's. It does calls late, in an order that chance chooses among the legal ones: those of one stream
in turn, and each after what its stream was told to wait for. A vector clock of each call, mark and thread says what is
known to be done before it, and so whether all that touches the same memory is ordered. If not, `RaceError` is raised,
however the calls happen to be done.
"""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from cgx_ray.codecs import Codec
from cgx_ray.codecs.codec import Memory, PayloadRow
from cgx_ray.collectives import Transport, hierarchical
from cgx_ray.collectives.transport import transport as transport_module
from cgx_ray.engine import group as engine_group
from cgx_ray.engine.gains import gain_meter, gain_schedule
from cgx_ray.engine.sharded import shard_memory, shards
from cgx_ray.runtime_ext import streams
from cgx_ray.runtime_ext.mesh import flat
from cgx_ray.runtime_ext.streams import Mark, Streams
from support.device.traced_calls import (
    Access,
    Call,
    Clock,
    RaceError,
    call_site,
    caller_name,
    copying,
    held_row,
    joined,
    lies_in,
    span,
)
from support.device.traced_nodes import trace_nodes

# Tensors on it say that they are on the CPU, but to the engine it is no host.
DEVICE = torch.device("cpu", 0)
# The site of what `apart` waits for besides the marks that it is given.
APART = "apart"
# Calls of torch whose result the host has.
_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
# Functions that ask for a mark, but go on whatever the answer is, or have asked before.
_CURIOUS = {"watch", "_wait_for_each", "time_of", "_wait_for_mark"}


class TracedMark(Mark):
    """A point in a traced stream. `site`: where the engine, or the test, made it."""

    def __init__(self, device: TracedDevice, stream: int, after: Clock, site: str) -> None:
        self._device, self.stream, self._after, self._site = device, stream, after, site

    @property
    def is_done(self) -> bool:
        return self._device.has_reached(self._after, self._site)

    def wait(self) -> None:
        self._device.reach(self._after, self._site)

    def hold(self, stream: int) -> None:
        """Let `stream` go on after this mark."""
        if self._site != self._device.removed:
            self._device.sites.add(self._site)
            self._device.order(stream, self._after)


class TracedFuture(torch.futures.Future[Tensor]):
    """As a future of a CUDA device: who waits for it goes on, on its stream, after the stream of who has set it.

    And after all that who has set it had seen done.
    """

    device: TracedDevice
    after: Clock

    def set_result(self, result: Tensor) -> None:
        seen = self.device.known_to(threading.get_ident())
        self.after = joined(self.device.clock_of(self.device.current()), seen)
        super().set_result(result)

    def wait(self) -> Tensor:
        result = super().wait()
        self.device.order(self.device.current(), self.after)
        return result


class TracedDevice(Streams):
    """Streams of `DEVICE` for this process.

    removed    site whose marks nobody waits for
    sites      those of marks that somebody has waited for
    counts     "waits", "launches", "copies in", "copies out" and "sums" of the engine's threads so far
    """

    def __init__(self, seed: int, removed: str | None = None) -> None:
        self.removed = removed
        self._apart: int | None = None
        self.sites: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._lock = threading.RLock()
        self._streams: dict[int, int] = {}
        self._calls: dict[int, deque[Call]] = {0: deque()}
        self._num_done: Clock = {0: 0}
        self._clocks: dict[int, Clock] = {0: {}}
        self._known: dict[int, Clock] = {}
        self._accesses: list[Access] = []
        # Memory of the device, by address: only there are calls of torch done late.
        self._memory: list[tuple[int, int]] = []
        self._pinned: list[tuple[int, int]] = []
        self._kept: list[Tensor] = []
        # Of the first call that has failed. Then all that is asked of the device fails.
        self._failure: RuntimeError | None = None

    def install(self, vendor: dist.ProcessGroup | None = None) -> None:
        """Take the place of the streams of `DEVICE` in this process, and trace codecs and messages of engines.

        vendor  group that sums memory of the device, as calls of the device
        """
        streams.STREAMS[DEVICE] = self
        make_codec, start, is_finite = engine_group.make_codec, Transport._start, engine_group.is_finite
        start_sum, all_reduce = Transport._start_sum, dist.all_reduce
        histogram = gain_meter.histogram

        def traced_codec(*arguments: Any, **options: Any) -> Codec:
            codec = make_codec(*arguments, **options)
            self._trace(codec)
            return codec

        def traced_start(transport: Transport, sends: Any, receives: Any, *, is_sealed: bool) -> Any:
            self.touch([part for _, part in flat(sends)], [part for _, part in flat(receives)], "a message")
            return start(transport, sends, receives, is_sealed=is_sealed)

        def traced_histogram(grad_N: Tensor) -> Tensor:
            self._read(grad_N, is_wait=False)
            return histogram(grad_N)

        def traced_is_finite(values_N: Tensor) -> bool:
            self._read(values_N)
            return is_finite(values_N)

        def traced_start_sum(transport: Transport, values_N: Tensor) -> Any:
            is_ours = vendor is not None and self._is_own(values_N)
            return transport._enqueue_sum(values_N) if is_ours else start_sum(transport, values_N)

        def traced_all_reduce(values_N: Tensor, *arguments: Any, **options: Any) -> Any:
            if vendor is None or options.get("group") is not vendor:
                return all_reduce(values_N, *arguments, **options)
            return self.launch(lambda: all_reduce(values_N, group=vendor), [values_N], [values_N], "sums")

        trace_nodes(self)
        Transport._start_sum = traced_start_sum  # type: ignore[method-assign]
        transport_module.streams_of = lambda device: self  # type: ignore[attr-defined]
        dist.all_reduce = traced_all_reduce
        engine_group.make_codec = hierarchical.make_codec = traced_codec  # type: ignore[attr-defined]
        shards.make_codec = traced_codec  # type: ignore[attr-defined]
        gain_schedule.make_codec = traced_codec  # type: ignore[attr-defined]
        gain_meter.histogram = traced_histogram  # type: ignore[attr-defined]
        Transport._start = traced_start  # type: ignore[method-assign]
        engine_group.is_finite = shard_memory.is_finite = traced_is_finite  # type: ignore[attr-defined]

    # As an engine uses it.

    def enter(self) -> None:
        self._streams[threading.get_ident()] = self._new_stream()
        _Traced(self).__enter__()

    def _new_stream(self) -> int:
        with self._lock:
            stream = len(self._calls)
            self._calls[stream], self._num_done[stream], self._clocks[stream] = deque(), 0, {}
            return stream

    def current(self) -> Any:
        return self._streams.get(threading.get_ident(), 0)

    def mark(self, stream: Any = None) -> Mark:
        stream = self.current() if stream is None else stream
        return TracedMark(self, stream, self.clock_of(stream), call_site())

    def join(self, streams: Iterable[Any]) -> None:
        for stream in streams:
            self.order(self.current(), self.clock_of(stream))

    @contextmanager
    def apart(self, after: Iterable[Mark] = ()) -> Iterator[None]:
        thread, usual = threading.get_ident(), self.current()
        if self._apart is None:
            self._apart = self._new_stream()
        if self.removed != APART:
            self.sites.add(APART)
            self.order(self._apart, self.clock_of(usual))
        for mark in after:
            assert isinstance(mark, TracedMark)
            mark.hold(self._apart)
        self._streams[thread] = self._apart
        yield
        self._streams[thread] = usual

    def future(self) -> torch.futures.Future[Tensor]:
        future = TracedFuture()
        future.device = self
        return future

    def copy_each(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        # As on a GPU, where one call copies all that stays there.
        inside = [pair for pair in pairs if not any(lies_in(self._pinned, one) for one in pair)]
        if inside:
            sources, targets = ([*side] for side in zip(*inside, strict=True))
            self.launch(lambda: [copying(*pair)() for pair in inside], sources, targets)
        for source, target in (pair for pair in pairs if any(lies_in(self._pinned, one) for one in pair)):
            kind = "copies out" if lies_in(self._pinned, target) else "copies in"
            self.launch(copying(source, target), [source], [target], kind)

    def host_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        memory = super().host_memory(numel, dtype)
        start, stop, _ = span(memory, False)
        self._pinned.append((start, stop))
        self._kept.append(memory)
        return memory

    # As a test uses it.

    def own(self, tensor: Tensor) -> None:
        """Take the memory of `tensor` for that of the device."""
        storage = tensor.untyped_storage()
        self._memory.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
        self._kept.append(tensor)

    def launch(
        self, do: Callable[[], object], reads: Iterable[Tensor], writes: Iterable[Tensor], kind: str = "launches"
    ) -> None:
        """Enqueue a call on the stream of this thread."""
        with self._lock, _disable_current_modes():
            stream = self.current()
            self.counts[kind] += stream > 0
            after = joined(self._clocks[stream], self._known.get(threading.get_ident(), {}))
            number = self._num_done[stream] + len(self._calls[stream]) + 1
            self._check(reads, writes, after, stream, number, kind)
            self._calls[stream].append(Call(do, after))
            self._clocks[stream] = {**after, stream: number}

    def touch(self, reads: Iterable[Tensor], writes: Iterable[Tensor], what: str) -> None:
        """Note that the host reads and writes memory now."""
        with self._lock, _disable_current_modes():
            # What the host does is before all that it enqueues later, so only earlier calls of the device matter.
            self._check(reads, writes, self._known.get(threading.get_ident(), {}), None, 0, what)

    def clock_of(self, stream: int) -> Clock:
        with self._lock:
            return dict(self._clocks[stream])

    def known_to(self, thread: int) -> Clock:
        with self._lock:
            return dict(self._known.get(thread, {}))

    def order(self, stream: int, after: Clock) -> None:
        """Let `stream` go on after `after`."""
        with self._lock:
            self._clocks[stream] = joined(self._clocks[stream], after)

    def has_reached(self, after: Clock, site: str) -> bool:
        with self._lock:
            if site == self.removed:
                return True
            self._note(site)
            for _ in range(self._chance.randrange(3)):
                self._do_one()
            is_done = all(self._num_done[stream] >= number for stream, number in after.items())
            if is_done:
                self._learn(after)
            return is_done

    def reach(self, after: Clock, site: str) -> None:
        with self._lock:
            if site == self.removed:
                return
            if self._note(site):
                self.counts["waits"] += self.current() > 0
            while any(self._num_done[stream] < number for stream, number in after.items()):
                self._do_one()
            self._learn(after)

    def _note(self, site: str) -> bool:
        """Note that this thread waits for a mark of `site`. Return False if it is only curious."""
        is_wait = caller_name() not in _CURIOUS
        if is_wait:
            self.sites.add(site)
        return is_wait

    def _learn(self, after: Clock) -> None:
        thread = threading.get_ident()
        self._known[thread] = joined(self._known.get(thread, {}), after)

    def _do_one(self) -> None:
        """Do a call that may be done now, if there is one. Raises the error of the first call that has failed."""
        if self._failure is not None:
            raise self._failure
        ready = [
            stream
            for stream, calls in self._calls.items()
            if calls and all(self._num_done[other] >= number for other, number in calls[0].after.items())
        ]
        if ready:
            stream = self._chance.choice(ready)
            with _disable_current_modes():
                try:
                    self._calls[stream].popleft().do()
                except RuntimeError as error:
                    self._failure = error
                    raise
            self._num_done[stream] += 1

    def _check(
        self,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
        after: Mapping[int, int],
        stream: int | None,
        number: int,
        what: str,
    ) -> None:
        """Raise RaceError unless all that these accesses meet is in `after`. Remember them if they are of a stream."""
        new = [span(tensor, is_write) for is_write, all_ in ((False, reads), (True, writes)) for tensor in all_]
        for start, stop, is_write in new:
            kept = []
            for old in self._accesses:
                meets = old.start < stop and start < old.stop and (is_write or old.is_write)
                is_ordered = after.get(old.stream, 0) >= old.number
                if meets and not is_ordered and (old.stream, old.number) != (stream, number):
                    raise RaceError(f"{what} and {old.what} (call {old.number} of stream {old.stream}) are not ordered")
                # Whatever comes later and is ordered after this write is ordered after `old`.
                if not (is_write and is_ordered and start <= old.start and old.stop <= stop and stream is not None):
                    kept.append(old)
            self._accesses = kept
            if stream is not None:
                self._accesses.append(Access(start, stop, is_write, stream, number, what))

    def _read(self, tensor: Tensor, *, is_wait: bool = True) -> None:
        """Let the host wait for its stream, and read a tensor. `is_wait`: False if a device would do it by itself."""
        if self._is_own(tensor):
            with self._lock:
                self.counts["waits"] += is_wait
                after = self._clocks[self.current()]
                while any(self._num_done[stream] < number for stream, number in after.items()):
                    self._do_one()
                self._learn(after)
        self.touch([tensor], [], "a read by the host")

    def _is_own(self, tensor: Tensor) -> bool:
        return lies_in(self._memory, tensor)

    def _trace(self, codec: Codec) -> None:
        """Let `codec` encode and decode as calls of the device, or of the host if it is the host's.

        One that codes several rows in one launch does so here too.
        """
        plain = copy.copy(codec)
        is_late = codec.device == DEVICE

        def encode(grad_N: Tensor, payload: Tensor, key: int, memory: Memory | None = None) -> None:
            row, reads, writes = held_row(PayloadRow(grad_N, payload, key, memory))
            self._do(is_late, lambda: plain.encode(grad_N, payload, key, row.memory), reads, writes, "encode")

        def decode(payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
            do = partial(plain.decode, payload, out_N, add=add, key=key)
            self._do(is_late, do, [payload, out_N], [out_N], "decode")

        def encode_rows(rows: Sequence[PayloadRow]) -> None:
            held = [held_row(row) for row in rows]
            reads, writes = ([*itertools.chain(*lists)] for lists in zip(*((r, w) for _, r, w in held), strict=True))
            self._do(is_late, lambda: plain.encode_rows([one.row for one in held]), reads, writes, "encode_rows")

        def decode_rows(rows: Sequence[PayloadRow]) -> None:
            reads, writes = [row.payload for row in rows], [row.part_N for row in rows]
            self._do(is_late, lambda: plain.decode_rows(rows), reads, writes, "decode_rows")

        def sum_rows(own: PayloadRow, payloads: Sequence[Tensor], num_ranks: int) -> None:
            held = held_row(own)
            reads, writes = [*held.reads, *payloads], [*held.writes, own.part_N]
            self._do(is_late, lambda: plain.sum_rows(held.row, payloads, num_ranks), reads, writes, "sum_rows")

        codec.encode, codec.decode = encode, decode  # type: ignore[method-assign]
        if is_late and type(codec).sum_rows is not Codec.sum_rows:
            codec.encode_rows, codec.decode_rows = encode_rows, decode_rows  # type: ignore[method-assign]
            codec.sum_rows = sum_rows  # type: ignore[method-assign]

    def _do(
        self, is_late: bool, do: Callable[[], object], reads: list[Tensor], writes: list[Tensor], what: str
    ) -> None:
        if is_late:
            for tensor in (*reads, *writes):
                if not self._is_own(tensor):
                    self.own(tensor)
            self.launch(do, reads, writes)
        else:
            self.touch(reads, writes, what)
            with _disable_current_modes():
                do()

    def call(self, operator: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
        """Do a call of torch: late if it only changes memory of the device."""
        given = dict(zip((a.name for a in operator._schema.arguments), arguments, strict=False)) | dict(options)
        aliases = {a.name: a.alias_info for a in operator._schema.arguments}
        tensors = [one for one in tree_leaves(list(given.values())) if isinstance(one, Tensor)]
        changed = [given[name] for name, alias in aliases.items() if name in given and alias and alias.is_write]
        is_view = any(alias is not None and not alias.is_write for alias in aliases.values())
        if is_view:
            return operator(*arguments, **options)
        if not any(map(self._is_own, tensors)):
            self.touch(tensors, changed, str(operator))
            return operator(*arguments, **options)
        if len(changed) == 1:
            self.launch(lambda: operator(*arguments, **options), tensors, changed)
            return changed[0]
        # Its result is there at once: the device happens to be fast.
        for tensor in tensors:
            self._read(tensor, is_wait=operator in _READS)
        result = operator(*arguments, **options)
        for one in tree_leaves(result):
            if isinstance(one, Tensor):
                self.own(one)
        return result


class _Traced(TorchDispatchMode):
    """Calls of torch of one thread."""

    def __init__(self, device: TracedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._device.call(func, args, kwargs or {})
