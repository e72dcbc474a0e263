"""FSDP2's hooks: what `fully_shard` reduces and gathers goes through a `ShardedEngine`.

The only reader of torch's private FSDP names. Torch calls the hooks on the thread that trains, in program order, the
same on all ranks; on the CPU it takes for done what a hook returns from, but for what the comments here say.

R ranks that share the parameters, T elements of a module's shard
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from cgx_ray.engine.loss_scale import LossScale
from cgx_ray.engine.sharded import ShardedEngine
from cgx_ray.engine.shards import ShardedLayer, Unit
from cgx_ray.errors import CGXError, ConfigError
from cgx_ray.plan import CodecSpec, Layer
from cgx_ray.torch_compat import (
    AllGather,
    DefaultAllGather,
    DefaultReduceScatter,
    FSDPMeshInfo,
    FSDPParamGroup,
    HSDPMeshInfo,
    ReduceScatter,
    as_delivered,
    call_after_backward,
)

GRADIENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# What messages call the outermost module, which has no name.
ROOT = "(root)"


def param_groups(model: nn.Module) -> dict[str, FSDPParamGroup]:
    """What FSDP2 communicates together, by the name of its module. Raises ConfigError for what has no support here."""
    groups: dict[str, FSDPParamGroup] = {}
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        found = module._get_fsdp_state()._fsdp_param_groups
        if len(found) > 1:
            raise ConfigError(f"module {name!r} shards over several meshes; this version takes one mesh")
        # Modules that were given to one `fully_shard` share a group.
        if found and not any(group is found[0] for group in groups.values()):
            _check(name or ROOT, found[0])
            groups[name] = found[0]
    meshes = {ranks_of_mesh(group) for group in groups.values()}
    if len(meshes) != 1:
        raise ConfigError(f"the modules shard over {len(meshes)} meshes; this version takes one for the whole model")
    shards, replicas = meshes.pop()
    if len(shards) * len(replicas) != dist.get_world_size() or len(shards) == 1:
        raise ConfigError(
            f"the model is sharded over {len(shards)} ranks and replicated over {len(replicas)}, of "
            f"{dist.get_world_size()}; this version shards over two or more and averages over all"
        )
    return groups


def _check(name: str, group: FSDPParamGroup) -> None:
    if group.device.type != "cpu":
        raise ConfigError(
            f"module {name!r} is on {group.device}; this version compresses gradients on the CPU only; shard over a "
            "mesh of the CPU or leave cgx_ray.attach out"
        )
    if not isinstance(group.mesh_info, FSDPMeshInfo) or any(p.is_dtensor for p in group.fsdp_params):
        raise ConfigError(f"module {name!r} is not only sharded by FSDP2; this version takes no other parallelism")
    for parameter in group.fsdp_params:
        if parameter.sharded_param.dtype not in GRADIENT_DTYPES:
            known = ", ".join(str(dtype) for dtype in GRADIENT_DTYPES)
            raise ConfigError(f"a parameter of {name!r} is {parameter.sharded_param.dtype}; allowed: {known}")
    comms = group._reduce_scatter_comm, group._all_gather_comm
    if not (isinstance(comms[0], DefaultReduceScatter) and isinstance(comms[1], DefaultAllGather)):
        odd = ", ".join(type(comm).__name__ for comm in comms)
        raise ConfigError(f"module {name!r} already has a communication hook ({odd}); attach once a model")


def ranks_of_mesh(group: FSDPParamGroup) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks that share this rank's parameters, and those that hold the same shard."""
    mesh = group.mesh_info
    assert isinstance(mesh, FSDPMeshInfo)
    replicas = [dist.get_rank()]
    if isinstance(mesh, HSDPMeshInfo):
        replicas = dist.get_process_group_ranks(mesh.replicate_process_group)
    return tuple(dist.get_process_group_ranks(mesh.shard_process_group)), tuple(replicas)


def make_units(
    model: nn.Module, groups: Mapping[str, FSDPParamGroup], codec: CodecSpec, parameter_codec: CodecSpec | None
) -> list[Unit]:
    """A unit for each group. Raises ConfigError if parameters are to be encoded that FSDP2 gathers in another way."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    units = []
    for index, (module, group) in enumerate(groups.items()):
        if parameter_codec is not None and group._use_post_forward_mesh:
            raise ConfigError(
                f"module {module!r} is resharded to fewer ranks after forward; with `parameters` give "
                "reshard_after_forward as True or False"
            )
        layers = []
        for parameter in group.fsdp_params:
            sharded, shape = parameter.sharded_param, tuple(parameter._orig_size)
            layer = Layer(
                name=names[id(sharded)],
                numel=sharded.numel(),
                ndim=len(shape),
                dtype=str(sharded.dtype).removeprefix("torch."),
                num_rows=shape[0] if len(shape) > 1 and sharded.numel() > 0 else None,
            )
            layers.append(
                ShardedLayer(
                    layer=layer,
                    shape=shape,
                    shard_shape=tuple(parameter.padded_sharded_param_size),
                    dim=parameter.fsdp_placement.dim,
                    is_trained=sharded.requires_grad,
                )
            )
        units.append(Unit(index, module or ROOT, layers, len(ranks_of_mesh(group)[0]), codec, parameter_codec))
    return units


class Calls:
    """What the hooks of one model have begun and nobody has waited for."""

    def __init__(self, engine: ShardedEngine, loss_scale: LossScale) -> None:
        self.engine = engine
        self.loss_scale = loss_scale
        self._begun: list[Future[None]] = []
        self._reading: deque[Future[None]] = deque()

    def make_room(self, max_buffers: int) -> None:
        """Wait until fewer than `max_buffers` inputs of reduce-scatters are in use, as FSDP2 does on a GPU."""
        while len(self._reading) >= max_buffers:
            self.engine.wait(self._reading.popleft())

    def begin(self, future: Future[None], group: FSDPParamGroup, op: Any) -> None:
        """Let gradients of `group` be reduced until backward ends; no longer than this call if FSDP2 reads them."""
        # The engine of autograd calls it when backward has ended, after FSDP2's own, which may reduce as well.
        call_after_backward(self._finish)
        self._begun.append(future)
        if _is_read_at_once(group, op):
            self.engine.wait(future)

    def begin_reading(self, future: Future[None]) -> None:
        """`future` uses the input of a reduce-scatter."""
        self._reading.append(future)

    def raise_later(self, error: CGXError) -> None:
        """Raise `error` when backward ends."""
        failed: Future[None] = Future()
        failed.set_exception(error)
        self._begun.append(failed)

    def _finish(self) -> None:
        if not self._begun:
            return
        begun, self._begun = self._begun, []
        self._reading.clear()
        for future in begun:
            self.engine.wait(future)
        self.engine.wait(self.engine.end_step())


def _is_read_at_once(group: FSDPParamGroup, op: Any) -> bool:
    """True if FSDP2 does more with a reduced gradient than make views of it (`foreach_reduce` in torch)."""
    return (
        op != dist.ReduceOp.AVG  # divides it
        or group._orig_dtype != torch.float32  # converts it
        or group._all_reduce_hook is not None
        or not group.all_reduce_grads  # keeps it to add the next one
        or group._partial_reduce_output is not None
        or any(
            parameter.offload_to_cpu
            or parameter.sharded_param.grad is not None  # adds it
            or getattr(parameter.sharded_param, "_post_accumulate_grad_hooks", None)
            for parameter in group.fsdp_params
        )
    )


class _Begun(dist.Work):
    """What torch waits on. `wait` does, unless nobody may wait yet."""

    def __init__(self, wait: Callable[[], None] | None) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._wait is not None:
            self._wait()
        return True


class _CompressedReduceScatter(ReduceScatter):
    """Averages a module's gradients. In float32, whatever the policy's `reduce_dtype`: the codec makes them small."""

    def __init__(self, calls: Calls, unit: Unit, group: FSDPParamGroup) -> None:
        self._calls = calls
        self._unit = unit
        self._group = group
        self._has_replicas = isinstance(group.mesh_info, HSDPMeshInfo) and group.mesh_info.replicate_mesh_size > 1

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for the gradients of all ranks' shards, then for those of this rank's."""
        self._calls.make_room(self._group.comm_ctx.reduce_scatter_max_input_buffers)
        return torch.empty(*size, dtype=torch.float32, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        rows_RT = input_tensor.view(group.size(), -1)
        future = self._calls.engine.reduce_scatter(
            self._unit,
            rows_RT,
            output_tensor,
            is_average=_is_average(op),
            scales=self._calls.loss_scale.now(),
            # What replicas exchange next is no gradient yet.
            delivered=None if self._has_replicas else partial(as_delivered, self._group, op),
        )
        self._calls.begin_reading(future)
        self._calls.begin(future, self._group, op)


class _CompressedAllGather(AllGather):
    """Gathers a module's parameters, encoded."""

    def __init__(self, calls: Calls, unit: Unit) -> None:
        self._calls = calls
        self._unit = unit

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        rows_RT = output_tensor.view(group.size(), -1)
        assert input_tensor.data_ptr() == rows_RT[group.rank()].data_ptr(), "FSDP2 gathers in place"
        engine = self._calls.engine
        future = engine.all_gather(self._unit, rows_RT)
        return _Begun(lambda: engine.wait(future))


class _Replicas(dist.ProcessGroup):
    """Stands in for the group that FSDP2 all-reduces sharded gradients over, after their reduce-scatter (HSDP)."""

    def __init__(self, calls: Calls, unit: Unit, group: FSDPParamGroup, replaced: dist.ProcessGroup) -> None:
        super().__init__(replaced.rank(), replaced.size())  # type: ignore[call-arg]  # torch's stub wants a store
        self._calls = calls
        self._unit = unit
        self._group = group

    # One of the three signatures in torch's stub, and the one that dist.all_reduce uses.
    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> dist.Work:  # type: ignore[override]
        op, (shard_T,) = opts.reduceOp, tensors
        try:
            future = self._calls.engine.all_reduce(
                self._unit, shard_T, is_average=_is_average(op), delivered=partial(as_delivered, self._group, op)
            )
            self._calls.begin(future, self._group, op)
        except CGXError as error:
            # Torch would log it, ask what group this is, and raise that it does not know.
            self._calls.raise_later(error)
        # It is done already if torch reads it, and else must not be waited for yet.
        return _Begun(None)


def _is_average(op: Any) -> bool:
    if op == dist.ReduceOp.AVG:
        return True
    if op != dist.ReduceOp.SUM:
        raise CGXError(
            f"FSDP2 asks for {op}, which comes from set_gradient_divide_factor; call "
            "set_force_sum_reduction_for_comms(True) as well, so that it divides itself"
        )
    return False


def install(
    model: nn.Module,
    engine: ShardedEngine,
    groups: Mapping[str, FSDPParamGroup],
    units: Sequence[Unit],
    loss_scale: LossScale,
) -> Callable[[], None]:
    """Put hooks into every group; what is returned takes them out again."""
    calls = Calls(engine, loss_scale)
    undo: list[Callable[[], None]] = []
    for (name, group), unit in zip(groups.items(), units, strict=True):
        module, mesh = model.get_submodule(name), group.mesh_info
        assert isinstance(module, FSDPModule)
        undo.append(partial(module.set_custom_reduce_scatter, group._reduce_scatter_comm))
        module.set_custom_reduce_scatter(_CompressedReduceScatter(calls, unit, group))
        if unit.parameters:
            undo.append(partial(module.set_custom_all_gather, group._all_gather_comm))
            module.set_custom_all_gather(_CompressedAllGather(calls, unit))
        if isinstance(mesh, HSDPMeshInfo) and mesh.replicate_mesh_size > 1:
            # There is a hook after the all-reduce only. Each `fully_shard` has a mesh_info of its own.
            replaced = mesh.replicate_process_group
            undo.append(partial(setattr, mesh, "replicate_process_group", replaced))
            mesh.replicate_process_group = _Replicas(calls, unit, group, replaced)

    def uninstall() -> None:
        for step in undo:
            step()

    return uninstall
