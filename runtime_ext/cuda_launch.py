"""Launch the CUDA kernels on torch's current stream.

A kernel's name starts with the name of its source: `qsgd_decode` is in csrc/cuda/qsgd.cu. `build` compiles a source for
a device and loads its kernels, or else the first launch does.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import cuda_compile


def launch(
    kernel: str,
    num_blocks: int,
    block_size: int,
    *args: Tensor | np.generic | npt.NDArray[np.void] | None,
    define: str | None = None,
) -> None:
    """Start `kernel` on torch's current stream; `define` (NAME=VALUE) is a macro that its source is compiled with.

    A contiguous tensor is passed as a pointer, None as a null pointer, a NumPy scalar as a parameter of its width, and
    an array of one element, of bytes alone, as a struct. The kernel runs on the device of the first tensor. This call
    copies nothing, allocates nothing and does not wait.
    """
    cupy = _cupy()
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    assert num_blocks > 0, f"{kernel}: no blocks"
    assert all(tensor.is_contiguous() for tensor in tensors), f"{kernel}: a tensor has gaps"
    device = tensors[0].device
    values = tuple(arg.data_ptr() if isinstance(arg, Tensor) else np.uint64(0) if arg is None else arg for arg in args)
    with cupy.cuda.Device(device.index), _streams.current(device):
        _kernels(source_of(kernel), define, device)[kernel]((num_blocks,), (block_size,), values)


def build(source: str, device: torch.device, define: str | None = None) -> None:
    """Compile csrc/cuda/`source`.cu for `device` and load its kernels, so that no launch has to. It takes seconds."""
    with _cupy().cuda.Device(device.index):
        _kernels(source, define, device)


@functools.cache
def max_blocks(kernel: str, block_size: int, device: torch.device, define: str | None = None) -> int:
    """Return how many blocks of `kernel` run on `device` at once. More of them would only wait."""
    cupy = _cupy()
    with cupy.cuda.Device(device.index):
        function = _kernels(source_of(kernel), define, device)[kernel].kernel
        of_one = cupy.cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, block_size, 0)
    return int(of_one) * torch.cuda.get_device_properties(device).multi_processor_count


@contextmanager
def written(*tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Yield the tensors, with contiguous copies of those with gaps; the copies are copied back at the end."""
    copies = tuple(None if tensor is None else tensor.contiguous() for tensor in tensors)
    yield copies
    for tensor, copy in zip(tensors, copies, strict=True):
        if tensor is not None and copy is not None and copy is not tensor:
            tensor.copy_(copy)


def read(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor, or a contiguous copy if it has gaps."""
    return None if tensor is None else tensor.contiguous()


def dtype_name(tensor: Tensor) -> str:
    """Return the ending of the names of kernels for this dtype, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def source_of(kernel: str) -> str:
    return kernel.partition("_")[0]


class _Streams(threading.local):
    """CuPy's objects for the streams of torch that this thread has launched on."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Any] = {}

    def current(self, device: torch.device) -> Any:
        """Return CuPy's object for torch's current stream on `device`, which is CuPy's current device."""
        # torch's stream may be the legacy default stream. Its handle is 0, and CuPy understands 0 the same way.
        stream = torch.cuda.current_stream(device.index)
        key = device.index, stream.cuda_stream
        if key not in self._known:
            self._known[key] = _cupy().cuda.Stream.from_external(stream)
        return self._known[key]


_streams = _Streams()


@functools.cache
def _kernels(source: str, define: str | None, device: torch.device) -> dict[str, Any]:
    """Return CuPy's kernels of a source by name, loaded on `device`, which is CuPy's current device."""
    architecture = cuda_compile.architecture_for(torch.cuda.get_device_capability(device))
    file = cuda_compile.compiled_file(source, architecture, define, cuda_compile.cache_folder())
    module = _cupy().RawModule(path=str(file))
    kernels = {name: module.get_function(name) for name in cuda_compile.kernel_names(source, file.read_bytes())}
    for kernel in kernels.values():
        assert kernel.kernel is not None  # reading it loads it
    return kernels


def _cupy() -> Any:
    try:
        import cupy  # noqa: PLC0415 - most machines that compress on the CPU have no CuPy
    except ImportError as error:
        raise ImportError(cuda_compile.INSTALL) from error
    return cupy
