"""torchft's LocalSGD and DiLoCo over Gloo, with a replica group per rank; torchft is no dependency of cgx_ray."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.step.averaging import Averaging
from bench.step.cases import StepWay
from bench.step.torch_hooks import register_hook

_TIMEOUT = timedelta(minutes=10)


class _NoOptimizer(torch.optim.Optimizer):
    """Changes no parameter; torchft's hooks run after each of its steps."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        del closure


class TorchFtRounds(Averaging):
    """Averages the parameters once in every round, by DiLoCo or LocalSGD.

    Rank 0 has the lighthouse. All replicas are there from the first step on and none fails.
    """

    def __init__(self, model: DistributedDataParallel, way: StepWay) -> None:
        from torchft.coordination import LighthouseServer  # noqa: PLC0415 - it may be missing
        from torchft.local_sgd import DiLoCo, LocalSGD  # noqa: PLC0415
        from torchft.manager import Manager  # noqa: PLC0415
        from torchft.process_group import ProcessGroupGloo  # noqa: PLC0415

        register_hook(model, "noop")
        module: nn.Module = model.module
        rank, address = dist.get_rank(), socket.gethostbyname(socket.gethostname())
        self._lighthouse = None
        if rank == 0:
            self._lighthouse = LighthouseServer(bind=f"{address}:0", min_replicas=dist.get_world_size())
        found = [self._lighthouse.address() if self._lighthouse is not None else ""]
        dist.broadcast_object_list(found, src=0)
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=_TIMEOUT),
            load_state_dict=module.load_state_dict,
            state_dict=module.state_dict,
            min_replica_size=dist.get_world_size(),
            use_async_quorum=False,
            timeout=_TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self._store.port,
            lighthouse_addr=found[0],
            replica_id=f"rank_{rank}",
            hostname=address,
            init_sync=False,
        )
        self._optimizer = _NoOptimizer(module.parameters())
        if way.kind == "torchft_diloco":
            # The outer optimizer of its paper.
            outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            self._rounds = DiLoCo(
                self._manager, [module], self._optimizer, outer, sync_every=way.period, use_bucketization=True
            )
        else:
            self._rounds = LocalSGD(self._manager, module, self._optimizer, sync_every=way.period)
        self._rounds.__enter__()

    def end_step(self) -> None:
        self._optimizer.step()

    def close(self) -> None:
        self._rounds.__exit__(None, None, None)
        self._manager.shutdown()
        dist.barrier()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()
