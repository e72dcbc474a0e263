"""Launches of CUDA kernels, with a CuPy that has no driver: streams, devices, and what is built when."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.codec_cases import KEY, TEXTS, noise
from support.cuda.fake_cupy import FakeCupy, FakeStream
from support.cuda.waits import no_waits
from support.cuda_emulator import Emulator

from cgx_ray import codecs
from cgx_ray.codecs import build_kernels, make_codec
from cgx_ray.plan import CodecSpec
from cgx_ray.runtime_ext import cuda_compile, cuda_launch, cuda_sparse, ops

DEVICE = torch.device("cuda", 1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernel_cache")


@pytest.fixture
def cupy(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    """A CuPy without a driver, and torch's view of a device with 7 multiprocessors whose current stream is 40."""
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(cache))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(40))
    properties = SimpleNamespace(multi_processor_count=7)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(cuda_launch, "_streams", cuda_launch._Streams())
    for cached in (cuda_launch._kernels, cuda_launch.max_blocks):
        cached.cache_clear()
    yield fake
    for cached in (cuda_launch._kernels, cuda_launch.max_blocks):
        cached.cache_clear()


@pytest.mark.parametrize("package", ["cupy", "cuda.bindings"])
def test_a_missing_package_is_named_with_the_extra_that_installs_it(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    calls = {
        "cupy": lambda: cuda_launch.launch("sign_decode", 1, 256, torch.zeros(1)),
        "cuda.bindings": lambda: cuda_compile.compile_source("sign", "sm_90"),
    }
    with pytest.raises(ImportError, match=r"CuPy and cuda-bindings.*cgx-ray\[cuda12\].*cgx-ray\[cuda13\]"):
        calls[package]()


def _decode_sign(num_blocks: int = 1) -> None:
    args = (np.int64(8), np.int32(8), np.int32(0), np.int32(0))
    cuda_launch.launch("sign_decode", num_blocks, 256, torch.zeros(9, dtype=torch.uint8), torch.zeros(8), *args)


def test_a_launch_passes_pointers_and_numbers_on_the_stream_of_torch(cupy: FakeCupy) -> None:
    payload, out_N = torch.zeros(9, dtype=torch.uint8), torch.zeros(8)
    cuda_launch.launch("sign_decode", 5, 256, payload, None, out_N, np.int64(8))
    (launch,) = cupy.launches
    assert launch[:2] == ("sign_decode", 5)
    assert launch.args == (payload.data_ptr(), 0, out_N.data_ptr(), 8)
    assert [type(arg) for arg in launch.args] == [int, np.uint64, int, np.int64]
    assert (launch.device, launch.stream) == (out_N.device.index, 40)


def test_a_stream_of_torch_is_made_known_to_cupy_once_per_thread(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch_on(*handles: int) -> None:
        for handle in handles:
            monkeypatch.setattr(torch.cuda, "current_stream", lambda device, handle=handle: FakeStream(handle))
            _decode_sign()

    launch_on(40, 0, 40, 41, 0)
    assert cupy.streams == [40, 0, 41]
    thread = threading.Thread(target=launch_on, args=(41, 41))
    thread.start()
    thread.join()
    assert cupy.streams == [40, 0, 41, 41]
    assert [launch.stream for launch in cupy.launches] == [40, 0, 40, 41, 0, 41, 41]


def test_a_build_loads_all_kernels_of_a_source_and_launches_load_none(cupy: FakeCupy, cache: Path) -> None:
    cuda_launch.build("sign", torch.empty(0).device)
    built = ["sign_decode", *(f"sign_encode_{dtype}" for dtype in ("bfloat16", "float16", "float32")), "sign_sum"]
    assert sorted(cupy.loaded) == built
    _decode_sign()
    cuda_launch.build("sign", torch.empty(0).device)
    assert sorted(cupy.loaded) == built
    assert len([*cache.glob("cgx_ray-sign-*.cubin")]) == 1


def test_blocks_are_as_many_as_the_device_holds_at_once(cupy: FakeCupy) -> None:
    assert cuda_launch.max_blocks("sign_decode", 256, DEVICE) == 3 * 7
    cupy.num_blocks = 4
    assert cuda_launch.max_blocks("qsgd_decode", 256, DEVICE, "CGX_BITS=4") == 4 * 7


def test_launches_fill_the_device_and_no_more(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "runs_on_cuda", lambda tensor: True)
    for numel in (8, 32 * 8 * 20, 32 * 8 * 22):
        payload = torch.zeros(ops.sign_bytes(numel, 8, "onebit"), dtype=torch.uint8)
        ops.sign_decode(payload, torch.zeros(numel), kind="onebit", bucket_size=8)
    assert [launch.num_blocks for launch in cupy.launches] == [1, 20, 21]


@pytest.mark.parametrize("text", TEXTS)
def test_what_a_codec_launches_is_what_it_has_built(
    text: str, emulated_cuda: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: set[tuple[str, str | None]] = set()
    launched: set[tuple[str, str | None]] = set()

    def launch(kernel: str, *args: Any, define: str | None = None) -> None:
        launched.add((cuda_launch.source_of(kernel), define))
        emulated_cuda.launch(kernel, *args, define=define)

    monkeypatch.setattr(cuda_launch, "launch", launch)
    monkeypatch.setattr(cuda_launch, "build", lambda source, device, define=None: built.add((source, define)))
    # A large gradient takes a kernel more.
    monkeypatch.setattr(cuda_sparse, "_MIN_SAMPLED", 0)
    tried: list[str] = []
    monkeypatch.setattr(codecs, "_try_kernels", lambda spec, device: tried.append(str(spec)))
    build_kernels([CodecSpec.parse(text)], DEVICE)
    assert bool(tried) == bool(built)
    codec, numel = make_codec(CodecSpec.parse(text)), 2000
    payload = torch.zeros(codec.payload_bytes(numel), dtype=torch.uint8)
    for memory in (codec.new_memory(numel), None if not codec.needs_feedback else codec.new_memory(numel)):
        codec.encode(noise(numel), payload, KEY, memory)
        codec.decode(payload, torch.zeros(numel), add=memory is None, key=KEY)
    assert launched <= built
    assert bool(launched) == bool(built), "nothing is built in vain"


def test_on_a_cpu_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_launch, "build", lambda *_: pytest.fail("built"))
    build_kernels([CodecSpec.parse(text) for text in TEXTS], torch.device("cpu"))


def test_the_search_for_waits_works_where_warnings_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch warns that `set_sync_debug_mode` is a prototype."""
    modes: list[int | str] = []

    def set_mode(mode: int | str) -> None:
        modes.append(mode)
        warnings.warn("a prototype", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    with pytest.raises(UserWarning, match="of the block"), no_waits():
        warnings.warn("of the block", stacklevel=1)
    assert modes == ["error", 0]
