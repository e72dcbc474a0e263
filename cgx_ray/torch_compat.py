"""Private names of torch, and the one place that changes a class of torch's: it has no hook where a loss is scaled."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.autograd import Variable

_watched: weakref.WeakSet[type[GradScaler]] = weakref.WeakSet()
# The backward pass under way that began with scaled losses, by autograd's number, and their scales.
_pass: tuple[int, list[Tensor]] = (-1, [])
# Scalers of which a scaled loss has been through a backward pass.
_used: weakref.WeakSet[GradScaler] = weakref.WeakSet()
# Whether a scaler was updated of which none has.
_bypassed = False


def watch_loss_scales() -> None:
    """Make `loss_scales` work from now on in this process. Calling it again changes nothing.

    Wraps `scale` and `update` of GradScaler and of its subclasses, those defined later as well. A scaled loss gets a
    hook, which notes the scale when a backward pass begins with that loss. So it does not matter how many scalers there
    are, when they were made, and in which order they scale; and a pass that is not scaled is known to have scale 1.
    """
    if GradScaler not in _watched:
        _watch(GradScaler)
        GradScaler.__init_subclass__ = classmethod(_watch_new)  # type: ignore[assignment]


def loss_scales() -> tuple[Tensor, ...]:
    """Scales of the losses that the backward pass under way began with, as far as it has come; none if not scaled.

    Each is a number on the host, there once the device has done what it was given before: nothing waits for it.
    """
    return tuple(_pass[1])


def is_scaler_bypassed() -> bool:
    """Whether a GradScaler is updated of which no loss has been through a backward pass: something else scales."""
    return _bypassed


def scale_of(scaler: GradScaler) -> Tensor:
    """The scale in force, 1 if disabled, as one of `loss_scales`."""
    scale = scaler._get_scale_async() if scaler.is_enabled() else None
    # A copy: `update` changes it in place.
    return torch.tensor(scaler.get_scale()) if scale is None else scale.to("cpu", non_blocking=True, copy=True)


def _watch(cls: type[GradScaler]) -> None:
    if cls not in _watched:
        _watched.add(cls)
        for name, wrap in (("scale", _noting_scale), ("update", _noting_update)):
            if name in vars(cls):
                setattr(cls, name, wrap(vars(cls)[name]))
    for subclass in cls.__subclasses__():
        _watch(subclass)


def _watch_new(cls: type[GradScaler], /, **kwargs: Any) -> None:
    super(GradScaler, cls).__init_subclass__(**kwargs)
    _watch(cls)


def _noting_scale(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def wrapped(self: GradScaler, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        return _hooked(self, scaled) if self.is_enabled() else scaled

    return wrapped


def _hooked(scaler: GradScaler, scaled: Any) -> Any:
    if isinstance(scaled, list | tuple):
        for one in scaled:
            _hooked(scaler, one)
    elif not isinstance(scaled, Tensor):
        # Other iterables are scaled as they are read.
        return map(functools.partial(_hooked, scaler), scaled)
    elif scaled.requires_grad:
        scale = scale_of(scaler)
        scaled.register_hook(lambda _: _note(scaler, scale))
    return scaled


def _note(scaler: GradScaler, scale: Tensor) -> None:
    global _pass  # noqa: PLW0603 - one backward pass at a time, on whatever thread autograd runs it
    _used.add(scaler)
    number = torch._C._current_graph_task_id()
    if _pass[0] != number:
        _pass = number, []
        # Twice, so that it comes after FSDP2's own, which may reduce as well.
        queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
        queue(lambda: queue(_forget))
    _pass[1].append(scale)


def _forget() -> None:
    global _pass  # noqa: PLW0603
    _pass = -1, []


def _noting_update(update: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(update)
    def wrapped(self: GradScaler, new_scale: float | Tensor | None = None) -> Any:
        global _bypassed  # noqa: PLW0603
        # A scale may be set at any time; without one, `update` has seen gradients.
        _bypassed = _bypassed or (new_scale is None and self.is_enabled() and self not in _used)
        return update(self, new_scale)

    return wrapped
