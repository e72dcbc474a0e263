"""The optimizers of a model while its ranks train alone: found as they step, with a learning rate for one rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from cgx_ray.engine.loss_scale import holds, parameters_of

# Of Adam and its kin, and of SGD.
_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")
# Of groups, which rho changes for a step.
_SETTINGS = ("lr", "weight_decay")


class _Group:
    """A group of an optimizer under way: `parts` take its place, one for each rho."""

    def __init__(self, group: dict[str, Any], params_of: Mapping[float, list[nn.Parameter]]) -> None:
        """`params_of`: by rho; empty for a group that is not to be changed."""
        self._group, self._kept, self.parts = group, dict[str, Any](), [group]
        if not isinstance(group.get("lr"), float | int | Tensor) or params_of.keys() <= {1.0}:
            return
        self._kept = {name: group[name] for name in _SETTINGS if name in group}
        if len(params_of) == 1:
            # In place, as wrappers may share it.
            group.update(self._times(*params_of))
        else:
            self.parts = [{**group, **self._times(rho), "params": params} for rho, params in params_of.items()]

    def _times(self, rho: float) -> dict[str, Any]:
        times = {"lr": 1 / rho, "weight_decay": rho}
        return {name: value * times[name] for name, value in self._kept.items()}

    def restored(self) -> dict[str, Any]:
        """Return the group with the user's settings, and with what the step has written into it."""
        self._group.update({name: value for name, value in self.parts[0].items() if name != "params"} | self._kept)
        return self._group


class LocalOptimizers:
    """Follows all optimizers of this process that hold parameters of the model, whenever they were made.

    A step takes the learning rate over rho and the weight decay times rho; afterwards they are the user's again. Then
    gradients times rho lead as far as the ranks' mean gradient would, for optimizers that divide by the size of the
    gradients (Adam and its kin) as for others. Decay stays the same, whether it is decoupled or a part of the gradient.
    A group whose layers differ in rho is several groups for the step.

    First moments are sums of gradients, so they are multiplied as gradients are: when rho changes, by the ratio.

    rho          by layer, see `engine.period.rho`
    has_stepped  True once an optimizer has stepped, also one that is gone by now
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        on_step: Callable[[], None],
        *,
        on_first: Callable[[Mapping[str, Sequence[Optimizer]]], None] | None = None,
        moments_rho: Mapping[str, float] | None = None,
    ) -> None:
        """
        on_step      called after each step of an optimizer of these parameters
        on_first     called before the first step of each, once its moments are scaled: its layers, each with it
        moments_rho  what first moments are multiplied with already, as in `moments_rho`; None: 1
        """
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._keys = self._names.keys()
        self._on_step, self._on_first = on_step, on_first
        # By layer, the optimizer that has stepped it last, after those that it calls within its step; and such ones of
        # the step under way.
        self._stepped_by: dict[str, list[weakref.ref[Optimizer]]] = {}
        self._called: list[weakref.ref[Optimizer]] = []
        self.has_stepped = False
        # By optimizer under way, its groups.
        self._own: weakref.WeakKeyDictionary[Optimizer, list[_Group]] = weakref.WeakKeyDictionary()
        self._ones = dict.fromkeys(parameters, 1.0)
        self.rho: Mapping[str, float] = self._ones
        # What first moments are multiplied with, by optimizer; and those of optimizers that have not stepped yet.
        self._first_rho = moments_rho or self._ones
        self._rho_of: weakref.WeakKeyDictionary[Optimizer, Mapping[str, float]] = weakref.WeakKeyDictionary()
        # Parameters that have stepped since the last gradients, and between the gradients before.
        self._stepped: set[int] = set()
        self._expected: set[int] = set()
        # Dynamo, which a compiled step would have look into them, cannot.
        before, after = map(torch.compiler.disable, (self._before, self._after))
        self._hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def close(self, *, keeps_moments: bool = False) -> None:
        """Stop following. First moments are as without rho then, unless `keeps_moments`."""
        for hook in self._hooks:
            hook.remove()
        for optimizer in list(self._own):
            self._restore(optimizer)
        if keeps_moments:
            return
        self.rho = self._ones
        for optimizer in list(self._rho_of):
            self._scale_moments(optimizer)

    @property
    def moments_rho(self) -> Mapping[str, float]:
        """Return what first moments are multiplied with, by layer."""
        return next(iter(self._rho_of.values()), self._first_rho)

    @property
    def of_layers(self) -> dict[str, list[Optimizer]]:
        """Return by layer the optimizers that have stepped it last, as far as there still are."""
        found = {name: [known() for known in those] for name, those in self._stepped_by.items()}
        return {name: [one for one in those if one is not None] for name, those in found.items()}

    @property
    def have_any_stepped(self) -> bool:
        """True if an optimizer has stepped, and so had its moments scaled."""
        return bool(self._rho_of)

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
        is_first = optimizer not in self._rho_of
        self._scale_moments(optimizer)
        if is_first:
            names = [self._names[key] for key in self._held_by(optimizer)]
            # In a step with a closure, training may ask for it before the step's end.
            self._stepped_by = {name: [weakref.ref(optimizer)] for name in names} | self._stepped_by
            if self._on_first is not None:
                self._on_first({name: [optimizer] for name in names})
        # Wrappers share the groups of the optimizer that they call, and so call it within their own step.
        under_way = {id(group) for other in self._own for group in other.param_groups}
        own = [_Group(one, {} if id(one) in under_way else self._by_rho(one)) for one in optimizer.param_groups]
        optimizer.param_groups[:] = [part for group in own for part in group.parts]
        self._own[optimizer] = own

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        held = self._held_by(optimizer)
        if not held:
            return
        # Also in the step within whose closure the rounds began.
        self.has_stepped = True
        is_known = optimizer in self._own
        self._restore(optimizer)
        self._called.append(weakref.ref(optimizer))
        if not self._own:
            # Wrappers end after the optimizers that they call.
            self._stepped_by.update(dict.fromkeys((self._names[key] for key in held), self._called))
            self._called = []
        if not is_known:
            return
        self._stepped.update(held)
        self._on_step()

    def _by_rho(self, group: Mapping[str, Any]) -> dict[float, list[nn.Parameter]]:
        """Return the parameters of a group by rho. Those of other models have 1."""
        found: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            name = self._names.get(id(parameter))
            found.setdefault(self.rho[name] if name is not None else 1.0, []).append(parameter)
        return found

    def _held_by(self, optimizer: Optimizer) -> set[int]:
        return self._keys & set(parameters_of(optimizer))

    def _scale_moments(self, optimizer: Optimizer) -> None:
        """Let first moments be those of gradients times `rho`."""
        before = self._rho_of.get(optimizer, self._first_rho)
        self._rho_of[optimizer] = self.rho
        if before == self.rho:
            return
        with torch.no_grad():
            for parameter, state in optimizer.state.items():
                layer = self._names.get(id(parameter))
                if layer is None or self.rho[layer] == before[layer]:
                    continue
                for name in _FIRST_MOMENTS:
                    if isinstance(moment := state.get(name), Tensor):
                        moment.mul_(self.rho[layer] / before[layer])

    def _restore(self, optimizer: Optimizer) -> None:
        own = self._own.pop(optimizer, [])
        num_parts = sum(len(group.parts) for group in own)
        # Some may have been added since.
        optimizer.param_groups[:num_parts] = [group.restored() for group in own]
