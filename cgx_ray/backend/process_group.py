"""The process group: Gloo, but for all-reduces of large float tensors, which are compressed."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cgx_ray.backend.buckets import parts_of
from cgx_ray.backend.options import BackendOptions, Way, current_options
from cgx_ray.backend.work import CompressedWork, ExactPart
from cgx_ray.codecs import make_codec
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives import Exchange, Phases, Transport, make_exchange
from cgx_ray.collectives.tcp import connect_mesh_by_store
from cgx_ray.engine.thread import WorkThread
from cgx_ray.errors import CGXError, ConfigError
from cgx_ray.plan import NONE, Scheme

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
SEED = 0
# Of the latest sizes: DDP has some, by codec, and whoever reduces ever new ones must not fill the memory with them.
MAX_EXCHANGES = 64


def make_group(options: Any, backend_options: Any) -> CgxProcessGroup:
    """What torch.distributed calls to make a group; `options` are its `_DistributedBackendOptions`.

    Raises ConfigError on all ranks if one's options are wrong or not those of the others, TransportError if ranks
    cannot be reached.
    """
    if backend_options is not None:
        raise ConfigError(
            f"backend cgx takes no pg_options, got a {type(backend_options).__name__}; use cgx_ray.configure_backend"
        )
    return CgxProcessGroup(options, _agree(options.store, options.group_rank, options.group_size))


def _agree(store: dist.Store, rank: int, world_size: int) -> BackendOptions:
    """This rank's options if all ranks have the same, else an error on all of them."""
    try:
        own: BackendOptions | None = current_options()
        offer = str(own)
    except ConfigError as error:
        own, offer = None, f"not usable: {error}"
        if world_size == 1:
            raise
    store.set(f"options{rank}", offer)
    offers = [store.get(f"options{peer}").decode() for peer in range(world_size)]
    if own is None:
        raise ConfigError(f"rank {rank}: {offer.removeprefix('not usable: ')}")
    for peer, other in enumerate(offers):
        if other != offer:
            raise ConfigError(
                f"backend cgx is {offer} on rank {rank} and {other} on rank {peer}; give all ranks the same "
                "CGX_COMPRESSION_* variables and the same cgx_ray.configure_backend"
            )
    return own


def _passed_through(name: str) -> Callable[..., Any]:
    def call(group: CgxProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(group._plain, name)(*args, **kwargs)

    # DDP's C++ side calls it while Dynamo traces what torch.compile was given, and that cannot look into groups.
    untraced: Callable[..., Any] = torch.compiler.disable(call)
    return untraced


class CgxProcessGroup(dist.ProcessGroup):
    """All-reduces (SUM, AVG) of contiguous float32, float16 and bfloat16 tensors from `min_numel` elements on are
    compressed, in order of calls, by a thread of its own over TCP connections of its own. Everything else is Gloo's, by
    way of a plain ProcessGroup, whose methods release the interpreter lock before they wait for anything.
    """

    def __init__(self, options: Any, cgx_options: BackendOptions) -> None:
        store, rank, world_size = options.store, options.group_rank, options.group_size
        super().__init__(rank, world_size)  # type: ignore[call-arg]  # torch's stub has only the one for C++
        self._options = cgx_options
        self._store = dist.PrefixStore("cgx_ray_buckets", store)
        self._timeout = options.timeout
        self._rounds = itertools.count()
        gloo = dist.ProcessGroupGloo(store, rank, world_size, timeout=options.timeout)
        gloo.options.global_ranks_in_group = options.global_ranks_in_group
        gloo.options.group_name = options.group_id
        gloo._set_sequence_number_for_group()
        # Any: torch's stub leaves some collectives out.
        self._plain: Any = dist.ProcessGroup(store, rank, world_size)
        for group in (self, self._plain):
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._lane: _Lane | None = None
        if world_size > 1 and cgx_options.way.codec != NONE:
            self._lane = _Lane(self, store, options.timeout.total_seconds())

    @property
    def is_compressing(self) -> bool:
        """Whether not everything is Gloo's."""
        return self._lane is not None

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "cgx"

    @torch.compiler.disable
    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> Any:
        """Start to reduce one tensor over ranks, in place. Returns a Work; its `wait` raises what goes wrong.

        opts  AllreduceOptions or a ReduceOp; left out: SUM
        """
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not isinstance(opts, dist.AllreduceOptions):
            op, opts = opts, dist.AllreduceOptions()
            opts.reduceOp = dist.ReduceOp.SUM if op is None else op
        if self._lane is None or not self._is_compressible(tensors, opts):
            return self._plain.allreduce(tensors, opts)
        tensor_N = tensors[0].detach().view(-1)
        parts = parts_of(self, tensor_N.numel(), self._options, self._gather)
        compressed = {way: runs for way, runs in parts.items() if way is not None}
        if not compressed:
            return self._plain.allreduce(tensors, opts)
        # In this thread, so that Gloo gets its work in the same order on all ranks.
        exact = ExactPart(tensor_N, parts[None], self._plain, opts) if None in parts else None
        return self._lane.submit(CompressedWork(tensors[0], opts.reduceOp, compressed, exact))

    def _gather(self, offer: str) -> list[str]:
        """What all ranks offer, by rank. Through the store: a rank that is somewhere else fits no collective."""
        round_ = next(self._rounds)
        self._store.set(f"{round_}/{self.rank()}", offer)
        keys = [f"{round_}/{peer}" for peer in range(self.size())]
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError as error:
            missing = [peer for peer, key in enumerate(keys) if not self._store.check([key])]
            raise ConfigError(
                f"rank {self.rank()} has registered a model, or excluded layers, and did not hear the same of ranks "
                f"{missing} within {self._timeout.total_seconds():g} s; call register_model and exclude_layers on all "
                "ranks, at the same step"
            ) from error
        return [self._store.get(key).decode() for key in keys]

    def _is_compressible(self, tensors: Sequence[Tensor], opts: Any) -> bool:
        if len(tensors) != 1 or not any(opts.reduceOp == op for op in OPS):
            return False
        tensor = tensors[0]
        return (
            tensor.dtype in DTYPES
            and tensor.numel() >= max(1, self._options.min_numel)
            and tensor.layout is torch.strided
            and tensor.device.type == "cpu"
            and tensor.is_contiguous()
        )

    # What torch's C++ side of a Python subclass, PyProcessGroup, looks up in Python. What it does not find it runs with
    # the interpreter lock held, and waits with it for the mutex of Gloo's queue. Gloo's threads free finished works
    # under that mutex and need the lock for it, to let go of tensors that Python knows: a deadlock.
    all_gather_single_coalesced = _passed_through("all_gather_single_coalesced")
    all_to_all_single = _passed_through("all_to_all_single")
    allgather = _passed_through("allgather")
    allgather_into_tensor_coalesced = _passed_through("allgather_into_tensor_coalesced")
    allreduce_coalesced = _passed_through("allreduce_coalesced")
    alltoall_base = _passed_through("alltoall_base")
    barrier = _passed_through("barrier")
    broadcast = _passed_through("broadcast")
    recv = _passed_through("recv")
    reduce_scatter = _passed_through("reduce_scatter")
    reduce_scatter_single_coalesced = _passed_through("reduce_scatter_single_coalesced")
    reduce_scatter_tensor_coalesced = _passed_through("reduce_scatter_tensor_coalesced")
    send = _passed_through("send")

    def shutdown(self) -> None:
        """Finish what was submitted, then hang up."""
        if self._lane is not None:
            self._lane.close()
        self._plain.shutdown()

    def abort(self) -> None:
        """Hang up at once: what is under way fails, here and on the other ranks."""
        if self._lane is not None:
            self._lane.abort()
        self._plain.abort()


class _Lane:
    """The thread that exchanges compressed tensors, one after the other, in the order of `submit`."""

    def __init__(self, group: CgxProcessGroup, store: dist.Store, timeout_s: float) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._mesh = connect_mesh_by_store(store, group.rank(), group.size(), timeout_s)
        self._transport: Transport | None = None
        self._exchanges: dict[tuple[Way, int], Exchange] = {}
        self._buffer_N = torch.empty(0)
        self._failure: CGXError | None = None
        self._lock = threading.Lock()
        self._thread = WorkThread("cgx-ray-backend", self._run, self._mesh.close)

    def submit(self, work: CompressedWork) -> CompressedWork:
        with self._lock:
            if self._thread.has_ended:
                raise CGXError("this process group is shut down; make a new one to reduce further tensors")
            self._thread.put(work)
        return work

    def close(self) -> None:
        with self._lock:
            self._thread.end()
        self._mesh.close()

    def abort(self) -> None:
        self._mesh.close()

    def _run(self, works: Iterator[CompressedWork]) -> None:
        for step in itertools.count():
            work = next(works, None)
            if work is None:
                return
            if self._failure is None:
                try:
                    # So that tensors made in inference mode can be written as well.
                    with torch.inference_mode():
                        self._reduce(work, step)
                except BaseException as error:  # noqa: BLE001 - raised again where the work is waited for
                    self._fail(error, step)
            # Runs the callbacks of its future, which may need gradients.
            work.finish(self._failure)
            del work

    def _reduce(self, work: CompressedWork, step: int) -> None:
        tensor_N = work.tensor.detach().view(-1)
        for index, (way, runs) in enumerate(work.parts.items()):
            parts = [tensor_N[start:stop] for start, stop in runs]
            # A float32 tensor that is compressed as a whole is averaged where it is.
            is_in_place = len(parts) == 1 and tensor_N.dtype == torch.float32
            average_N = parts[0] if is_in_place else self._gather(parts)
            self._exchange(way, average_N, Stamp(plan_version=0, step=step, group=index, codec=way.codec.name))
            if work.op == dist.ReduceOp.SUM:
                # In float32: only a sum that float16 cannot hold is Inf there.
                average_N.mul_(self._group.size())
            if not is_in_place:
                for part, averaged in zip(parts, average_N.split([part.numel() for part in parts]), strict=True):
                    part.copy_(averaged)
        if work.exact is not None:
            work.exact.finish(tensor_N)

    def _gather(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts beside each other as float32, in a buffer that the next call overwrites."""
        numel = sum(part.numel() for part in parts)
        if numel > self._buffer_N.numel():
            self._buffer_N = torch.empty(numel)
        buffer_N = self._buffer_N[:numel]
        for part, room in zip(parts, buffer_N.split([part.numel() for part in parts]), strict=True):
            room.copy_(part)
        return buffer_N

    def _exchange(self, way: Way, average_N: Tensor, stamp: Stamp) -> None:
        if self._transport is None:
            # Not before: the group has its ranks only when torch has registered it.
            self._transport = Transport(self._group, mesh=self._mesh, timeout_s=self._timeout_s)
        self._transport.step, self._transport.group_index = stamp.step, stamp.group
        numel = average_N.numel()
        exchange = self._exchanges.pop((way, numel), None)
        if exchange is None:
            codec = make_codec(way.codec, world_size=self._group.size())
            exchange = make_exchange(codec, Scheme(way.scheme), numel, 4, self._transport)
        self._exchanges[way, numel] = exchange
        if len(self._exchanges) > MAX_EXCHANGES:
            del self._exchanges[next(iter(self._exchanges))]
        exchange.run(average_N, None, stamp, SEED, Phases())

    def _fail(self, error: BaseException, step: int) -> None:
        """Remember what went wrong: after it the ranks' messages no longer fit each other."""
        if isinstance(error, CGXError):
            self._failure = error
        else:
            self._failure = CGXError(f"rank {self._group.rank()}, all-reduce {step}: backend cgx stopped: {error!r}")
            self._failure.__cause__ = error
        logger.error("%s", self._failure, exc_info=error)
        self._mesh.close()
