"""Banks: the codecs' memory, and the groups of the plan in force, for each content that steps exchange."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cgx_ray.codecs.feedback import Memories
from cgx_ray.collectives import Transport
from cgx_ray.engine.group import Group
from cgx_ray.engine.layers import LOSSY_FLOAT64, lossy_layers
from cgx_ray.engine.step import Content, PauseWatch
from cgx_ray.engine.unused import StepResult
from cgx_ray.errors import listed
from cgx_ray.plan import DENSE, Layer, Plan

logger = logging.getLogger(__name__)


class Bank:
    """Groups and memory of one content.

    pauses  between steps that exchange it
    """

    def __init__(
        self, content: Content, layers: Mapping[str, Layer], transport: Transport, device: torch.device
    ) -> None:
        """`device`: where the gradients are."""
        self._content = content
        self._layers = layers if content is Content.GRADIENTS else {n: _as_change(one) for n, one in layers.items()}
        self._transport = transport
        self._device = device
        self._plan: Plan | None = None
        self._has_warned = False
        self.memories = Memories()
        self.groups: list[Group] = []
        self.pauses = PauseWatch()

    def enter(self, plan: Plan) -> list[Group]:
        """Return the groups of `plan`, which is in force; those of the step before if they are the same.

        The last changes before ranks exchange gradients again are sent uncompressed, and what codecs have left of
        earlier ones with them: so nothing is left of them.
        """
        if self._plan is None or (plan.groups, self._is_last(plan)) != (self._plan.groups, self._is_last(self._plan)):
            planned = plan.groups
            if self._is_last(plan):
                planned = tuple(replace(group, option=DENSE) for group in planned)
            self.groups = [
                Group(index, group, self._layers, self._transport, self.memories, self._device)
                for index, group in enumerate(planned)
            ]
            self._warn_of_float64(plan)
        self._plan = plan
        return self.groups

    def clear(self) -> None:
        """Begin without groups and memory. Call it between steps."""
        self.memories = Memories()
        self._plan, self.groups = None, []

    def _is_last(self, plan: Plan) -> bool:
        return self._content is Content.CHANGES and plan.period == 1

    def _warn_of_float64(self, plan: Plan) -> None:
        """Once, on rank 0."""
        lossy = lossy_layers(plan, self._layers)
        if lossy and not self._has_warned and self._transport.rank == 0:
            self._has_warned = True
            logger.warning(LOSSY_FLOAT64, listed(lossy))


class Banks:
    """One bank for each content, so memory of gradients is never added to changes of parameters.

    last    the one that the step under way uses, or the last step
    result  of the last step, until its memory is settled
    """

    def __init__(
        self,
        layers: Mapping[str, Layer],
        transport: Transport,
        device: torch.device,
        judged_together: Callable[[], Iterable[frozenset[str]]],
    ) -> None:
        """Arguments are those of the engine."""
        self._layers = layers
        self._judged_together = judged_together
        self.result: StepResult | None = None
        self.gradients, self.changes = (Bank(content, layers, transport, device) for content in Content)
        self.last = self.gradients

    def settle(self) -> None:
        """Make the memory of the last step valid, except of layers whose averages have changed no weight.

        Not before the next step: until then it is not known which layers an optimizer has judged together.
        """
        result, self.result = self.result, None
        if result is not None:
            not_applied = result.not_applied(self._layers, self._judged_together())
            for group in self.last.groups:
                group.settle(not_applied)

    def state(self) -> dict[str, Any]:
        """Return all memory for a checkpoint, see `Engine.state`."""
        gradients, changes = self.gradients.memories, self.changes.memories
        return {"loss_scale": gradients.scale, "changes": changes.state(), **gradients.state()}

    def load(
        self,
        gradients: Mapping[str, Mapping[str, Tensor]],
        scale: float,
        changes: Mapping[str, Mapping[str, Tensor]] | None,
    ) -> None:
        """Replace all memory by copies. `scale`: loss scale of `gradients`."""
        self.result = None
        for bank in (self.gradients, self.changes):
            bank.clear()
        self.gradients.memories.load(gradients, scale)
        if changes is not None:
            self.changes.memories.load(changes)

    def take_residuals(self) -> dict[str, Tensor]:
        """Return what codecs have left of this rank's gradients, by layer and without a loss scale, and forget it."""
        memories = self.gradients.memories
        named = ((name, memories.residual(name)) for group in self.gradients.groups for name in group.plan.layers)
        found = {name: residual / memories.scale for name, residual in named if residual is not None}
        self.gradients.clear()
        return found


def _as_change(layer: Layer) -> Layer:
    """Return the layer of a parameter's change: in float32 at least, as its last bits add up over the rounds."""
    return layer if layer.dtype == "float64" else replace(layer, dtype="float32")
