"""After rounds, the state of a model's optimizers is made the same on all ranks again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cgx_ray.codecs.codec import HOST
from cgx_ray.engine.loss_scale import holds, parameters_of
from cgx_ray.engine.weight_check import in_batches


class _Kind(NamedTuple):
    """What a tensor of an optimizer's state is, on a rank that has it."""

    shape: torch.Size
    dtype: torch.dtype
    is_on_host: bool

    @property
    def summed_as(self) -> torch.dtype:
        """Type of the sum over ranks. Those of counts, such as Adam's step, must be exact."""
        is_small = self.dtype in (torch.float32, torch.float16, torch.bfloat16) and self.shape.numel() > 1
        return torch.float32 if is_small else torch.float64

    @property
    def has_mean(self) -> bool:
        return self.dtype.is_floating_point or self.shape.numel() == 1


# Layer and name of a tensor.
_Key = tuple[str, str]


class _Mean(NamedTuple):
    """A tensor that is to be the mean of those of the ranks `givers`."""

    key: _Key
    kind: _Kind
    givers: tuple[int, ...]


class CommonStates:
    """Gives each optimizer of the model, before its next step, the mean of all ranks' states.

    In rounds each rank's optimizer has moments of its own, of its own gradients. Where ranks exchange gradients, other
    moments would let the parameters of the ranks drift apart, for good. So all ranks take that step together, as they
    do in DDP without rounds.

    The mean of first moments is the moment of the mean gradients. A layer with whole numbers in its state, such as
    those of 8-bit optimizers, gets the state of the first rank that has one. So does a rank that has none, where its
    steps did not use the layer. What is not in a tensor stays each rank's own.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
        """`group`: of all ranks, in which no one else has a collective under way during an optimizer's step."""
        self._parameters = dict(parameters)
        self._keys = {id(parameter) for parameter in parameters.values()}
        self._group = group
        self._done: WeakSet[Optimizer] = WeakSet()
        # Dynamo, which a compiled step would have look into it, cannot.
        self._hook = register_optimizer_step_pre_hook(torch.compiler.disable(self._before))

    def close(self) -> None:
        """Leave the states as they are from now on."""
        self._hook.remove()

    def _before(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if optimizer in self._done or not holds(optimizer, self._keys):
            return
        self._done.add(optimizer)
        with torch.no_grad():
            self._average(optimizer)

    def _average(self, optimizer: Optimizer) -> None:
        own = self._states(optimizer)
        kinds: list[dict[_Key, _Kind]] = [{} for _ in range(self._group.size())]
        mine = {key: _Kind(one.shape, one.dtype, one.device.type == "cpu") for key, one in own.items()}
        dist.all_gather_object(kinds, mine, group=self._group)
        known = {key: kind for of_rank in reversed(kinds) for key, kind in of_rank.items()}
        without_mean = {name for (name, _), kind in known.items() if not kind.has_mean}
        means = []
        for key in sorted(known):
            ranks = tuple(rank for rank, of_rank in enumerate(kinds) if key in of_rank)
            means.append(_Mean(key, known[key], ranks[:1] if key[0] in without_mean else ranks))
        for dtype in (torch.float64, torch.float32):
            chosen = [one for one in means if one.kind.summed_as == dtype]
            for batch in in_batches(chosen, lambda one: one.kind.shape.numel()):
                self._take_means(optimizer, own, batch, dtype)

    def _take_means(
        self, optimizer: Optimizer, own: Mapping[_Key, Tensor], means: Sequence[_Mean], dtype: torch.dtype
    ) -> None:
        rank, device = self._group.rank(), next(iter(self._parameters.values())).device
        numels = [one.kind.shape.numel() for one in means]
        sum_N = torch.zeros(sum(numels), dtype=dtype, device=device)
        parts = [part_K.view(one.kind.shape) for one, part_K in zip(means, sum_N.split(numels), strict=True)]
        for one, part in zip(means, parts, strict=True):
            if rank in one.givers:
                part.copy_(own[one.key])
        dist.all_reduce(sum_N, group=self._group)
        for one, part in zip(means, parts, strict=True):
            part.div_(len(one.givers))
            if one.key in own:
                own[one.key].copy_(part)
                continue
            name, entry = one.key
            parameter = self._parameters[name]
            place = HOST if one.kind.is_on_host else parameter.device
            optimizer.state[parameter][entry] = part.to(place, one.kind.dtype, copy=True)

    def _states(self, optimizer: Optimizer) -> dict[_Key, Tensor]:
        """Return the tensors in the optimizer's state of the model's parameters."""
        held = set(parameters_of(optimizer))
        states = {name: optimizer.state.get(one, {}) for name, one in self._parameters.items() if id(one) in held}
        return {
            (name, entry): one
            for name, state in states.items()
            for entry, one in state.items()
            if isinstance(one, Tensor)
        }
