"""The optimizers of a model while its ranks train alone: found as they step, with a learning rate for one rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from cgx_ray.engine.loss_scale import holds, parameters_of


class LocalOptimizers:
    """Follows all optimizers of this process that hold parameters of the model, whenever they were made.

    A step takes the learning rate over rho and the weight decay times rho; afterwards they are the user's again. Then
    gradients times rho lead as far as the ranks' mean gradient would, for optimizers that divide by the size of the
    gradients (Adam and its kin) as for others. Decay stays the same, whether it is decoupled or a part of the gradient.

    rho  see `engine.period.rho`
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], on_step: Callable[[], None]) -> None:
        """`on_step`: called after each step of an optimizer of these parameters."""
        self._keys = {id(parameter) for parameter in parameters.values()}
        self._on_step = on_step
        # By optimizer under way, its groups' own settings.
        self._own: weakref.WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = weakref.WeakKeyDictionary()
        self.rho = 1.0
        # Parameters that have stepped since the last gradients, and between the gradients before.
        self._stepped: set[int] = set()
        self._expected: set[int] = set()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def close(self) -> None:
        """Stop following."""
        for hook in self._hooks:
            hook.remove()
        for optimizer in list(self._own):
            self._restore(optimizer)

    def note_gradients(self) -> None:
        """Note that the gradients of a step are there."""
        self._expected, self._stepped = self._stepped, set()

    @property
    def have_all_stepped(self) -> bool:
        """True if all parameters that stepped after the gradients before have stepped after the last ones."""
        return bool(self._expected) and self._expected <= self._stepped

    def _before(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not holds(optimizer, self._keys):
            return
        # Of a step that has raised.
        self._restore(optimizer)
        own: list[dict[str, Any]] = []
        for group in optimizer.param_groups:
            is_own = any(id(parameter) in self._keys for parameter in group["params"])
            kept: dict[str, Any] = {n: group[n] for n in ("lr", "weight_decay") if is_own and n in group}
            own.append(kept)
            if "lr" in kept and self.rho != 1:
                group["lr"] = kept["lr"] / self.rho
                if "weight_decay" in kept:
                    group["weight_decay"] = kept["weight_decay"] * self.rho
        self._own[optimizer] = own

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if optimizer not in self._own:
            return
        self._restore(optimizer)
        self._stepped.update(self._keys.intersection(parameters_of(optimizer)))
        self._on_step()

    def _restore(self, optimizer: Optimizer) -> None:
        for group, kept in zip(optimizer.param_groups, self._own.pop(optimizer, []), strict=False):
            group.update(kept)
