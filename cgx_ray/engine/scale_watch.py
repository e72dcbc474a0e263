"""Notes the loss scale of each backward pass by wrapping GradScaler, since torch has no hook for scaling a loss."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from cgx_ray.torch_compat import backward_number, call_after_backward, copy_of_scale


class ScaleWatch:
    """Watches every GradScaler of this process from `start` on.

    Wraps `scale` and `update` of GradScaler and of its subclasses, including subclasses that are defined later. A
    scaled loss gets a hook, which notes the scale when a backward pass starts from that loss. So there may be any
    number of scalers, made at any time, that scale in any order. A pass without a scaled loss has scale 1.

    scales  loss scales noted so far in the current backward pass; numbers on the host, which a CUDA device may not have
            written yet
    """

    def __init__(self) -> None:
        self._scales: list[Tensor] = []
        self._pass_number = -1
        self._watched: weakref.WeakSet[type[GradScaler]] = weakref.WeakSet()
        # Scalers with a scaled loss that has been through a backward pass.
        self._used: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        self._bypassed: weakref.WeakSet[GradScaler] = weakref.WeakSet()

    def start(self) -> None:
        """Begin to watch. Further calls change nothing."""
        if GradScaler not in self._watched:
            self._watch(GradScaler)
            GradScaler.__init_subclass__ = classmethod(self._watch_new)  # type: ignore[assignment]

    @property
    def scales(self) -> tuple[Tensor, ...]:
        return tuple(self._scales)

    @property
    def is_bypassed(self) -> bool:
        """A GradScaler is updated, and none of its scaled losses went through backward: something else scales them."""
        return bool(self._bypassed)

    def _watch(self, cls: type[GradScaler]) -> None:
        if cls not in self._watched:
            self._watched.add(cls)
            for name, wrap in (("scale", self._noting_scale), ("update", self._noting_update)):
                if name in vars(cls):
                    setattr(cls, name, wrap(vars(cls)[name]))
        for subclass in cls.__subclasses__():
            self._watch(subclass)

    def _watch_new(self, cls: type[GradScaler], /, **kwargs: Any) -> None:
        super(GradScaler, cls).__init_subclass__(**kwargs)
        self._watch(cls)

    def _noting_scale(self, scale: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(scale)
        def wrapped(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            scaled = scale(scaler, *args, **kwargs)
            return self._hooked(scaler, scaled) if scaler.is_enabled() else scaled

        return wrapped

    def _hooked(self, scaler: GradScaler, scaled: Any) -> Any:
        if isinstance(scaled, list | tuple):
            for one in scaled:
                self._hooked(scaler, one)
        elif not isinstance(scaled, Tensor):
            # GradScaler scales the items of other iterables lazily, when they are read.
            return map(functools.partial(self._hooked, scaler), scaled)
        elif scaled.requires_grad:
            scale = copy_of_scale(scaler)
            scaled.register_hook(lambda _: self._note(scaler, scale))
        return scaled

    def _note(self, scaler: GradScaler, scale: Tensor) -> None:
        self._used.add(scaler)
        self._bypassed.discard(scaler)
        number = backward_number()
        if self._pass_number != number:
            self._pass_number, self._scales = number, []
            # Queued twice, so that it runs after FSDP2's own callback, which may still reduce gradients.
            call_after_backward(lambda: call_after_backward(self._forget))
        self._scales.append(scale)

    def _forget(self) -> None:
        self._pass_number, self._scales = -1, []

    def _noting_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(update)
        def wrapped(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            # `update` with a new scale may be called at any time. Without one, it follows a backward pass.
            has_new_scale = any(value is not None for value in (*args, *kwargs.values()))
            if not has_new_scale and scaler.is_enabled() and scaler not in self._used:
                self._bypassed.add(scaler)
            # A pass that raised has not forgotten its scales.
            self._forget()
            return update(scaler, *args, **kwargs)

        return wrapped


# One per process, since it changes a class of torch.
WATCH = ScaleWatch()
