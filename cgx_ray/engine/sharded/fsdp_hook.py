"""FSDP2's hooks: a `ShardedEngine` reduces gradients and gathers parameters in place of `fully_shard`.

Torch calls the hooks on the training thread, in program order, the same on all ranks. It treats an operation as
finished when its hook returns (on a GPU: for whatever it queues behind it), except where a comment says otherwise.

R ranks that share the parameters, T elements of a module's shard
"""

from __future__ import annotations

import weakref
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
from cgx_ray.engine.sharded.sharded_engine import ShardedEngine
from cgx_ray.engine.sharded.shards import Unit
from cgx_ray.errors import CGXError
from cgx_ray.runtime_ext.streams import Mark
from cgx_ray.torch_compat import (
    AllGather,
    FSDPParamGroup,
    HSDPMeshInfo,
    ReduceScatter,
    as_delivered,
    call_after_backward,
    delivered_dtype,
    max_reduce_scatter_inputs,
)


class PendingCalls:
    """Calls to the engine that the hooks of one model have begun and not waited for yet.

    is_handed_over  FSDP2 itself reduces gradients in the step under way, since no layer has a codec
    """

    def __init__(self, engine: ShardedEngine, loss_scale: LossScale, *, hands_over: bool) -> None:
        """`hands_over`: let FSDP2 itself reduce where no layer has a codec."""
        self.engine = engine
        self.loss_scale = loss_scale
        self.is_handed_over = False
        self._hands_over = hands_over
        # Modules whose gradients have come in the step under way, and the mark of the last ones handed over.
        self._come: set[Unit] = set()
        self._ready: Mark | None = None
        self._begun: list[Future[None]] = []
        self._reading: deque[Future[None]] = deque()

    def ask(self, unit: Unit) -> None:
        """Find out `is_handed_over` for the gradients of `unit`, which are ready. All ranks find the same."""
        if not self._hands_over:
            return
        if not self._come or unit in self._come:
            self._come.clear()
            self.is_handed_over = self.engine.begin_step(unit)
        self._come.add(unit)
        if self.is_handed_over:
            self._ready = self.engine.streams.mark()

    def hand_over(self, unit: Unit) -> None:
        """Take down that FSDP2 itself reduces the gradients of `unit`."""
        assert self._ready is not None
        call_after_backward(self._finish)
        self.engine.hand_over(unit, self._ready)

    def make_room(self, max_buffers: int) -> None:
        """Wait until fewer than `max_buffers` inputs of reduce-scatters are in use, as FSDP2 does on a GPU."""
        while len(self._reading) >= max_buffers:
            self.engine.wait(self._reading.popleft())

    def begin(self, future: Future[None], *, is_read_at_once: bool) -> None:
        """Wait for `future`, which reduces gradients, when backward ends, or at once if FSDP2 reads them."""
        # Autograd calls `_finish` at the end of backward, after FSDP2's own callback, which may reduce as well.
        call_after_backward(self._finish)
        self._begun.append(future)
        if is_read_at_once:
            self.engine.wait(future)

    def begin_reading(self, future: Future[None]) -> None:
        """Count the input of a reduce-scatter as in use until `future` is done."""
        self._reading.append(future)

    def raise_later(self, error: CGXError) -> None:
        """Raise `error` when backward ends."""
        failed: Future[None] = Future()
        failed.set_exception(error)
        self.begin(failed, is_read_at_once=False)

    def _finish(self) -> None:
        if not self._begun and self._ready is None:
            return
        begun, self._begun = self._begun, []
        self._ready = None
        self._come.clear()
        self._reading.clear()
        for future in begun:
            self.engine.wait(future, at_end=True)
        ended = self.engine.end_step()
        if begun:
            self.engine.wait(ended, at_end=True)


def _is_added_at_once(group: FSDPParamGroup) -> bool:
    """Return True if FSDP2 adds gradients of several passes between their reduce-scatter and the all-reduce."""
    return not group.all_reduce_grads or group._partial_reduce_output is not None


def _is_read_at_once(group: FSDPParamGroup, op: Any) -> bool:
    """Return True if FSDP2 reads a gradient that is reduced over all ranks before backward ends (`foreach_reduce`)."""
    return (
        op != dist.ReduceOp.AVG  # divides it
        or delivered_dtype(group) != torch.float32  # converts it
        or group._all_reduce_hook is not None
        or any(
            parameter.offload_to_cpu
            or parameter.sharded_param.grad is not None  # adds it
            or getattr(parameter.sharded_param, "_post_accumulate_grad_hooks", None)
            for parameter in group.fsdp_params
        )
    )


class _PendingWork(dist.Work):
    """Work that torch may wait for. `wait` calls the given function; without one it returns at once."""

    def __init__(self, wait: Callable[[], None] | None) -> None:
        super().__init__()
        self._wait = wait

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._wait is not None:
            self._wait()
        return True


class _OwnReduceScatter(ReduceScatter):
    """FSDP2's own, in float32 where the engine has a part in the step.

    Sums of 16 bits would be converted before the replicas' exchange has ended.
    """

    def __init__(self, calls: PendingCalls, unit: Unit, group: FSDPParamGroup, plain: ReduceScatter) -> None:
        self._calls = calls
        self._unit = unit
        self._group = group
        self._plain = plain
        # From the memory of the input to the call.
        self._is_asked = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the input, the gradients of all ranks' shards, or for the output, those of this rank's."""
        if not self._is_asked:
            self._is_asked = True
            self._calls.ask(self._unit)
        if self._calls.is_handed_over:
            return self._plain.allocate(size, dtype=dtype, device=device)
        self._calls.make_room(max_reduce_scatter_inputs(self._group))
        return torch.empty(*size, dtype=torch.float32, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._is_asked = False
        return self._plain(output_tensor, input_tensor, group, op, async_op)


class _CompressedReduceScatter(_OwnReduceScatter):
    """Averages a module's gradients.

    Works in float32 and ignores the policy's `reduce_dtype`, since the codec makes the messages small.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        if self._calls.is_handed_over:
            self._calls.hand_over(self._unit)
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        self._is_asked = False
        mesh, rows_RT = self._group.mesh_info, input_tensor.view(group.size(), -1)
        has_replicas = isinstance(mesh, HSDPMeshInfo) and mesh.replicate_mesh_size > 1
        future = self._calls.engine.reduce_scatter(
            self._unit,
            rows_RT,
            output_tensor,
            is_average=_is_average(op),
            scales=self._calls.loss_scale.now(),
            # With replicas the gradient is complete only after their all-reduce.
            delivered=None if has_replicas else partial(as_delivered, self._group, op),
        )
        self._calls.begin_reading(future)
        is_read_at_once = _is_added_at_once(self._group) or _is_read_at_once(self._group, op)
        self._calls.begin(future, is_read_at_once=is_read_at_once)
        return None


class _CompressedAllGather(AllGather):
    """Gathers a module's parameters, encoded."""

    def __init__(self, calls: PendingCalls, unit: Unit) -> None:
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
        return _PendingWork(lambda: engine.wait(future))


class _ReplicaGroup(dist.ProcessGroup):
    """Replaces the process group in which FSDP2 all-reduces sharded gradients after their reduce-scatter (HSDP)."""

    def __init__(self, calls: PendingCalls, unit: Unit, group: FSDPParamGroup, replaced: dist.ProcessGroup) -> None:
        super().__init__(replaced.rank(), replaced.size())  # type: ignore[call-arg]  # torch's stub wants a store
        self._calls = calls
        self._unit = unit
        self._group = group
        self._replaced = replaced

    # One of the three signatures in torch's stub: the one that dist.all_reduce uses.
    def allreduce(self, tensors: list[Tensor], opts: dist.AllreduceOptions) -> dist.Work:  # type: ignore[override]
        op, (shard_T,) = opts.reduceOp, tensors
        engine = self._calls.engine
        if self._calls.is_handed_over:
            if engine.sums_inside:
                self._calls.hand_over(self._unit)
            return self._replaced.allreduce(tensors, opts)
        try:
            future = engine.all_reduce(
                self._unit,
                shard_T,
                is_average=_is_average(op),
                scales=self._calls.loss_scale.now() if engine.sums_inside else (),
                delivered=partial(as_delivered, self._group, op),
            )
            self._calls.begin(future, is_read_at_once=_is_read_at_once(self._group, op))
        except Exception as error:  # noqa: BLE001 - raised when backward ends
            # Torch would log the error, look up the name of this group, and fail because it is not registered.
            self._calls.raise_later(error if isinstance(error, CGXError) else CGXError(repr(error)))
        # `begin` has already waited if torch reads the result now. In all other cases it is too early to wait.
        return _PendingWork(None)


def _is_average(op: Any) -> bool:
    if op == dist.ReduceOp.AVG:
        return True
    if op != dist.ReduceOp.SUM:
        raise CGXError(
            f"FSDP2 asks for {op}, because of set_gradient_divide_factor; also call "
            "set_force_sum_reduction_for_comms(True), so that FSDP2 itself divides"
        )
    return False


def install(
    model: nn.Module,
    engine: ShardedEngine,
    groups: Mapping[str, FSDPParamGroup],
    units: Sequence[Unit],
    loss_scale: LossScale,
    *,
    hands_over: bool = False,
) -> Callable[[], None]:
    """Put hooks into every group. Return a function that removes them, and does not keep the model alive.

    hands_over  let FSDP2 itself reduce the gradients of plans without a codec
    """
    calls = PendingCalls(engine, loss_scale, hands_over=hands_over)
    # By reference to the method of a module that sets a hook: the hook that it had.
    methods: list[tuple[weakref.WeakMethod[Any], Any]] = []
    meshes: list[tuple[weakref.ref[Any], dist.ProcessGroup]] = []
    for (name, group), unit in zip(groups.items(), units, strict=True):
        module, mesh = model.get_submodule(name), group.mesh_info
        assert isinstance(module, FSDPModule)
        plain = group._reduce_scatter_comm
        methods.append((weakref.WeakMethod(module.set_custom_reduce_scatter), plain))
        kind = _OwnReduceScatter if engine.sums_inside else _CompressedReduceScatter
        module.set_custom_reduce_scatter(kind(calls, unit, group, plain))
        if unit.parameters:
            methods.append((weakref.WeakMethod(module.set_custom_all_gather), group._all_gather_comm))
            module.set_custom_all_gather(_CompressedAllGather(calls, unit))
        if isinstance(mesh, HSDPMeshInfo) and mesh.replicate_mesh_size > 1:
            # FSDP2 has a hook after this all-reduce, but none in its place. Each `fully_shard` has its own mesh_info.
            replaced = mesh.replicate_process_group
            meshes.append((weakref.ref(mesh), replaced))
            mesh.replicate_process_group = _ReplicaGroup(calls, unit, group, replaced)

    def uninstall() -> None:
        for method, replaced in methods:
            if (set_hook := method()) is not None:
                set_hook(replaced)
        for reference, replaced in meshes:
            if (mesh := reference()) is not None:
                mesh.replicate_process_group = replaced

    return uninstall
