"""Fixtures of several test files. Nothing here imports Ray: `make test-gpu` runs where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_emulator import Emulator

from cgx_ray.runtime_ext import cuda_launch, ops, sparse


@pytest.fixture(scope="session")
def compiled_emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("cuda_emulator"))


@pytest.fixture
def emulated_cuda(compiled_emulator: Emulator) -> Iterator[Emulator]:
    """While it lasts, `ops` and `sparse` take CPU tensors for CUDA tensors and the kernels run in the emulator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_launch, "launch", compiled_emulator.launch)
        patch.setattr(cuda_launch, "num_multiprocessors", lambda device: compiled_emulator.num_multiprocessors)
        for module in (ops, sparse):
            patch.setattr(module, "runs_on_cuda", lambda tensor: True)
        yield compiled_emulator


@pytest.fixture(params=[1, 2, 3, 5])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
