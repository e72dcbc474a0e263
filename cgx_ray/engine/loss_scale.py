"""The loss scale of a backward pass. Gradients, and the codecs' memory, are multiplied by it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from cgx_ray.engine.scale_watch import WATCH, holds, parameters_of
from cgx_ray.errors import CGXError, ConfigError
from cgx_ray.torch_compat import copy_of_scale

# Loss scales on their way to an engine: numbers on the host, which a CUDA device may not have written yet. None if
# unknown.
Scales = tuple[Tensor, ...] | None


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
            return (copy_of_scale(self._scaler),)
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
