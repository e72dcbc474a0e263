"""DDP's communication hook. It takes buckets and returns futures; nothing waits in it."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from cgx_ray.engine.engine import Engine
from cgx_ray.engine.loss_scale import LossScale
from cgx_ray.engine.step import PendingBucket
from cgx_ray.engine.unused import UsedLayers


class DdpBuckets:
    """Names the gradients in DDP's buckets by layer and submits the buckets to an engine."""

    def __init__(self, model: DistributedDataParallel, engine: Engine, loss_scale: LossScale | None = None) -> None:
        """`loss_scale`: by default the scale of the GradScaler that scales the losses."""
        self._engine = engine
        self._loss_scale = loss_scale or LossScale()
        self._used = UsedLayers(model)
        self._names = {id(parameter): name for name, parameter in model.module.named_parameters()}

    def submit(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        buffer = bucket.buffer()
        on_cuda = buffer.device.type == "cuda"
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if on_cuda else None)
        self._engine.submit(
            PendingBucket(
                gradients=dict(zip(names, bucket.gradients(), strict=True)),
                buffer=buffer,
                future=future,
                scales=self._loss_scale.now(),
                unused=self._used.take_unused(bucket, names),
                # After `now`, so that the event also covers the device's copies of the scales.
                computed=_end_of_kernels(buffer.device) if on_cuda else None,
            )
        )
        return future.then(_value)


def _end_of_kernels(device: torch.device) -> torch.cuda.Event:
    """Return an event that the current stream reaches after all its work so far. Backward runs ahead of the device."""
    event = torch.cuda.Event(enable_timing=True, blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _value(done: torch.futures.Future[Tensor]) -> Tensor:
    """Return the bucket, or raise its error.

    DDP's C++ code understands an error that is raised here, but takes the one of `set_exception` for a tensor.
    """
    return done.value()


def cgx_hook(state: DdpBuckets, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Submit `bucket` to the engine's thread. The returned future gets the bucket averaged over ranks."""
    return state.submit(bucket)
