"""The optimizers of a model while its ranks train alone: found as they step, with a learning rate for one rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from cgx_ray.engine.loss_scale import holds, parameters_of

# Of Adam and its kin, and of SGD.
_FIRST_MOMENTS = ("exp_avg", "momentum_buffer")


class _Groups:
    """The groups of an optimizer under way, with learning rates for one rank.

    One whose layers differ in rho is replaced by several. After a step that has raised, `restore` is called as soon as
    somebody reads or loads the optimizer's state.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params_of: Sequence[Mapping[float, list[nn.Parameter]]],
        restore: Callable[[Optimizer], None],
    ) -> None:
        """`params_of`: of each group by rho; empty for one that is not to be changed."""
        self._groups, self._kept = list(optimizer.param_groups), list[dict[str, Any]]()
        parts: list[dict[str, Any]] = []
        for group, by_rho in zip(self._groups, params_of, strict=True):
            is_changed = isinstance(group.get("lr"), float | int | Tensor) and not by_rho.keys() <= {1.0}
            kept: dict[str, Any] = {n: group[n] for n in ("lr", "weight_decay") if is_changed and n in group}
            self._kept.append(kept)
            if is_changed and len(by_rho) > 1:
                parts += [{**group, **_times(kept, rho), "params": params} for rho, params in by_rho.items()]
                continue
            if is_changed:
                # In place, as wrappers may share it.
                group.update(_times(kept, *by_rho))
            parts.append(group)
        self._num_parts, self._hooks = len(parts), list[RemovableHandle]()
        if len(parts) > len(self._groups):
            optimizer.param_groups[:] = parts
            self._hooks = [
                optimizer.register_state_dict_pre_hook(restore),
                optimizer.register_load_state_dict_pre_hook(lambda optimizer, _: restore(optimizer)),
            ]

    def restore(self, optimizer: Optimizer) -> None:
        """Give the optimizer the user's groups."""
        for hook in self._hooks:
            hook.remove()
        for group, kept in zip(self._groups, self._kept, strict=True):
            group.update(kept)
        if self._hooks:
            # Some may have been added since.
            optimizer.param_groups[: self._num_parts] = self._groups


def _times(kept: Mapping[str, Any], rho: float) -> dict[str, Any]:
    """Return the learning rate over `rho`, and the weight decay times it."""
    return {name: value / rho if name == "lr" else value * rho for name, value in kept.items()}


class LocalOptimizers:
    """Follows all optimizers of this process that hold parameters of the model, whenever they were made.

    A step takes the learning rate over rho and the weight decay times rho; afterwards they are the user's again. Then
    gradients times rho lead as far as the ranks' mean gradient would, for optimizers that divide by the size of the
    gradients (Adam and its kin) as for others. Decay stays the same, whether it is decoupled or a part of the gradient.
    A group whose layers differ in rho is several groups for the step; not every optimizer bears that (`may_differ`).

    First moments are sums of gradients, so they are multiplied as gradients are: when rho changes, by the ratio.

    rho          by layer, see `engine.period.rho`
    may_differ   True if optimizers have stepped, and all were torch's own that take any groups: rho may differ by layer
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
        self.has_stepped = self.may_differ = False
        # By optimizer under way, its groups.
        self._own: weakref.WeakKeyDictionary[Optimizer, _Groups] = weakref.WeakKeyDictionary()
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
        takes_any = _takes_any_groups(optimizer)
        self.may_differ = takes_any and (self.may_differ or not self._rho_of)
        self._scale_moments(optimizer)
        if is_first:
            names = [self._names[key] for key in self._held_by(optimizer)]
            # In a step with a closure, training may ask for it before the step's end.
            self._stepped_by = {name: [weakref.ref(optimizer)] for name in names} | self._stepped_by
            if self._on_first is not None:
                self._on_first({name: [optimizer] for name in names})
        # Wrappers share the groups of the optimizer that they call, and so call it within their own step.
        under_way = {id(group) for other in self._own for group in other.param_groups}
        by_rho = [
            {} if id(one) in under_way else self._by_rho(one, takes_any=takes_any) for one in optimizer.param_groups
        ]
        self._own[optimizer] = _Groups(optimizer, by_rho, self._restore)

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

    def _by_rho(self, group: Mapping[str, Any], *, takes_any: bool) -> dict[float, list[nn.Parameter]]:
        """Return the parameters of a group by rho. Those of other models have 1. `takes_any`: groups may be split."""
        found: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            name = self._names.get(id(parameter))
            found.setdefault(self.rho[name] if name is not None else 1.0, []).append(parameter)
        if len(found) > 1 and not takes_any:
            # One that has taken the place of another: for a round.
            return {max(found): group["params"]}
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
        if (own := self._own.pop(optimizer, None)) is not None:
            own.restore(optimizer)


def _takes_any_groups(optimizer: Optimizer) -> bool:
    """Return False for LBFGS, which takes one group, and others than torch's: some compare groups, or count in them."""
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, torch.optim.LBFGS)
