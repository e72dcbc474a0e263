"""Float32 memory for one piece of a 16-bit gradient at a time, so that no float32 copy of the whole is needed."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.values_N = torch.empty(0, dtype=torch.float32, device="cpu")


_ROOM = _OfThread()


def float32_room(numel: int) -> Tensor:
    """Return (numel,) float32 memory on the host. The next call on this thread returns the same memory.

    New memory for every piece would cost as much as the conversion: the system clears its pages first.
    """
    if numel > _ROOM.values_N.numel():
        _ROOM.values_N = torch.empty(numel, dtype=torch.float32, device="cpu")
    return _ROOM.values_N[:numel]


def in_float32(grad_N: Tensor) -> Tensor:
    """Return `grad_N` itself if it is float32, else its values in `float32_room`."""
    return grad_N if grad_N.dtype == torch.float32 else float32_room(grad_N.numel()).copy_(grad_N)
