"""`ReduceThread`: the thread of a process group that runs its compressed all-reduces."""

from __future__ import annotations

import atexit
import itertools
import logging
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cgx_ray.backend.work import CompressedWork
from cgx_ray.codecs import build_kernels, make_codec
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Exchange, Phases, Transport, make_exchange
from cgx_ray.collectives.transport.tcp import connect_mesh_by_store
from cgx_ray.collectives.transport.transport_like import wait_for
from cgx_ray.engine.thread import WorkThread
from cgx_ray.errors import CGXError
from cgx_ray.plan import Option
from cgx_ray.runtime_ext.streams import streams_of
from cgx_ray.units import format_count

logger = logging.getLogger(__name__)

SEED = 0
# Exchanges to keep, of the latest sizes. DDP has few sizes, but a caller with ever new ones must not fill the memory.
MAX_EXCHANGES = 64


class Totals:
    """Sums over the compressed all-reduces of a rank. Bytes are what this rank sends, dense ones what it would."""

    def __init__(self, *, is_logged: bool) -> None:
        self.num_reduced = 0
        self.wire_bytes = 0
        self.dense_bytes = 0.0
        self._is_logged = is_logged
        if is_logged:
            atexit.register(self.end)

    def end(self) -> None:
        """Log the sums once: here, or at Python's end."""
        if not self._is_logged:
            return
        self._is_logged = False
        atexit.unregister(self.end)
        wire, dense = (f"{sent / 1e6:.3g} MB" for sent in (self.wire_bytes, self.dense_bytes))
        sent = f"; a rank sent {wire} in them, uncompressed {dense}" if self.num_reduced else ""
        logger.info("backend cgx: %s compressed%s", format_count(self.num_reduced, "all-reduce"), sent)


class ReduceThread:
    """Exchanges compressed tensors one after the other, in the order of `submit`, over TCP connections of its own."""

    def __init__(self, group: dist.ProcessGroup, store: dist.Store, timeout_s: float) -> None:
        """Connect the ranks of `group` by `store`, and start the thread."""
        self._group = group
        self._timeout_s = timeout_s
        self._mesh = connect_mesh_by_store(store, group.rank(), group.size(), timeout_s)
        self._transport: Transport | None = None
        self._exchanges: dict[tuple[Option, int, torch.device], Exchange] = {}
        # By device; the thread has a stream on each.
        self._buffers: dict[torch.device, Tensor] = {}
        self._failure: CGXError | None = None
        closed = "this process group is shut down; make a new one to reduce further tensors"
        self._thread = WorkThread("cgx-ray-backend", self._run, self._mesh.close, closed=closed)
        self._totals = Totals(is_logged=group.rank() == 0)

    def submit(self, work: CompressedWork) -> CompressedWork:
        self._thread.put(work, f"rank {self._group.rank()}")
        return work

    def close(self) -> None:
        """Finish what was submitted, then hang up."""
        self._thread.end()
        self._mesh.close()
        self._totals.end()

    def abort(self) -> None:
        """Hang up at once."""
        self._mesh.close()

    def _run(self, works: Iterator[CompressedWork]) -> None:
        for step in itertools.count():
            work = next(works, None)
            if work is None:
                return
            if self._failure is None:
                try:
                    # Inference mode allows writing to tensors that were made in it.
                    with torch.inference_mode():
                        self._reduce(work, step)
                        wait_for(streams_of(work.tensor.device).mark(), self._connected())
                except BaseException as error:  # noqa: BLE001 - raised again where the work is waited for
                    self._fail(error, step)
            # Outside of inference mode: it runs the callbacks of the work's future, which may need gradients.
            work.finish(self._failure)
            del work

    def _reduce(self, work: CompressedWork, step: int) -> None:
        tensor_N = work.tensor.detach().view(-1)
        if tensor_N.device not in self._buffers:
            streams_of(tensor_N.device).enter()
            self._buffers[tensor_N.device] = tensor_N.new_empty(0, dtype=torch.float32)
        wait_for(work.computed, self._connected())
        for index, (option, runs) in enumerate(work.parts.items()):
            parts = [tensor_N[start:stop] for start, stop in runs]
            # A float32 tensor that is compressed as a whole is averaged in place.
            is_in_place = len(parts) == 1 and tensor_N.dtype == torch.float32
            average_N = parts[0] if is_in_place else self._gather(parts)
            stamp = Stamp(plan_version=0, step=step, group=index, codec=option.codec.name)
            self._exchange(option, average_N, stamp)
            self._totals.dense_bytes += 2 * (1 - 1 / self._group.size()) * average_N.numel() * tensor_N.element_size()
            if work.op == dist.ReduceOp.SUM:
                # In float32, so that the copy below is Inf only if float16 cannot represent the sum.
                average_N.mul_(self._group.size())
            if not is_in_place:
                for part, averaged in zip(parts, average_N.split([part.numel() for part in parts]), strict=True):
                    part.copy_(averaged)
        if work.exact is not None:
            work.exact.finish(tensor_N)
        self._totals.num_reduced += 1

    def _gather(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the parts beside each other as float32, in a buffer that the next call overwrites."""
        numel, device = sum(part.numel() for part in parts), parts[0].device
        if numel > self._buffers[device].numel():
            self._buffers[device] = torch.empty(numel, dtype=torch.float32, device=device)
        buffer_N = self._buffers[device][:numel]
        for part, room in zip(parts, buffer_N.split([part.numel() for part in parts]), strict=True):
            room.copy_(part)
        return buffer_N

    def _connected(self) -> Transport:
        if self._transport is None:
            # Not in the constructor: the group has its ranks only when torch has registered it.
            self._transport = Transport(self._group, mesh=self._mesh, timeout_s=self._timeout_s)
        return self._transport

    def _exchange(self, option: Option, average_N: Tensor, stamp: Stamp) -> None:
        transport = self._connected()
        transport.step, transport.group_index = stamp.step, stamp.group
        key = option, average_N.numel(), average_N.device
        exchange = self._exchanges.pop(key, None)
        if exchange is None:
            build_kernels([option.codec], average_N.device)
            codec = make_codec(option.codec, world_size=self._group.size(), device=average_N.device)
            exchange = make_exchange(codec, option.scheme, average_N.numel(), 4, transport)
        self._exchanges[key] = exchange
        if len(self._exchanges) > MAX_EXCHANGES:
            del self._exchanges[next(iter(self._exchanges))]
        exchange.run(average_N, None, stamp, SEED, Phases())
        self._totals.wire_bytes += exchange.sent_bytes

    def _fail(self, error: BaseException, step: int) -> None:
        """Refuse all later works: after an error the messages of the ranks no longer fit each other."""
        if isinstance(error, CGXError):
            self._failure = error
        else:
            self._failure = CGXError(f"rank {self._group.rank()}, all-reduce {step}: backend cgx stopped: {error!r}")
            self._failure.__cause__ = error
        logger.error("%s", self._failure, exc_info=error)
        self._mesh.close()
