"""The observer of `cgx-ray why` in a process of a training: `observe` is called by `cgx_ray_autoload`."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from cgx_ray.torch_compat import default_store
from cgx_ray.untrusted import parse_json
from cgx_ray.why.meters import versions
from cgx_ray.why.probes import probe_ranks
from cgx_ray.why.records import OPTIONS_FILE, ObserverOptions, ProbedPath, RankRecord, from_json
from cgx_ray.why.step_observer import StepObserver
from cgx_ray.why.watch import Watch
from cgx_ray_autoload.observing import Guard


class Observer:
    """Observes this process, which has a process group. Errors are the guard's business."""

    def __init__(self, guard: Guard, options: ObserverOptions) -> None:
        self._guard, self._options = guard, options
        guard.folder.mkdir(parents=True, exist_ok=True)
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._backend = dist.get_backend()
        self._probes: tuple[ProbedPath, ...] = ()
        self._gpu = ""
        self._has_loader = False
        is_one_node = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == self._world_size
        self._watch = Watch(
            guard.folder,
            self._rank,
            self._world_size,
            None if is_one_node else default_store(),
            self._record,
            guard.wrapped,
        )
        self._steps = StepObserver(self._options.num_steps, self._begin, self._watch.end, guard.wrapped)
        self._process = os.getpid()
        self._watch.start()

    def add_model(self, model: DistributedDataParallel) -> None:
        """Observe a model that was just built. A collective call if ranks probe each other."""
        device = next(model.parameters()).device
        if device.type == "cuda" and not self._gpu:
            self._gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        if self._options.probes and not self._steps.num_models:
            self._probes = probe_ranks(default_store(), self._rank, self._world_size)
        self._steps.add_model(model)

    def finish(self) -> None:
        """Hand over what was seen until now, at the end of the process."""
        if os.getpid() == self._process:  # and not a copy of it
            self._steps.finish()
            self._watch.finish()

    def _begin(self) -> None:
        # Here it costs no step that counts: with a million objects it takes 0.1 s.
        self._has_loader = any(issubclass(type(one), DataLoader) for one in gc.get_objects())
        self._watch.begin()

    def _record(self, watch: Watch) -> RankRecord:
        node, seen_s, waited_s = watch.node.read(asks_gpus=watch.is_over and os.environ.get("LOCAL_RANK", "0") == "0")
        steps = self._steps
        return RankRecord(
            rank=self._rank,
            world_size=self._world_size,
            backend=self._backend,
            device=steps.device,
            gpu=self._gpu,
            num_models=steps.num_models,
            has_loader=self._has_loader,
            num_warm=steps.num_warm,
            steps=tuple(steps.steps),
            num_exchanges=steps.mean_exchanges,
            seen_s=seen_s,
            num_threads=torch.get_num_threads(),
            waited_s=waited_s,
            bucket_bytes=steps.bucket_bytes,
            layers=steps.layers() if self._rank == 0 else (),
            connections=watch.connections.read(),
            probes=self._probes,
            node=node,
            versions={**versions(), "torch": str(torch.__version__)},
        )


_observer: Observer | None = None


def observe(guard: Guard, models: Sequence[object]) -> None:
    """Observe this process from its first process group on, and the DDP models `models`."""
    global _observer  # noqa: PLW0603 - a training has no place of its own for it
    if _observer is None:
        file = guard.folder / OPTIONS_FILE
        options = from_json(ObserverOptions, parse_json(file.read_bytes())) if file.exists() else ObserverOptions()
        _observer = Observer(guard, options)
        atexit.register(guard.wrapped(_observer.finish))
    for model in models:
        assert isinstance(model, DistributedDataParallel)
        _observer.add_model(model)
