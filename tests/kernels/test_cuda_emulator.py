"""The mistakes that the emulator of CUDA kernels must find."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.cuda_emulator import EmulationError, Emulator

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
