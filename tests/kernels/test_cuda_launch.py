"""Compilation and launch of CUDA kernels, and the mistakes that the emulator must find."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda.bindings import nvrtc
from support.cuda_emulator import EmulationError, Emulator

from cgx_ray.runtime_ext import cuda_launch

# The smallest number of bits, one that divides a 32-bit word evenly, and one that does not.
DEFINES = {"qsgd": ["CGX_BITS=1", "CGX_BITS=4", "CGX_BITS=5"]}
SOURCES = sorted(path.stem for path in (cuda_launch.SOURCES / "cuda").glob("*.cu"))
BUILDS = [(source, define) for source in SOURCES for define in DEFINES.get(source, [None])]

MISTAKES = """
#include "portable.h"
extern "C" __global__ void mistakes_scale(const float* x, float* y, int64_t numel, float factor) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < numel) y[i] = x[i] * factor;
}
extern "C" __global__ void mistakes_no_barrier(int32_t* y) {
    __shared__ int32_t shared[64];
    shared[threadIdx.x] = static_cast<int32_t>(threadIdx.x) + 1;
    y[threadIdx.x] = shared[63 - threadIdx.x];
}
extern "C" __global__ void mistakes_barrier_for_some(int32_t limit) {
    if (static_cast<int32_t>(threadIdx.x) < limit) __syncthreads();
}
extern "C" __global__ void mistakes_two_places(int32_t limit) {
    if (static_cast<int32_t>(threadIdx.x) < limit) {
        __syncwarp();
    } else {
        __syncwarp();
    }
}
extern "C" __global__ void mistakes_absent_lane(int32_t* y) {
    if (threadIdx.x < 16) y[threadIdx.x] = __shfl_sync(0xFFFFu, 1, 20);
}
extern "C" __global__ void mistakes_vector(const float* x, float* y) {
    y[0] = reinterpret_cast<const float4*>(x)->w;
}
extern "C" __global__ void mistakes_shared_index(int32_t* y) {
    __shared__ int32_t shared[32];
    shared[threadIdx.x] = 0;
    y[0] = shared[0];
}
"""


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "mistakes.cu").write_text(MISTAKES)
    return Emulator(folder, sources=folder)


# Nothing in the sources depends on the architecture, so one kernel is enough for A100.
@pytest.mark.parametrize(
    ("source", "define", "architecture"),
    [*((source, define, "sm_90") for source, define in BUILDS), ("qsgd", "CGX_BITS=4", "sm_80")],
)
def test_every_kernel_compiles_for_h100_and_one_for_a100(source: str, define: str | None, architecture: str) -> None:
    machine_code = cuda_launch.compile_source(source, architecture, define)
    assert machine_code.startswith(b"\x7fELF")
    assert f"{source}_".encode() in machine_code


def _ptx(source: str, define: str | None, options: Sequence[str]) -> str:
    text = (cuda_launch.SOURCES / "cuda" / f"{source}.cu").read_bytes()
    includes = [f"--include-path={folder}" for folder in cuda_launch.INCLUDE_FOLDERS]
    defines = [] if define is None else [f"--define-macro={define}"]
    arguments = [option.encode() for option in [*options, *includes, *defines, "--gpu-architecture=compute_90"]]
    _, program = nvrtc.nvrtcCreateProgram(text, source.encode(), 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    ptx = bytes(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return ptx.decode()


# Fused instructions, those that flush denormals to zero, and divisions and roots without correct rounding.
_INEXACT = re.compile(r"\bfma\.\S+|\b\w+\S*\.(?:ftz|approx|full)\b\S*")


@pytest.mark.parametrize(("source", "define"), BUILDS)
def test_compiled_arithmetic_keeps_denormal_numbers_and_fuses_nothing(source: str, define: str | None) -> None:
    assert _INEXACT.findall(_ptx(source, define, cuda_launch.OPTIONS)) == []


@pytest.mark.parametrize(
    ("option", "instruction"),
    [("--fmad=true", "fma.rn.f32"), ("--ftz=true", "add.rn.ftz.f32"), ("--prec-div=false", "div.full.f32")],
)
def test_other_options_would_show_in_the_compiled_arithmetic(option: str, instruction: str) -> None:
    options = [given for given in cuda_launch.OPTIONS if given.partition("=")[0] != option.partition("=")[0]]
    assert instruction in _INEXACT.findall(_ptx("qsgd", "CGX_BITS=4", [*options, option]))


def test_a_source_that_does_not_compile_says_where() -> None:
    with pytest.raises(RuntimeError, match=r"qsgd.cu does not compile for sm_90[\s\S]*CGX_BITS"):
        cuda_launch.compile_source("qsgd", "sm_90")


def test_a_source_is_compiled_once_for_each_device_and_macro(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def compile_source(*build: object) -> bytes:
        calls.append(build)
        return repr(build).encode()

    monkeypatch.setattr(cuda_launch, "compile_source", compile_source)
    builds = [("qsgd", "sm_90", "CGX_BITS=4"), ("qsgd", "sm_80", "CGX_BITS=4"), ("qsgd", "sm_90", "CGX_BITS=5")]
    for build in builds + builds:
        assert cuda_launch.compiled_file(*build, tmp_path).read_bytes() == repr(build).encode()
    assert calls == builds
    assert len(list(tmp_path.iterdir())) == len(builds)


@pytest.mark.parametrize("package", ["cupy", "cuda.bindings"])
def test_a_missing_package_is_named_with_the_extra_that_installs_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    calls = {
        "cupy": lambda: cuda_launch.launch("sign_decode", 1, 256, torch.zeros(1)),
        "cuda.bindings": lambda: cuda_launch.compile_source("sign", "sm_90"),
    }
    with pytest.raises(ImportError, match=r"CuPy and cuda-bindings.*cgx-ray\[cuda12\].*cgx-ray\[cuda13\]"):
        calls[package]()


def test_the_emulator_runs_blocks_and_floats(mistakes: Emulator) -> None:
    x, y = torch.arange(100.0), torch.zeros(100)
    mistakes.launch("mistakes_scale", 4, 32, x, y, np.int64(100), np.float32(0.5))
    assert y.tolist() == (x / 2).tolist()


def test_the_emulator_refuses_arguments_of_another_type(mistakes: Emulator) -> None:
    x, y = torch.arange(100.0), torch.zeros(100)
    with pytest.raises(AssertionError, match="int64_t numel wants int64"):
        mistakes.launch("mistakes_scale", 4, 32, x, y, np.int32(100), np.float32(0.5))
    with pytest.raises(AssertionError, match=r"float\* y wants .*torch.float32.*, got torch.int32"):
        mistakes.launch("mistakes_scale", 4, 32, x, y.int(), np.int64(100), np.float32(0.5))


def test_the_emulator_finds_reads_and_writes_outside_of_a_tensor(mistakes: Emulator) -> None:
    x, y = torch.arange(128.0), torch.zeros(128)
    with pytest.raises(EmulationError, match=r"touched address .*: byte \d+ of 400 of `const float\* x`"):
        mistakes.launch("mistakes_scale", 4, 32, x[:100], y, np.int64(128), np.float32(0.5))
    # 4 bytes after the end: no protected page begins there, because tensors are aligned to 16 bytes.
    with pytest.raises(EmulationError, match=r"wrote outside of \(127,\): at \[508, 509, 510, 511\]"):
        mistakes.launch("mistakes_scale", 4, 32, x, y[:127], np.int64(128), np.float32(0.5))


def test_the_emulator_shows_a_missing_barrier(mistakes: Emulator) -> None:
    y = torch.zeros(64, dtype=torch.int32)
    mistakes.launch("mistakes_no_barrier", 1, 64, y)
    assert y.tolist() != list(range(64, 0, -1))


def test_the_emulator_finds_barriers_that_not_all_reach(mistakes: Emulator) -> None:
    with pytest.raises(EmulationError, match=r"__syncthreads.*returned"):
        mistakes.launch("mistakes_barrier_for_some", 1, 64, np.int32(40))
    with pytest.raises(EmulationError, match=r"at the __syncwarp of line \d+, thread \d+ at the __syncwarp of line"):
        mistakes.launch("mistakes_two_places", 1, 64, np.int32(40))


def test_the_emulator_finds_shuffles_from_absent_lanes(mistakes: Emulator) -> None:
    with pytest.raises(EmulationError, match="reads lane 20, which is not in the mask"):
        mistakes.launch("mistakes_absent_lane", 1, 32, torch.zeros(32, dtype=torch.int32))


def test_the_emulator_finds_misaligned_vectors_and_shared_indices(mistakes: Emulator) -> None:
    with pytest.raises(EmulationError, match="undefined behaviour"):
        mistakes.launch("mistakes_vector", 1, 1, torch.zeros(9)[1:], torch.zeros(1))
    with pytest.raises(EmulationError, match="undefined behaviour"):
        mistakes.launch("mistakes_shared_index", 1, 64, torch.zeros(1, dtype=torch.int32))
