"""Checks of arguments, and of where a call runs, for `ops` and `sparse`."""

from __future__ import annotations

import os

import torch
from torch import Tensor

try:
    from . import _native
except ImportError as error:
    raise ImportError(
        f"{os.path.dirname(__file__)}/_native is missing or does not load; build it: pip install -e . "
        "--no-build-isolation (needs a C++20 compiler); or, if this is no installed folder, run Python outside of it"
    ) from error

native = _native
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def runs_on_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda


def is_contiguous(*tensors: Tensor | None) -> bool:
    return all(tensor is None or tensor.is_contiguous() for tensor in tensors)


def as_float32(grad_N: Tensor) -> Tensor:
    # Most gradients are float32, and three calls of torch take longer than some kernels.
    if grad_N.dtype == torch.float32 and grad_N.is_contiguous() and not grad_N.requires_grad:
        return grad_N
    return grad_N.detach().to(torch.float32).contiguous()


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def check_gradient(grad_N: Tensor, residual_N: Tensor | None, next_N: Tensor | None) -> None:
    check_tensor("grad_N", grad_N, *FLOATS)
    for name, tensor in (("residual_N", residual_N), ("next_N", next_N)):
        if tensor is not None:
            check_sized(name, tensor, torch.float32, grad_N.numel(), grad_N.device)


def check_tensor(name: str, tensor: Tensor, *dtypes: torch.dtype, device: torch.device | None = None) -> None:
    """Check dtype, shape and device. `device` is that of a tensor checked before; None for the first tensor."""
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}; give {' or '.join(map(str, dtypes))}")
    if tensor.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; give a 1-D tensor, view(-1) flattens")
    if device is None:
        if not (tensor.is_cpu or tensor.is_cuda):
            raise ValueError(f"{name} is on {tensor.device}; there are kernels for cpu and cuda")
    elif tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, other tensors are on {device}; move them to one device")


def check_sized(name: str, tensor: Tensor, dtype: torch.dtype, numel: int, device: torch.device) -> None:
    check_tensor(name, tensor, dtype, device=device)
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements; give {numel}")


def check_integer(name: str, number: int) -> None:
    if not isinstance(number, int):
        raise TypeError(f"{name} is {number!r}; give an integer")


def check_key(name: str, key: int) -> None:
    check_integer(name, key)
    if not 0 <= key < 1 << 32:
        raise ValueError(f"{name} {key} is not a 32-bit number; give 0 to 2**32 - 1")
