"""The process group: Gloo, or NCCL on GPUs, except for all-reduces of large float tensors, which are compressed."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cgx_ray.backend.backend_options import BackendOptions, current_options
from cgx_ray.backend.buckets import parts_of
from cgx_ray.backend.reduce_thread import ReduceThread
from cgx_ray.backend.work import CompressedWork, ExactPart
from cgx_ray.collectives.transport.vendor_group import gpu_address
from cgx_ray.errors import ConfigError
from cgx_ray.logs import show_lines
from cgx_ray.plan import NONE
from cgx_ray.torch_compat import nccl_backend, number_collectives, set_backends
from cgx_ray.units import format_count

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG)


def make_group(options: Any, backend_options: Any) -> CgxProcessGroup:
    """Make a group for torch.distributed, which calls this. `options` are its `_DistributedBackendOptions`.

    Raises ConfigError on all ranks if the options of one are wrong or differ from the others', TransportError if a rank
    cannot be reached.
    """
    if backend_options is not None:
        raise ConfigError(
            f"backend cgx takes no pg_options, got a {type(backend_options).__name__}; use cgx_ray.configure_backend"
        )
    return CgxProcessGroup(options, _agree(options.store, options.group_rank, options.group_size))


def _agree(store: dist.Store, rank: int, world_size: int) -> BackendOptions:
    """Return this rank's options if all ranks have the same, else raise ConfigError on all of them."""
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


def _gpus_are_apart(store: dist.Store, rank: int, world_size: int) -> bool:
    """Return True, on all ranks, if each has a GPU of its own, not a slice of one, and NCCL."""
    place = ""
    if torch.cuda.is_available() and dist.is_nccl_available():
        # A process that was forked after CUDA was used gets a RuntimeError, and may train on the CPU all the same.
        with suppress(RuntimeError):
            place = gpu_address(torch.cuda.current_device())
    store.set(f"gpu{rank}", place)
    places = [store.get(f"gpu{peer}").decode() for peer in range(world_size)]
    if all(places) and len(set(places)) < world_size and rank == 0:
        logger.log(
            logging.WARNING if torch.cuda.device_count() > 1 else logging.INFO,
            "backend cgx: ranks share a GPU, so Gloo sums by the host what is not compressed; if each rank has its "
            "own, call torch.cuda.set_device before init_process_group",
        )
    return all(places) and len(set(places)) == world_size


def _passed_through(name: str) -> Callable[..., Any]:
    def call(group: CgxProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(group._plain, name)(*args, **kwargs)

    # DDP's C++ side calls it while Dynamo traces a compiled model, and Dynamo cannot look into groups.
    untraced: Callable[..., Any] = torch.compiler.disable(call)
    return untraced


class CgxProcessGroup(dist.ProcessGroup):
    """A group that compresses all-reduces (SUM, AVG) of contiguous float tensors with `min_numel` elements or more.

    Codecs have no memory here: a tensor is not a layer. A thread runs the compressed all-reduces in the order of calls.
    Whether and how a tensor is compressed depends only on what is the same on all ranks of the group: its size, dtype
    and op, and its turn among DDP's buckets.

    Gloo runs everything else, or NCCL where each rank has a GPU of its own. Called in the caller's thread by way of a
    plain ProcessGroup, whose methods release the interpreter lock before they wait for anything.
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
        number_collectives(gloo)
        nccl = None
        if _gpus_are_apart(store, rank, world_size):
            nccl = nccl_backend(dist.PrefixStore("cgx_ray_nccl", store), rank, world_size, options)
            number_collectives(nccl)
        # Any, since torch's stub lacks some collectives.
        self._plain: Any = dist.ProcessGroup(store, rank, world_size)
        for group in (self, self._plain):
            set_backends(group, gloo, nccl)
        self._thread: ReduceThread | None = None
        if world_size > 1 and cgx_options.option.codec != NONE:
            self._thread = ReduceThread(self, store, options.timeout.total_seconds())
        if rank == 0:
            self._log_start("NCCL" if nccl is not None else "Gloo")

    def _log_start(self, other: str) -> None:
        """Log what begins. `other`: the backend that runs the rest."""
        show_lines()
        does = "nothing is compressed"
        if self._thread is not None:
            least = format_count(self._options.min_numel, "element")
            codec = self._options.option.describe()
            does = f"{codec} for sums and averages of float tensors from {least} on, {other} for the rest"
        logger.info("backend cgx on %s: %s", format_count(self.size(), "rank"), does)

    @property
    def is_compressing(self) -> bool:
        """False if Gloo runs everything."""
        return self._thread is not None

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "cgx"

    @torch.compiler.disable
    def allreduce(self, tensors: Sequence[Tensor] | Tensor, opts: Any = None) -> Any:
        """Start to reduce one tensor over ranks, in place. Return a Work, whose `wait` raises errors.

        opts  AllreduceOptions or a ReduceOp; left out: SUM
        """
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not isinstance(opts, dist.AllreduceOptions):
            op, opts = opts, dist.AllreduceOptions()
            opts.reduceOp = dist.ReduceOp.SUM if op is None else op
        if self._thread is None or not self._is_compressible(tensors, opts):
            return self._plain.allreduce(tensors, opts)
        tensor_N = tensors[0].detach().view(-1)
        parts = parts_of(self, tensor_N.numel(), self._options, self._gather)
        compressed = {option: runs for option, runs in parts.items() if option is not None}
        if not compressed:
            return self._plain.allreduce(tensors, opts)
        # Start it in this thread, so that Gloo gets its work in the same order on all ranks.
        exact = ExactPart(tensor_N, parts[None], self._plain, opts) if None in parts else None
        return self._thread.submit(CompressedWork(tensors[0], opts.reduceOp, compressed, exact))

    def _gather(self, offer: str) -> list[str]:
        """Return the offers of all ranks, by rank. By the store, which finds out if a rank does not come."""
        round_ = next(self._rounds)
        self._store.set(f"{round_}/{self.rank()}", offer)
        keys = [f"{round_}/{peer}" for peer in range(self.size())]
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError as error:
            missing = [peer for peer, key in enumerate(keys) if not self._store.check([key])]
            raise ConfigError(
                f"rank {self.rank()} has registered a model, or excluded layers, and did not get the same from ranks "
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
            and tensor.device.type in ("cpu", "cuda")
            and tensor.is_contiguous()
        )

    def shutdown(self) -> None:
        """Finish all submitted works, then hang up."""
        if self._thread is not None:
            self._thread.close()
        self._plain.shutdown()

    def abort(self) -> None:
        """Hang up at once. Works under way fail, here and on the other ranks."""
        if self._thread is not None:
            self._thread.abort()
        self._plain.abort()


# Torch's C++ side of a Python subclass, PyProcessGroup, looks methods up in Python. It runs those that it does not find
# with the interpreter lock held, and waits with it for the mutex of Gloo's queue. Gloo's threads free finished works
# under that mutex and need the lock to free tensors that Python has a reference to: a deadlock. Versions of torch
# differ in the methods that they have and look up.
_PASSED_THROUGH = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
for _name in _PASSED_THROUGH:
    if hasattr(dist.ProcessGroup, _name):
        setattr(CgxProcessGroup, _name, _passed_through(_name))
# The name in C++.
CgxProcessGroup.recvAnysource = _passed_through("recv_anysource")  # type: ignore[attr-defined]
