"""Fixtures of several test files. Nothing here imports Ray: `make test-gpu` runs where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_emulator import Emulator

from cgx_ray.runtime_ext import cuda_launch, ops, sparse

# Folders whose tests start Ray, or look at the rates and latencies of links: one after the other, on one worker of
# pytest-xdist. All other tests of one file stay together, for the sake of what they share.
ONE_AT_A_TIME = {"ray", "lab", "monitors", "bench"}


@pytest.hookimpl(optionalhook=True)  # `make test-gpu` does without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spread scopes over workers. xdist's own groups (xdist_group) do nothing with pytest 9."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0])
            return "one at a time" if file.parent.name in ONE_AT_A_TIME else str(file)

    return ByFolder(config, log)


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
