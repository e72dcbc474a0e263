"""GRACE's pattern (Xu et al. 2021): each tensor is compressed by itself, all-gathered, decompressed and averaged.

Written from the paper's description, with our codecs, so what differs from our engine is the pattern and not the
numerics or the speed of kernels. All tensors are compressed, also small ones, after backward. While one is gathered by
Gloo, the next ones are compressed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.step.averaging import Averaging
from bench.step.cases import StepWay
from bench.step.torch_hooks import register_hook
from cgx_ray.codecs import make_codec
from cgx_ray.plan import CodecSpec
from cgx_ray.runtime_ext import ops


class Grace(Averaging):
    """Averages the gradients after backward, in its order, with the codec of the way."""

    def __init__(self, model: DistributedDataParallel, way: StepWay) -> None:
        register_hook(model, "noop")
        codec = CodecSpec.parse(way.codec)
        self._tensors = [_GraceTensor(parameter, codec) for parameter in reversed(list(model.parameters()))]
        self._step = 0

    def end_step(self) -> None:
        rank = dist.get_rank()
        works = [one.gather(ops.message_key(0, self._step, at, rank, 0)) for at, one in enumerate(self._tensors)]
        for one, work in zip(self._tensors, works, strict=True):
            work.wait()
            one.decode()
        self._step += 1


class _GraceTensor:
    """One tensor, with its payloads of all ranks and the codec's memory."""

    def __init__(self, parameter: nn.Parameter, codec: CodecSpec) -> None:
        numel = parameter.numel()
        self._parameter, self._codec = parameter, make_codec(codec)
        self._memory = self._codec.new_memory(numel)
        self._payload = torch.empty(self._codec.payload_bytes(numel), dtype=torch.uint8)
        self._payloads = [torch.empty_like(self._payload) for _ in range(dist.get_world_size())]

    @property
    def _grad_N(self) -> Tensor:  # noqa: N802 - tensors end in their dimensions
        assert self._parameter.grad is not None
        return self._parameter.grad.view(-1)

    def gather(self, key: int) -> dist.Work:
        self._codec.encode(self._grad_N, self._payload, key, self._memory)
        if self._memory is not None:
            self._memory.commit()
        work: dist.Work = dist.all_gather(self._payloads, self._payload, async_op=True)
        return work

    def decode(self) -> None:
        grad_N = self._grad_N.zero_()
        for payload in self._payloads:
            self._codec.decode(payload, grad_N, add=True)
        ops.divide(grad_N, len(self._payloads))
