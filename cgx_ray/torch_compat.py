"""Private torch names, each with its use here, of the versions in docs/versions.md. No other module may use them.

tests/engine/test_backend.py, test_attach_checks.py and test_fsdp.py test them with the pinned torch.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from cgx_ray.versions import check_version

check_version("torch", torch.__version__)  # before names that an old torch lacks

import torch.distributed as dist  # noqa: E402
import torch.profiler  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.amp.grad_scaler import GradScaler  # noqa: E402
from torch.autograd import Variable  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

# FSDP2's interface for custom communication, its own implementations, its meshes, and its groups of parameters.
_FSDP_MODULES = {
    "AllGather": "_fsdp_api",
    "ReduceScatter": "_fsdp_api",
    "DefaultAllGather": "_fsdp_collectives",
    "DefaultReduceScatter": "_fsdp_collectives",
    "FSDPMeshInfo": "_fsdp_common",
    "HSDPMeshInfo": "_fsdp_common",
    "FSDPParamGroup": "_fsdp_param_group",
}

# Names that torch 2.13 gave to collectives of torch.distributed and of process groups, with those of older torches.
_OLD_NAMES = {
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


def __getattr__(name: str) -> Any:
    # torch.distributed.fsdp takes about a second to import, and only FSDP2 models need it.
    if name not in _FSDP_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"torch.distributed.fsdp._fully_shard.{_FSDP_MODULES[name]}")
    return getattr(module, name)


def collective(owner: Any, name: str) -> Callable[..., Any]:
    """Return the collective `name` of `owner`, torch.distributed or a process group. Torch before 2.13 has old names.

    The old names give warnings in newer torches, so they are asked for last.
    """
    found: Callable[..., Any] = getattr(owner, name if hasattr(owner, name) else _OLD_NAMES[name])
    return found


def fsdp_param_groups(module: FSDPModule) -> list[FSDPParamGroup]:
    """Return the groups of parameters of one module after `fully_shard`. Torch before 2.13 makes one at most."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    group: FSDPParamGroup | None = state._fsdp_param_group
    return [group] if group is not None else []


def is_nccl_group(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return True if the collectives of `group` between tensors on `device` are NCCL's."""
    return device.type == "cuda" and dist.is_nccl_available() and group._get_backend(device).name() == "nccl"


def max_reduce_scatter_inputs(group: FSDPParamGroup) -> int:
    """Return how many inputs of reduce-scatters may be kept at once: as FSDP2 is told, from torch 2.13 on.

    On a GPU at least two, or the thread of backward could not queue a module before the exchange of another ended.
    """
    least = 1 if group.device.type == "cpu" else 2
    return max(least, getattr(group.comm_ctx, "reduce_scatter_max_input_buffers", 1))


def as_delivered(group: FSDPParamGroup, op: Any, reduced_T: Tensor) -> Tensor:
    """Return the gradient that FSDP2 makes of a reduced one, as its `foreach_reduce` does."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import (  # noqa: PLC0415 - see __getattr__
        _get_gradient_divide_factors,
    )
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo  # noqa: PLC0415

    if op != dist.ReduceOp.AVG:
        mesh, first = group.mesh_info, group.fsdp_params[0]
        factors = _get_gradient_divide_factors(
            group._reduce_scatter_process_group,
            group._all_reduce_process_group if isinstance(mesh, HSDPMeshInfo) else None,
            group._reduce_dtype or first.param_dtype or first.orig_dtype,
            group.device.type,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
        )
        reduced_T = reduced_T / (factors[1] or 1)
    return reduced_T.to(delivered_dtype(group))


def delivered_dtype(group: FSDPParamGroup) -> torch.dtype | None:
    """Return the dtype of the gradients that FSDP2 delivers. From torch 2.15 on each parameter has its own."""
    if hasattr(group, "_orig_dtype"):
        return group._orig_dtype
    parameters: list[Any] = [parameter for parameter in group.fsdp_params if parameter.sharded_param.requires_grad]
    dtypes = {parameter.sharded_grad_dtype for parameter in parameters}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def bucket_parameters(model: DistributedDataParallel) -> list[list[Tensor]]:
    """Return the parameters in each of DDP's current buckets. Together they are all parameters that DDP averages.

    Raises RuntimeError for sparse gradients.
    """
    # The only function that says which parameters are in a bucket: DDP's logging data have its bytes alone.
    with _OneZero():
        return [bucket.parameters() for bucket in model.reducer._get_zeros_like_grad_buckets()]


class _OneZero(TorchDispatchMode):
    """Lets `zeros_like` take memory for one element: a device may not have room for all gradients once more."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.zeros_like.default:
            return args[0].new_zeros(()).expand(args[0].shape)
        return func(*args, **(kwargs or {}))


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the model that `torch.compile` has wrapped; `model` itself if it is not compiled as a whole."""
    # By its attribute, since importing the class of the wrapper takes seconds.
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def register_hook(model: DistributedDataParallel, state: object, hook: Callable[[Any, dist.GradBucket], Any]) -> None:
    """Give `model` a communication hook that copies of the model lack: their reducers have none, as DDP makes them.

    DDP would copy and pickle the list of its hooks, with their states. Only its reducer in Python reads it. Raises
    RuntimeError if the model has a hook already.
    """
    try:
        model.register_comm_hook(state, hook)
    finally:
        if not model._use_python_reducer:
            model._comm_hooks[:] = [known for known in model._comm_hooks if known[1] is not state]


def has_rebuilt_buckets(model: DistributedDataParallel) -> bool:
    """Return True once DDP has rebuilt its buckets, some forward passes after the first."""
    return bool(model._has_rebuilt_buckets)


def is_in_forward(model: DistributedDataParallel) -> bool:
    """Return True within `model`'s own forward pass, False if its inner module was called directly."""
    return DistributedDataParallel._get_active_ddp_module() is model


def allows_uneven_inputs(model: DistributedDataParallel) -> bool:
    """Return True inside `model.join()`."""
    return bool(model._join_config.enable)


def divides_by_fewer_ranks(model: DistributedDataParallel) -> bool:
    """Return True inside `model.join(divide_by_initial_world_size=False)`."""
    return allows_uneven_inputs(model) and not model._divide_by_initial_world_size


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the backward pass under way, on the thread that called `backward`."""
    Variable._execution_engine.queue_callback(callback)


def backward_number() -> int:
    """Return the number that autograd gave the backward pass under way."""
    return torch._C._current_graph_task_id()


def copy_of_scale(scaler: GradScaler) -> Tensor:
    """Return the current scale as a tensor on the host; 1 if `scaler` is disabled.

    Does not wait for a CUDA device, which may not have written the value yet.
    """
    scale = scaler._get_scale_async() if scaler.is_enabled() else None
    # A copy, since `update` changes it in place.
    if scale is None:
        return torch.tensor(scaler.get_scale(), dtype=torch.float64, device="cpu")
    return scale.to("cpu", non_blocking=True, copy=True)


def destroy_group(group: dist.ProcessGroup) -> None:
    """Destroy a process group, if torch's `destroy_process_group()` without arguments has not done so before."""
    if group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)


def default_store() -> dist.Store:
    """Return the store of the default process group, which must have been made."""
    return dist.distributed_c10d._get_default_store()


def skip_group_names(number: int) -> None:
    """Let the next groups of torch have names as if so many had been made: names are numbers, the same on all ranks."""
    dist.distributed_c10d._world.group_count += number


def longest_timeout_s(group: dist.ProcessGroup) -> float | None:
    """Return the longest time-out of Gloo and NCCL in `group`, in seconds, 0 for none; None if it has neither."""
    backends = [group._get_backend(device) for device in group._device_types]
    known = [backend.options._timeout for backend in backends if backend.name() in ("gloo", "nccl")]
    return max((timeout.total_seconds() for timeout in known), default=None)


def set_backends(group: dist.ProcessGroup, gloo: dist.ProcessGroupGloo, nccl: Any) -> None:
    """Make `gloo` the backend of a group that was created without torch's registry, for GPUs `nccl` unless it is None.

    Gloo takes tensors of GPUs too, by way of the host.
    """
    kinds = dist.ProcessGroup.BackendType
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if torch.cuda.is_available():
        kind, backend = (kinds.GLOO, gloo) if nccl is None else (kinds.NCCL, nccl)
        group._register_backend(torch.device("cuda"), kind, backend)
    group._set_default_backend(kinds.GLOO)


def number_collectives(backend: Any) -> None:
    """Let `backend` number its collectives. Torch's registry does this for the groups that it creates."""
    backend._set_sequence_number_for_group()


def nccl_backend(store: dist.Store, rank: int, world_size: int, group_options: Any) -> Any:
    """Return NCCL for a group that is created without torch's registry. It connects in its first collective.

    group_options  torch's `_DistributedBackendOptions` of the group
    """
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = group_options.timeout
    options.global_ranks_in_group = group_options.global_ranks_in_group
    options.group_name = group_options.group_id
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def profiled(name: str) -> AbstractContextManager[Any]:
    """Return a range that torch.profiler shows as `name`, and `emit_nvtx` as an NVTX range; nothing without a profiler.

    Ranges take 5 us even if nobody profiles, so the flag is asked first.
    """
    return torch.profiler.record_function(name) if torch.autograd.profiler._is_profiler_enabled else nullcontext()


__all__ = [
    "AllGather",
    "DefaultAllGather",
    "DefaultReduceScatter",
    "FSDPMeshInfo",
    "FSDPParamGroup",
    "HSDPMeshInfo",
    "ReduceScatter",
    "allows_uneven_inputs",
    "as_delivered",
    "backward_number",
    "bucket_parameters",
    "call_after_backward",
    "collective",
    "copy_of_scale",
    "default_store",
    "destroy_group",
    "divides_by_fewer_ranks",
    "has_rebuilt_buckets",
    "is_in_forward",
    "longest_timeout_s",
    "number_collectives",
    "profiled",
    "register_hook",
    "set_backends",
    "uncompiled",
]
