"""Loss and learning rate as the training reports them, for the samples of steps."""

from __future__ import annotations

import math
import threading
from numbers import Real
from typing import NamedTuple, SupportsFloat

import numpy as np
import torch
from torch import Tensor

from cgx_ray.errors import ConfigError


class _Reported(NamedTuple):
    """A number. On a CUDA device it is there after `is_copied`."""

    value_host: float | Tensor
    is_copied: torch.cuda.Event | None = None

    def read(self) -> float | None:
        """Return the number if it is finite and there."""
        if self.is_copied is not None and not self.is_copied.query():
            return None
        number = float(self.value_host)
        return number if math.isfinite(number) else None


class ObservedTraining:
    """The newest loss and learning rate. The training thread adds them, the engine's thread takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[str, _Reported] = {}

    def add(self, *, loss: SupportsFloat | None, lr: SupportsFloat | None) -> None:
        """Replace what was reported before; None reports nothing. Never waits for a device.

        Raises ConfigError for what is no single number.
        """
        given = {"loss": loss, "lr": lr}
        reported = {name: _reported(name, value) for name, value in given.items() if value is not None}
        with self._lock:
            self._newest |= reported

    def take(self) -> tuple[float | None, float | None]:
        """Return loss and learning rate that were reported since the last call.

        None for what was not reported, is not finite, or is still on its way from a device; a learning rate that is not
        positive counts as not reported.
        """
        with self._lock:
            newest, self._newest = self._newest, {}
        loss, lr = (newest[name].read() if name in newest else None for name in ("loss", "lr"))
        return loss, lr if lr is not None and lr > 0 else None


def _reported(name: str, value: SupportsFloat) -> _Reported:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        value_1 = value.detach().reshape(1)
        if value_1.device.type != "cuda":
            return _Reported(float(value_1))
        # The engine's thread must not wait for the training's stream, so the copy begins here, behind the loss.
        host_1 = torch.empty(1, dtype=value_1.dtype, device="cpu", pin_memory=True)
        host_1.copy_(value_1, non_blocking=True)
        is_copied = torch.cuda.Event()
        is_copied.record()
        return _Reported(host_1, is_copied)
    if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "biuf":
        return _Reported(float(value.item()))
    if isinstance(value, Real):
        return _Reported(float(value))
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r}"
    raise ConfigError(f"observe got {what} as {name}; give a real number, or a tensor or array with one")
