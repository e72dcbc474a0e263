"""Fixtures of several test files. Nothing here imports Ray: `make test-gpu` runs where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cuda_emulator import Emulator

from cgx_ray.runtime_ext import cuda_launch, ops, sparse

# Files whose tests start Ray, or look at the rates and latencies of links: one after the other, on one worker of
# pytest-xdist. Of all other files the tests of one stay together, for the sake of what they share.
ONE_AT_A_TIME = {
    *("test_demo", "test_job_submit", "test_monitors", "test_probe_command", "test_train"),
    *("test_bench_collectives", "test_bench_network", "test_lab", "test_lab_command", "test_lab_links"),
    *("test_monitors_passive", "test_monitors_probe"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.path.stem
        item.add_marker(pytest.mark.xdist_group("one at a time" if name in ONE_AT_A_TIME else name))


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
