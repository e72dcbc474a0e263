"""Compile the CUDA kernels and launch them on torch's current stream.

A kernel's name starts with the name of its source: `qsgd_decode` is in csrc/cuda/qsgd.cu. A source is compiled for the
device in use when it is first needed, and kept in CuPy's folder of compiled kernels.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SOURCES = Path(__file__).resolve().parent / "csrc"
INCLUDE_FOLDERS = (SOURCES / "cuda", SOURCES / "include")
# No contraction, no fast-math: the kernels agree bit for bit with `reference`. By default, division and square root are
# rounded correctly and denormal numbers are kept.
OPTIONS = ("--std=c++17", "--fmad=false", "--device-as-default-execution-space")
_INSTALL = (
    "gradients on a CUDA device need CuPy and cuda-bindings, which do not load; install them: "
    'pip install "cgx-ray[cuda12]" or "cgx-ray[cuda13]", the version that torch.version.cuda names'
)


def launch(
    kernel: str, num_blocks: int, block_size: int, *args: Tensor | np.generic | None, define: str | None = None
) -> None:
    """Start `kernel` on torch's current stream; `define` (NAME=VALUE) is a macro that its source is compiled with.

    A contiguous tensor is passed as a pointer, None as a null pointer, a NumPy scalar as a parameter of its width. The
    kernel runs on the device of the first tensor. This call copies nothing, allocates nothing and does not wait.
    """
    cupy = _cupy()
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    assert num_blocks > 0, f"{kernel}: no blocks"
    assert all(tensor.is_contiguous() for tensor in tensors), f"{kernel}: a tensor has gaps"
    device = tensors[0].device
    values = tuple(arg.data_ptr() if isinstance(arg, Tensor) else np.uint64(0) if arg is None else arg for arg in args)
    # torch's stream may be the legacy default stream. Its handle is 0, and CuPy understands 0 the same way.
    stream = torch.cuda.current_stream(device)
    with cupy.cuda.Device(device.index), cupy.cuda.ExternalStream(stream.cuda_stream, device.index):
        _function(kernel, define, device.index)((num_blocks,), (block_size,), values)


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


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def dtype_name(tensor: Tensor) -> str:
    """Return the ending of the names of kernels for this dtype, such as "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def source_of(kernel: str) -> str:
    return kernel.partition("_")[0]


def compile_source(source: str, architecture: str, define: str | None = None) -> bytes:
    """Return the machine code of csrc/cuda/`source`.cu for one `architecture`, such as sm_90.

    NVRTC is called directly, because CuPy's RawModule(code=...) compiles with -ftz=true, which flushes denormal
    numbers. Raises RuntimeError with the compiler's log if the source does not compile.
    """
    nvrtc = _nvrtc()
    includes = [f"--include-path={folder}" for folder in INCLUDE_FOLDERS]
    options = [*OPTIONS, *includes, f"--gpu-architecture={architecture}"]
    if define is not None:
        options.append(f"--define-macro={define}")
    text = (SOURCES / "cuda" / f"{source}.cu").read_bytes()
    program = _checked(nvrtc.nvrtcCreateProgram(text, f"{source}.cu".encode(), 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{source}.cu does not compile for {architecture}:\n{log.decode()}")
    cubin = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    _checked(nvrtc.nvrtcDestroyProgram(program))
    return cubin


@functools.cache
def _function(kernel: str, define: str | None, device_index: int) -> Any:
    """Return CuPy's RawKernel, loaded on the current device."""
    major, minor = torch.cuda.get_device_capability(device_index)
    path = compiled_file(source_of(kernel), f"sm_{major}{minor}", define, _cache_folder())
    return _cupy().RawModule(path=str(path)).get_function(kernel)


def compiled_file(source: str, architecture: str, define: str | None, folder: Path) -> Path:
    """Return the file in `folder` that holds the result of `compile_source`; make it if it is missing."""
    digest = hashlib.sha256(repr((source, architecture, define, OPTIONS, _checked(_nvrtc().nvrtcVersion()))).encode())
    headers = [header for folder in INCLUDE_FOLDERS for header in folder.glob("*.h")]
    for path in sorted([SOURCES / "cuda" / f"{source}.cu", *headers]):
        digest.update(path.read_bytes())
    file = folder / f"cgx_ray-{source}-{digest.hexdigest()[:32]}.cubin"
    if not file.exists():
        # Other processes may compile the same source now. Replacing a file is atomic, so nobody reads half of one.
        with tempfile.NamedTemporaryFile(dir=folder, prefix=file.stem, delete=False) as new:
            new.write(compile_source(source, architecture, define))
        os.replace(new.name, file)
    return file


def _cache_folder() -> Path:
    """Return CuPy's cache folder, so that CUPY_CACHE_DIR moves both caches."""
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _checked(answer: tuple[Any, ...]) -> Any:
    """Return the values of a call to NVRTC; raise RuntimeError if the call failed."""
    status, *values = answer
    if status.value != 0:
        raise RuntimeError(f"NVRTC: {status.name}")
    return values[0] if len(values) == 1 else values


def _cupy() -> Any:
    try:
        import cupy  # noqa: PLC0415 - most machines that compress on the CPU have no CuPy
    except ImportError as error:
        raise ImportError(_INSTALL) from error
    return cupy


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415
    except ImportError as error:
        raise ImportError(_INSTALL) from error
    return nvrtc
