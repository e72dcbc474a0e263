"""The selection compiled without AVX2, for machines that lack it: against the reference."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.sparse_checks import KINDS, check_topk, gradient

from cgx_ray.runtime_ext import sparse

CSRC = Path(sparse.__file__).parent / "csrc"
SOURCE = """
#include "kernels.h"
extern "C" void topk_select(const float* grad, const float* residual, float* next, int64_t numel,
                            const int64_t* ends, const int64_t* kept_ends, int64_t num_layers, int32_t* index,
                            float* value, int64_t num_kept, int num_threads) {
    cgx::topk_select({grad, residual, next, numel}, {ends, kept_ends, num_layers}, index, value, num_kept,
                     num_threads);
}
"""
SOURCES = ("elements", "filter_avx2", "indices", "selection", "threads", "topk")


@pytest.fixture(scope="module")
def portable_kernels(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("portable")
    (folder / "exports.cpp").write_text(SOURCE)
    files = [folder / "exports.cpp", *(CSRC / "cpu" / f"{name}.cpp" for name in SOURCES)]
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-DCGX_NO_AVX2"]
    folders = [f"-I{CSRC / name}" for name in ("cpu", "include")]
    subprocess.run(["g++", *flags, *folders, *files, "-o", folder / "portable.so"], check=True)
    topk_select = ctypes.CDLL(str(folder / "portable.so")).topk_select
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    topk_select.argtypes = [*[pointer] * 3, number, pointer, pointer, number, pointer, pointer, number, ctypes.c_int]
    return SimpleNamespace(topk_select=topk_select)


@pytest.mark.parametrize("numel", [1025, 70_001])
@pytest.mark.parametrize("kind", KINDS)
def test_the_portable_selection_equals_the_reference_bit_for_bit(
    kind: str, numel: int, portable_kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse, "native", portable_kernels)
    for num_kept in (0, 1, numel // 100, numel // 2):
        grad_N, residual_N = gradient(kind, numel), gradient("normal", numel)
        check_topk(grad_N, num_kept)
        check_topk(grad_N, num_kept, None, gradient("normal", numel))
        check_topk(grad_N, num_kept, residual_N, gradient("normal", numel))
        check_topk(grad_N, num_kept, residual_N, residual_N)
