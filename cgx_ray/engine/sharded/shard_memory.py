"""The residuals of a sharded model: when they become valid, their loss scale, and their checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from cgx_ray.codecs.codec import KINDS, RESIDUALS, is_finite
from cgx_ray.collectives import Transport
from cgx_ray.engine.loss_scale import Scales, one_scale
from cgx_ray.engine.sharded.shards import Part, Unit
from cgx_ray.engine.unused import StepResult, begin_marked_by_all
from cgx_ray.errors import StateError


class ShardMemory:
    """Residuals of all units. Those of a step become valid when the next one begins, see `StepResult`.

    Does nothing for codecs without residuals.
    """

    def __init__(
        self, units: Sequence[Unit], shards: Transport, judged_together: Callable[[], Iterable[frozenset[str]]]
    ) -> None:
        """
        shards           connects the ranks that share the parameters
        judged_together  as `LossScale.judged_together`
        """
        # No plan changes these.
        self._parts = [part for unit in units for part in unit.gradients if part.memory is not None]
        self._is_needed = bool(self._parts)
        self._shards = shards
        self._judged_together = judged_together
        # Scale of the gradients that the residuals were made from.
        self._loss_scale = 1.0
        # Layers of the step under way whose averages are not finite on this rank.
        self._broken: set[str] = set()
        # Units of the previous step, and a call that returns the layers that all ranks found finite.
        self._unsettled: tuple[list[Unit], Callable[[], frozenset[str]]] | None = None

    def note(self, unit: Unit, gradient_T: Tensor, delivered: Callable[[Tensor], Tensor]) -> None:
        """Check `delivered(gradient_T)`, the gradient that the model gets, for NaN and Inf."""
        if self._is_needed and not is_finite(delivered_T := delivered(gradient_T)):
            layers = zip(unit.layers, delivered_T.split(unit.widths), strict=True)
            self._broken.update(layer.name for layer, part in layers if not is_finite(part))

    def end_step(self, units: list[Unit]) -> None:
        """Begin to find out which layers of `units` are finite on all ranks. Nothing waits for it."""
        if self._is_needed:
            names = _names(units)
            self._unsettled = units, begin_marked_by_all(names, names - self._broken, self._shards)
        self._broken = set()

    def settle(self) -> None:
        """Make the residuals of the last step valid, except of layers whose averages have changed no weight."""
        if self._unsettled is None:
            return
        units, finite_on_all = self._unsettled
        self._unsettled = None
        names = _names(units)
        not_applied = StepResult(broken=names - finite_on_all()).not_applied(names, self._judged_together())
        for part in (part for unit in units for part in unit.gradients):
            if part.memory is not None:
                part.keep(not_applied)
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
        residuals = {name: value for part in self._parts for name, value in part.residuals().items()}
        return {"loss_scale": self._loss_scale, **{kind: residuals if kind == RESIDUALS else {} for kind in KINDS}}

    def check(self, memories: Mapping[str, Mapping[str, Tensor]], plan: str) -> None:
        """Raise StateError if `memories` are not those of this model and codec. `plan` describes the codec."""
        numels = {layer.layer.name: layer.layer.numel for part in self._parts for layer in part.layers}
        for kind in KINDS:
            for name, value in memories[kind].items():
                if kind != RESIDUALS or numels.get(name) != value.numel():
                    raise StateError(
                        f"the state has {kind} of {value.numel()} elements for layer {name!r}, of which {plan} "
                        f"remembers {numels.get(name, 'nothing')}; attach with the codec and the model that saved the "
                        "state"
                    )

    def load(
        self, residuals: Mapping[str, Tensor], loss_scale: float, summed: Callable[[Part, Tensor], Tensor]
    ) -> None:
        """Settle the last step, then replace all residuals by `residuals`, by layer, whose scale is `loss_scale`.

        summed  as of `Part.set_residuals`
        """
        self.settle()
        self._rescale(loss_scale)
        for part in self._parts:
            part.set_residuals(residuals, summed)


def _names(units: Sequence[Unit]) -> frozenset[str]:
    return frozenset(layer.name for unit in units for layer in unit.layers)
