"""The residuals of a sharded model: when they become valid, their loss scale, and their checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cgx_ray.codecs.codec import KINDS, RESIDUALS, is_finite
from cgx_ray.collectives import Transport
from cgx_ray.engine.loss_scale import Scales, one_scale
from cgx_ray.engine.shards import Unit
from cgx_ray.errors import StateError


class ShardMemory:
    """Residuals of all units. Those of a step become valid when all ranks have found its averages finite.

    Does nothing for codecs without residuals.
    """

    def __init__(self, units: Sequence[Unit], shards: Transport) -> None:
        """`shards` connects the ranks that share the parameters."""
        self._parts = [part for unit in units for part in unit.gradients]
        self._is_needed = any(part.memory is not None for part in self._parts)
        self._shards = shards
        # Scale of the gradients that the residuals were made from.
        self._loss_scale = 1.0
        # False once an average of the step under way was not finite on this rank.
        self._is_finite = True
        # Units of the previous step, and a call that returns 1 if all ranks found their averages finite.
        self._unsettled: tuple[list[Unit], Callable[[], Tensor]] | None = None

    def note(self, gradient_T: Tensor, delivered: Callable[[Tensor], Tensor]) -> None:
        """Check `delivered(gradient_T)`, the gradient that the model gets, for NaN and Inf."""
        if self._is_needed and not is_finite(delivered(gradient_T)):
            self._is_finite = False

    def end_step(self, units: list[Unit]) -> None:
        """Begin to find out whether the step of `units` was finite on all ranks. Nothing waits for it."""
        if self._is_needed:
            self._unsettled = units, self._shards.start_minimum(torch.tensor([self._is_finite], dtype=torch.int64))
        self._is_finite = True

    def settle(self) -> None:
        """Make the residuals of the last step valid, on all ranks or on none.

        GradScaler skips a step with NaN or Inf, so such a step must leave no trace.
        """
        if self._unsettled is None:
            return
        units, minimum = self._unsettled
        self._unsettled = None
        if int(minimum()):
            for part in (part for unit in units for part in unit.gradients):
                if part.memory is not None:
                    part.memory.commit()

    def follow_scale(self, scales: Scales, *, is_first: bool) -> None:
        """Convert the residuals to the loss scale of the step, which its first unit brings.

        Raises CGXError if the step has no single scale.
        """
        if self._is_needed:
            self._rescale(one_scale(scales, None if is_first else self._loss_scale))

    def _rescale(self, scale: float) -> None:
        self._loss_scale = scale
        for part in self._parts:
            if part.memory is not None:
                part.memory.rescale(scale)

    def state(self) -> dict[str, Any]:
        """Settle the last step. Return loss scale and memory by kind and layer, for a checkpoint."""
        self.settle()
        owed = {name: value for part in self._parts for name, value in part.owed().items()}
        return {"loss_scale": self._loss_scale, **{kind: owed if kind == RESIDUALS else {} for kind in KINDS}}

    def check(self, memories: Mapping[str, Mapping[str, Tensor]], plan: str) -> None:
        """Raise StateError if `memories` are not those of this model and codec. `plan` describes the codec."""
        numels = {
            layer.layer.name: layer.layer.numel
            for part in self._parts
            if part.memory is not None
            for layer in part.layers
        }
        for kind in KINDS:
            for name, value in memories[kind].items():
                if kind != RESIDUALS or numels.get(name) != value.numel():
                    raise StateError(
                        f"the state has {kind} of {value.numel()} elements for layer {name!r}, of which {plan} "
                        f"remembers {numels.get(name, 'nothing')}; attach with the codec and the model that saved the "
                        "state"
                    )

    def load(self, owed: Mapping[str, Tensor], loss_scale: float) -> None:
        """Settle the last step, then replace all residuals by `owed`, by layer, whose scale is `loss_scale`."""
        self.settle()
        self._rescale(loss_scale)
        for part in self._parts:
            part.owe(owed)
