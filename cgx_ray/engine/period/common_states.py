"""The state of a model's optimizers, made the same on all ranks."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from cgx_ray.codecs.codec import HOST
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.weight_check import in_batches

logger = logging.getLogger(__name__)


class _Kind(NamedTuple):
    """Properties of a tensor in an optimizer's state, on a rank that has it."""

    shape: torch.Size
    dtype: torch.dtype
    is_on_host: bool

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def is_copied(self) -> bool:
        """True for whole numbers, such as those of 8-bit optimizers: their mean would mean nothing."""
        return not self.dtype.is_floating_point and self.numel > 1

    @property
    def summed_as(self) -> torch.dtype:
        """Type of the sum over ranks. Sums of counts, such as Adam's step, must be exact."""
        if self.is_copied:
            return torch.uint8 if self.dtype == torch.bool else self.dtype
        return torch.float32 if self.dtype.itemsize <= 4 and self.numel > 1 else torch.float64


# Layer, place of the optimizer among those of the layer, and name of a tensor.
_Key = tuple[str, int, str]
_Optimizers = Mapping[str, Sequence[Optimizer]]


class _Mean(NamedTuple):
    """A tensor that is to be the mean of those of the ranks `givers`."""

    key: _Key
    kind: _Kind
    givers: tuple[int, ...]


def share_states(optimizers: _Optimizers, parameters: Mapping[str, nn.Parameter], engine: Engine) -> None:
    """Replace the tensors in the optimizers' state by their means over all ranks. A collective call, between steps.

    optimizers  by layer, those that have stepped it last; layers that none has stepped are left out

    The mean of first moments is the moment of the mean gradients. A layer with whole numbers in its state gets the
    state of the first rank that has one. So does a rank that has none, as its steps did not use the layer. What is in
    no tensor, or in a list of them, stays each rank's own.
    """
    with engine.failing_together(), torch.no_grad():
        own = _tensors(optimizers, parameters)
        mine = {key: _Kind(one.shape, one.dtype, one.device.type == "cpu") for key, one in own.items()}
        kinds: list[dict[_Key, _Kind]] = _gathered(mine, engine)
        known = {key: kind for of_rank in reversed(kinds) for key, kind in of_rank.items()}
        copied = {name for (name, *_), kind in known.items() if kind.is_copied}
        means = []
        for key in sorted(known):
            ranks = tuple(rank for rank, of_rank in enumerate(kinds) if key in of_rank)
            means.append(_Mean(key, known[key], ranks[:1] if key[0] in copied else ranks))
        if dist.get_rank() == 0:
            num_bytes = sum(one.kind.numel * one.kind.summed_as.itemsize for one in means)
            logger.info("step %d: averages the optimizers' state, %.3g MB", engine.step, num_bytes / 1e6)
        for dtype in dict.fromkeys(one.kind.summed_as for one in means):
            chosen = [one for one in means if one.kind.summed_as == dtype]
            for batch in in_batches(chosen, lambda one: one.kind.numel):
                _take_means(batch, own, optimizers, parameters, engine)


def _tensors(optimizers: _Optimizers, parameters: Mapping[str, nn.Parameter]) -> dict[_Key, Tensor]:
    return {
        (name, place, entry): one
        for name, those in optimizers.items()
        for place, optimizer in enumerate(those)
        for entry, one in optimizer.state.get(parameters[name], {}).items()
        if isinstance(one, Tensor)
    }


def _take_means(
    means: Sequence[_Mean],
    own: Mapping[_Key, Tensor],
    optimizers: _Optimizers,
    parameters: Mapping[str, nn.Parameter],
    engine: Engine,
) -> None:
    """Replace tensors that are summed in one type."""
    rank, numels = dist.get_rank(), [one.kind.numel for one in means]
    sum_N = torch.zeros(sum(numels), dtype=means[0].kind.summed_as, device=engine.device)
    parts = [part_K.view(one.kind.shape) for one, part_K in zip(means, sum_N.split(numels), strict=True)]
    for one, part in zip(means, parts, strict=True):
        if rank in one.givers:
            part.copy_(own[one.key])
    engine.sums.begin("the mean of the optimizers' state", sum_N)()
    for one, part in zip(means, parts, strict=True):
        if len(one.givers) > 1:
            part.div_(len(one.givers))
        name, place, entry = one.key
        if one.key in own:
            own[one.key].copy_(part)
        elif len(optimizers.get(name, ())) > place:
            device = HOST if one.kind.is_on_host else parameters[name].device
            optimizers[name][place].state[parameters[name]][entry] = part.to(device, one.kind.dtype, copy=True)


def _gathered(value: Any, engine: Engine) -> list[Any]:
    """Return the values of all ranks."""
    bytes_N = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    num_R = torch.zeros(world_size, dtype=torch.int64, device=HOST)
    num_R[rank] = len(bytes_N)
    engine.sums.begin("the kinds of the optimizers' state", num_R)()
    bytes_RN = torch.zeros(world_size, int(num_R.max()), dtype=torch.uint8, device=HOST)
    bytes_RN[rank, : len(bytes_N)] = bytes_N
    engine.sums.begin("the kinds of the optimizers' state", bytes_RN)()
    return [pickle.loads(row_N[:num].numpy().tobytes()) for row_N, num in zip(bytes_RN, num_R.tolist(), strict=True)]
