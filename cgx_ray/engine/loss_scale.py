"""The loss scale of a backward pass. Gradients, and the codecs' memory, are multiplied by it."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from cgx_ray.errors import CGXError, ConfigError
from cgx_ray.torch_compat import backward_number, call_after_backward, copy_of_scale

# Loss scales on their way to an engine: numbers on the host, which a CUDA device may not have written yet. None if
# unknown.
Scales = tuple[Tensor, ...] | None


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


class Scaler(Protocol):
    """A GradScaler, or another object that scales losses."""

    def get_scale(self) -> float: ...


class LossScale:
    """Finds the scale of a model's backward pass under way, and which of its layers an optimizer skips together.

    The hooks of a model call `now` on the thread that runs backward, so the scaler cannot be updated meanwhile.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], scaler: Scaler | None = None) -> None:
        """
        parameters  those of the model, by layer
        scaler      the one to ask; None: find out which GradScaler has scaled the losses of each pass

        Raises ConfigError if `scaler` has no method `get_scale`.
        """
        if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
            raise ConfigError(
                f"scaler {scaler!r} is not allowed; give a torch.amp.GradScaler, an object with a method get_scale() "
                "that returns a number, or None to let cgx_ray watch the GradScalers of this process"
            )
        self._scaler = scaler
        self._layers = {id(parameter): name for name, parameter in parameters.items()}
        self._num_judged = 0
        self._judges: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        WATCH.start()

    def now(self) -> Scales:
        """Return the scales of the backward pass under way; empty if no loss is scaled, None if it cannot be known."""
        if isinstance(self._scaler, GradScaler):
            return (copy_of_scale(self._scaler),) if self._scaler.is_enabled() else ()
        if self._scaler is not None:
            return (torch.tensor(float(self._scaler.get_scale()), dtype=torch.float64, device="cpu"),)
        scales = WATCH.scales
        return None if not scales and WATCH.is_bypassed(self._layers) else scales

    def judged_together(self) -> Iterator[frozenset[str]]:
        """Return the layers of each optimizer that a GradScaler has judged since the last call.

        NaN or Inf in one of them skips all of them. Where none was judged since, as between passes that accumulate, it
        is those of the call before.
        """
        judged = WATCH.judged_after(self._num_judged)
        self._num_judged = max(judged.values(), default=self._num_judged)
        # Others may be those of another model, in another thread.
        if own := [optimizer for optimizer in judged if holds(optimizer, self._layers)]:
            self._judges = weakref.WeakSet(own)
        return (
            frozenset(self._layers[key] for key in parameters_of(optimizer) if key in self._layers)
            for optimizer in self._judges
        )


def one_scale(scales: Scales, known: float | None = None, where: str = "") -> float:
    """Return the scale that all gradients of a step share; 1 if `scales` is empty.

    known  scale of earlier gradients of this step
    where  beginning of an error message

    Raises CGXError if the gradients have several scales, or one that is unknown, not positive or not finite.
    """
    if scales is None:
        raise _unknown(where, "a GradScaler is updated whose scale() was not used on the loss")
    found = sorted(({float(scale) for scale in scales} or {1.0}) | ({known} if known is not None else set()))
    if len(found) > 1:
        listed = " and ".join(f"{scale:g}" for scale in found)
        raise _unknown(where, f"gradients of one step have loss scales {listed}")
    if not 0 < found[0] < math.inf:
        raise _unknown(where, f"the loss scale is {found[0]:g}")
    return found[0]


def _unknown(where: str, why: str) -> CGXError:
    return CGXError(
        f"{where}{why}, so the codec's residuals cannot be converted to the scale of the gradients; scale all losses "
        "of a backward pass with one GradScaler, give attach(..., scaler=) the object that scales them, or choose a "
        "codec without memory, such as qsgd"
    )
