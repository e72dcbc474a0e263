"""Run the CUDA kernels on CPU tensors: the .cu files compiled by g++, see cuda_emulator.cpp.

`Emulator.launch` replaces `cuda_launch.launch`. Each tensor is copied to its own pages, between two protected pages,
and copied back after the kernel. A read or write outside of it fails the test with a message.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from cgx_ray.runtime_ext import cuda, cuda_compile, cuda_launch

HERE = Path(__file__).resolve().parent
PAGE = mmap.PAGESIZE
FILL = 0xA5

# Dtypes that a pointer parameter takes. CUDA's 64-bit atomics take `unsigned long long` only, so it is here too.
POINTERS = {
    "float": {torch.float32},
    "double": {torch.float64},
    "uint8_t": {torch.uint8},
    "Half": {torch.float16},
    "BFloat16": {torch.bfloat16},
    "int32_t": {torch.int32},
    "uint32_t": {torch.int32, torch.uint32},
    "int64_t": {torch.int64},
    "uint64_t": {torch.int64, torch.uint64},
    "unsigned long long": {torch.int64, torch.uint64},
}
SCALARS = {
    "int32_t": np.int32,
    "uint32_t": np.uint32,
    "int64_t": np.int64,
    "uint64_t": np.uint64,
    "float": np.float32,
    "double": np.float64,
}
_QUALIFIERS = ("const", "*", "__restrict__", "__grid_constant__")
# Structs that are passed by value.
STRUCTS = {"Rows": cuda.ROWS}
_BOUNDS = r"(?:__launch_bounds__\([^)]*\)\s*)?"
_KERNEL = re.compile(rf"__global__\s+{_BOUNDS}void\s+{_BOUNDS}(\w+)\s*\(([^)]*)\)\s*{{")
# Mistakes that g++ finds at run time: array bounds, shifts, misaligned vectors, floats out of range of an integer.
_SANITIZE = (
    "-fsanitize=bounds,shift,alignment,integer-divide-by-zero,float-cast-overflow",
    "-fsanitize-undefined-trap-on-error",
)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class EmulationError(Exception):
    """A kernel did something that a GPU forbids, or that gives another result every time."""


Argument = Tensor | np.generic | npt.NDArray[np.void] | None


@dataclass(frozen=True, slots=True)
class Parameter:
    text: str
    type_name: str  # without const and the star
    is_pointer: bool

    @classmethod
    def parse(cls, text: str) -> Parameter:
        words = text.replace("*", " * ").split()[:-1]  # the last one is its name
        is_pointer = "*" in words
        type_name = " ".join(word for word in words if word not in _QUALIFIERS).removeprefix("cgx::")
        return cls(text.strip(), type_name, is_pointer)

    def check(self, argument: Argument) -> None:
        if self.type_name in STRUCTS:
            assert isinstance(argument, np.ndarray), f"{self.text} wants an array of one, got {type(argument)}"
            assert (argument.dtype, argument.size) == (STRUCTS[self.type_name], 1)
        elif not self.is_pointer:
            expected = SCALARS[self.type_name]
            assert isinstance(argument, expected), f"{self.text} wants {expected.__name__}, got {type(argument)}"
        elif argument is not None:
            assert isinstance(argument, Tensor), f"{self.text} wants a tensor, got {type(argument)}"
            expected_dtypes = POINTERS[self.type_name]
            assert argument.dtype in expected_dtypes, f"{self.text} wants {expected_dtypes}, got {argument.dtype}"
            assert argument.is_contiguous(), f"{self.text} is given a tensor with strides {argument.stride()}"


class GuardedCopy:
    """Copy of a tensor's bytes between two protected pages, as close to the second as the 16-byte alignment allows."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.num_bytes = tensor.numel() * tensor.element_size()
        slack = -(tensor.data_ptr() + self.num_bytes) % 16
        self.size = -(-(self.num_bytes + slack) // PAGE) * PAGE + 2 * PAGE
        read_write, private_anonymous = 3, 0x22
        self.base = _libc.mmap(None, self.size, read_write, private_anonymous, -1, 0)
        assert self.base not in (None, ctypes.c_void_p(-1).value), ctypes.get_errno()
        ctypes.memset(self.base, FILL, self.size)
        self.address = self.base + self.size - PAGE - slack - self.num_bytes
        assert self.address % 16 == tensor.data_ptr() % 16
        ctypes.memmove(self.address, tensor.data_ptr(), self.num_bytes)
        for page in (self.base, self.base + self.size - PAGE):
            assert _libc.mprotect(page, PAGE, 0) == 0, ctypes.get_errno()

    def copy_back(self) -> None:
        ctypes.memmove(self.tensor.data_ptr(), self.address, self.num_bytes)

    def stray_bytes(self) -> list[int]:
        """Return the offsets, from the tensor's start, of bytes outside of the tensor that changed."""
        begin, end = self.base + PAGE, self.base + self.size - PAGE
        content = np.frombuffer(ctypes.string_at(begin, end - begin), np.uint8)
        start = self.address - begin
        is_outside = np.ones(content.size, dtype=bool)
        is_outside[start : start + self.num_bytes] = False
        return [int(i) - start for i in np.flatnonzero(is_outside & (content != FILL))]

    def free(self) -> None:
        _libc.munmap(self.base, self.size)


class Library:
    """One .cu file, compiled with one macro."""

    def __init__(self, path: Path, define: str | None, folder: Path, runtime: Path) -> None:
        options = [] if define is None else [f"-D{define}"]
        text = _compile("-E", "-P", "-x", "c++", path, *options)
        self.parameters = {
            name: [Parameter.parse(p) for p in parameters.split(",")] for name, parameters in _KERNEL.findall(text)
        }
        # The emulator calls every kernel through pointers to its arguments, as CUDA's driver does.
        calls = [
            f'extern "C" void call_{name}(void** args) {{ {name}('
            + ", ".join(
                f"*static_cast<{p.type_name}{'*' * p.is_pointer}*>(args[{i}])" for i, p in enumerate(parameters)
            )
            + "); }"
            for name, parameters in self.parameters.items()
        ]
        unit = folder / f"{path.stem}-{define}.cpp"
        head = ['#include "cuda_emulator.h"', f'#include "{path}"', "namespace cgx {}", "using namespace cgx;"]
        unit.write_text("\n".join([*head, *calls, ""]))
        library = unit.with_suffix(".so")
        _compile(*options, *_SANITIZE, "-shared", unit, runtime, "-o", library)
        self.library = ctypes.CDLL(str(library))
        self.library.emulate.restype = ctypes.c_char_p


def _compile(*args: str | Path) -> str:
    """Run g++ and return its output; raises CalledProcessError if it fails, with g++'s messages on stderr."""
    include = [f"-I{folder}" for folder in (*cuda_compile.INCLUDE_FOLDERS, HERE)]
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    return subprocess.run(["g++", *options, *include, *args], check=True, stdout=subprocess.PIPE, text=True).stdout


class Emulator:
    """`launch` for CPU tensors. A .cu file is compiled when its first kernel is launched."""

    max_blocks = 10

    def __init__(self, folder: Path, sources: Path = cuda_compile.SOURCES / "cuda") -> None:
        self.folder = folder
        self.sources = sources
        self.runtime = folder / "cuda_emulator.o"
        _compile("-c", HERE / "cuda_emulator.cpp", "-o", self.runtime)
        self.libraries: dict[tuple[str, str | None], Library] = {}
        self.seeds = itertools.count(1)
        self.num_launches = 0

    def library(self, kernel: str, define: str | None) -> Library:
        source = cuda_launch.source_of(kernel)
        if (source, define) not in self.libraries:
            self.libraries[source, define] = Library(self.sources / f"{source}.cu", define, self.folder, self.runtime)
        return self.libraries[source, define]

    def launch(
        self,
        kernel: str,
        num_blocks: int,
        block_size: int,
        *args: Argument,
        define: str | None = None,
    ) -> None:
        library = self.library(kernel, define)
        parameters = library.parameters[kernel]
        assert len(args) == len(parameters), f"{kernel} has {len(parameters)} parameters, got {len(args)} arguments"
        for parameter, argument in zip(parameters, args, strict=True):
            parameter.check(argument)
        copies: dict[int, GuardedCopy] = {}
        try:
            values = [self._value(argument, copies) for argument in args]
            pointers = (ctypes.c_void_p * len(args))(*(ctypes.addressof(value) for value in values))
            call = ctypes.cast(library.library[f"call_{kernel}"], ctypes.c_void_p)
            seed = next(self.seeds)
            error = library.library.emulate(call, pointers, num_blocks, block_size, seed)
            self.num_launches += 1
            if error:
                raise EmulationError(
                    f"{kernel}: {error.decode()}{self._where(error.decode(), parameters, args, copies)}"
                )
            for copy in copies.values():
                if stray := copy.stray_bytes():
                    raise EmulationError(f"{kernel}: wrote outside of {tuple(copy.tensor.shape)}: at {stray[:8]}")
                copy.copy_back()
        finally:
            for copy in copies.values():
                copy.free()

    @staticmethod
    def _value(argument: Argument, copies: dict[int, GuardedCopy]) -> ctypes.Array[ctypes.c_char]:
        """Return the bytes that the kernel gets as this argument."""
        if argument is None or (isinstance(argument, Tensor) and argument.numel() == 0):
            return ctypes.create_string_buffer(bytes(8), 8)
        if isinstance(argument, np.ndarray):
            return ctypes.create_string_buffer(argument.tobytes(), argument.nbytes)
        if isinstance(argument, np.generic):
            return ctypes.create_string_buffer(argument.tobytes(), 8)
        copy = copies.get(argument.data_ptr())
        if copy is None:
            copy = copies[argument.data_ptr()] = GuardedCopy(argument)
        assert copy.num_bytes == argument.numel() * argument.element_size(), "two arguments overlap in part"
        return ctypes.create_string_buffer(copy.address.to_bytes(8, "little"), 8)

    @staticmethod
    def _where(
        error: str,
        parameters: list[Parameter],
        args: tuple[Argument, ...],
        copies: dict[int, GuardedCopy],
    ) -> str:
        """Name the argument that the touched address lies in or next to."""
        match = re.search(r"touched address (0x[0-9a-f]+)", error)
        if not match:
            return ""
        address = int(match[1], 16)
        for parameter, argument in zip(parameters, args, strict=True):
            copy = copies.get(argument.data_ptr()) if isinstance(argument, Tensor) else None
            if copy and copy.base <= address < copy.base + copy.size:
                return f": byte {address - copy.address} of {copy.num_bytes} of `{parameter.text}`"
        return ""
