"""The optimizers of a model while its ranks train alone: found as they step, with a learning rate for one rank."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from cgx_ray.engine.loss_scale import holds, parameters_of

logger = logging.getLogger(__name__)


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
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        # By optimizer under way, its groups' own settings.
        self._own: weakref.WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = weakref.WeakKeyDictionary()
        self._has_warned = False
        self.rho = 1.0
        # By parameter, the sum of the learning rates of its steps since `begin_round`.
        self._rates: dict[int, float] = {}
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

    def begin_round(self) -> None:
        """Forget the learning rates of earlier steps."""
        self._rates = {}

    def rates(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return, by name, the sum of the learning rates of the steps in this round."""
        known = {name: self._rates[id(one)] for name, one in parameters.items() if id(one) in self._rates}
        return {name: torch.tensor(rate, dtype=torch.float64, device="cpu") for name, rate in known.items()}

    def load_rates(self, rates: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
        """Continue a round."""
        self._rates = {id(parameters[name]): float(rate) for name, rate in rates.items()}

    def follow(self, parameter: nn.Parameter, moved: Tensor) -> None:
        """Correct the first moment of a parameter that an average has moved, so that it is the ranks' mean as well.

        moved  what was added to the parameter

        Steps of a round are the sum of learning rate times direction, so what ranks differ by in their mean direction
        is known from the parameters. Adam's direction is its first moment over the root of the second, which each rank
        keeps. So nothing is sent for it, and nothing explodes where a second moment is zero.
        """
        rate = self._rates.get(id(parameter), 0.0)
        if rate == 0:
            return
        for optimizer in self._known:
            state = optimizer.state.get(parameter)
            if state:
                _add_direction(optimizer, parameter, state, -moved / rate)

    def _before(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not holds(optimizer, self._keys):
            return
        # Of a step that has raised.
        self._restore(optimizer)
        self._known.add(optimizer)
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
        for group, kept in zip(optimizer.param_groups, self._own[optimizer], strict=True):
            sign = -1.0 if group.get("maximize") else 1.0
            for parameter in group["params"] if "lr" in kept else ():
                key = id(parameter)
                self._rates[key] = self._rates.get(key, 0.0) + sign * float(group["lr"])
        self._restore(optimizer)
        self._stepped.update(self._keys.intersection(parameters_of(optimizer)))
        if not (_is_known(optimizer) or self._has_warned):
            self._has_warned = True
            logger.warning(
                "%s is not known here: ranks average its parameters every few steps, and not its moments; Adam, AdamW, "
                "SGD and optimizers that keep their state by the same names have both",
                type(optimizer).__name__,
            )
        self._on_step()

    def _restore(self, optimizer: Optimizer) -> None:
        for group, kept in zip(optimizer.param_groups, self._own.pop(optimizer, []), strict=False):
            group.update(kept)


def _is_known(optimizer: Optimizer) -> bool:
    """Return True if the optimizer keeps no moment, or one that `LocalOptimizers.follow` can correct."""
    first: dict[str, Any] = next((state for state in optimizer.state.values() if state), {})
    tensors = {name for name, value in first.items() if isinstance(value, Tensor) and value.numel() > 1}
    return tensors <= {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}


def _add_direction(optimizer: Optimizer, parameter: nn.Parameter, state: dict[str, Any], added: Tensor) -> None:
    """Add to the direction in which the moments of `parameter` lead."""
    group = next(one for one in optimizer.param_groups if any(parameter is other for other in one["params"]))
    if "exp_avg" in state and "exp_avg_sq" in state:
        num_steps, (beta1, beta2) = float(state["step"]), group["betas"]
        second = state.get("max_exp_avg_sq", state["exp_avg_sq"])
        root = (second.to(added.dtype) / (1 - beta2**num_steps)).sqrt_().add_(group["eps"])
        state["exp_avg"].add_((added * root * (1 - beta1**num_steps)).to(state["exp_avg"].dtype))
    elif isinstance(momentum := state.get("momentum_buffer"), Tensor):
        momentum.add_(added.to(momentum.dtype))
