"""Notes the loss scale of each backward pass by wrapping GradScaler, since torch has no hook for scaling a loss."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from cgx_ray.torch_compat import backward_number, call_after_backward, copy_of_scale


@dataclass(slots=True)
class _Pass:
    """A backward pass that began with a scaled loss on `thread`."""

    thread: int
    scales: list[Tensor] = field(default_factory=list)
    scalers: weakref.WeakSet[GradScaler] = field(default_factory=weakref.WeakSet)


class ScaleWatch:
    """Watches every GradScaler of this process from `start` on. Threads may train models of their own.

    Wraps methods of GradScaler and of its subclasses, including subclasses that are defined later. A scaled loss gets a
    hook, which notes the scale when a backward pass starts from that loss. So there may be any number of scalers, made
    at any time, that scale in any order. A pass without a scaled loss has scale 1.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By autograd's number, until the pass ends.
        self._passes: dict[int, _Pass] = {}
        self._watched: weakref.WeakSet[type[GradScaler]] = weakref.WeakSet()
        # Scalers with a scaled loss that has been through a backward pass.
        self._used: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        self._bypassed: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        # Optimizers whose gradients each scaler has judged.
        self._optimizers: weakref.WeakKeyDictionary[GradScaler, weakref.WeakSet[Optimizer]] = (
            weakref.WeakKeyDictionary()
        )
        # Number of the newest judgement of each.
        self._judged: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._num_judged = 0

    def start(self) -> None:
        """Begin to watch. Further calls change nothing."""
        if GradScaler not in self._watched:
            self._watch(GradScaler)
            GradScaler.__init_subclass__ = classmethod(self._watch_new)  # type: ignore[assignment]

    @property
    def scales(self) -> tuple[Tensor, ...]:
        """Scales noted so far in the backward pass under way; numbers on the host that a GPU may not have written yet.

        A pass inside another one, such as that of a checkpointed module, has the scales of the outer one.
        """
        with self._lock:
            own = self._passes.get(backward_number())
            on_thread = [one for one in self._passes.values() if one.thread == threading.get_ident()]
            found = [own] if own is not None else on_thread
            return tuple(scale for one in found for scale in one.scales)

    def is_bypassed(self, parameters: Container[int]) -> bool:
        """Return True if something other than its `scale` scales the losses of a GradScaler that is updated.

        parameters  by `id`; scalers that have judged other parameters only do not count
        """
        with self._lock:
            return any(
                not (optimizers := self._optimizers.get(scaler)) or any(holds(one, parameters) for one in optimizers)
                for scaler in self._bypassed
            )

    def judged_after(self, number: int) -> dict[Optimizer, int]:
        """Return the optimizers whose gradients a GradScaler has judged since judgement `number`, with the newest one.

        It skips a step for all parameters of an optimizer.
        """
        with self._lock:
            return {one: newest for one, newest in self._judged.items() if newest > number}

    def _watch(self, cls: type[GradScaler]) -> None:
        if cls not in self._watched:
            self._watched.add(cls)
            wraps = {
                "scale": self._noting_scale,
                "unscale_": self._noting_optimizer,
                "step": self._noting_optimizer,
                "update": self._noting_update,
            }
            for name, wrap in wraps.items():
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
        number = backward_number()
        with self._lock:
            self._used.add(scaler)
            self._bypassed.discard(scaler)
            if number not in self._passes:
                self._passes[number] = _Pass(threading.get_ident())
                # Queued twice, so that it runs after FSDP2's own callback, which may still reduce gradients.
                call_after_backward(lambda: call_after_backward(lambda: self._forget(number)))
            self._passes[number].scales.append(scale)
            self._passes[number].scalers.add(scaler)

    def _forget(self, number: int) -> None:
        with self._lock:
            self._passes.pop(number, None)

    def _noting_optimizer(self, judge: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(judge)
        def wrapped(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            with self._lock:
                for given in (*args, *kwargs.values()):
                    if isinstance(given, Optimizer):
                        self._optimizers.setdefault(scaler, weakref.WeakSet()).add(given)
                        self._num_judged += 1
                        self._judged[given] = self._num_judged
            return judge(scaler, *args, **kwargs)

        return wrapped

    def _noting_update(self, update: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(update)
        def wrapped(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            # `update` with a new scale may be called at any time. Without one, it follows a backward pass.
            has_new_scale = any(value is not None for value in (*args, *kwargs.values()))
            with self._lock:
                if not has_new_scale and scaler.is_enabled() and scaler not in self._used:
                    self._bypassed.add(scaler)
                # A pass that raised has not forgotten its scales.
                self._passes = {number: one for number, one in self._passes.items() if scaler not in one.scalers}
            return update(scaler, *args, **kwargs)

        return wrapped


def parameters_of(optimizer: Optimizer) -> Iterator[int]:
    """Yield the parameters of `optimizer`, by `id`."""
    return (id(parameter) for group in optimizer.param_groups for parameter in group["params"])


def holds(optimizer: Optimizer, parameters: Container[int]) -> bool:
    """Return True if one of the `parameters`, by `id`, is of `optimizer`."""
    return any(key in parameters for key in parameters_of(optimizer))


# One per process, since it changes a class of torch.
WATCH = ScaleWatch()
