"""Fixtures of several test files. Nothing here imports Ray: `make test-gpu` runs where there is none."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuda_emulator import Emulator

from cgx_ray.runtime_ext import cuda_launch, ops, sparse

# For bench and dashboards.making, which are no part of the package. Last, so that ./cgx_ray hides no installed one.
sys.path.append(str(Path(__file__).parents[1]))

# Ray Train asks cloud services whether nodes are about to end: 1.6 s of a processor in each training, and nothing here.
os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
# Its controller looks every 2 s whether workers have begun, have ended or report, so each training would last longer.
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
# Its workers would have the lowest priority, and stand still beside whatever else runs on a busy machine.
os.environ.setdefault("RAY_worker_niceness", "0")

# Tests that run one after the other on one worker of pytest-xdist, by folder or file: those that look at rates and
# latencies, those that build the wheel in build/, and those for which g++ compiles the same CUDA kernels. Elsewhere the
# tests of a file stay together, for the sake of what they share, and any worker takes the next file. A test that starts
# Ray gives the address of its cluster to all that ask for one, so clusters live side by side. The last scope begins
# first: it takes minutes.
_SCOPES = {
    "emulator": {"test_cuda_kernels", "test_cuda_sparse_kernels", "test_cuda_index_kernels", "test_cuda_launch"},
    "wheel": {"test_job_submit", "test_wheel"},
    "rates": {"lab", "monitors", "bench", "test_network_cut", "test_soak_in_lab"},
}


# What takes seconds to start: a test file that imports it, or a test with such a fixture, is no part of `make quick`.
_STARTERS = {"ray", "run_ranks", "browser", "Emulator", "emulated_cuda"}


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at marks
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    for item in items:
        if _STARTERS & {*vars(item.module), *item.fixturenames}:
            item.add_marker("long")


@pytest.hookimpl(optionalhook=True)  # `make test-gpu` does without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spread scopes over workers. xdist's own groups (xdist_group) do nothing with pytest 9."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0])
            scopes = [name for name, names in _SCOPES.items() if names & {file.stem, file.parent.name}]
            return scopes[0] if scopes else str(file)

        def _assign_work_unit(self, node: Any) -> None:
            # The longest begin first, so that no worker is left alone with one of them at the end.
            with_ray = [scope for scope in self.workqueue if Path(scope).parent.name == "ray"]
            for scope in [*with_ray, *_SCOPES]:
                if scope in self.workqueue:
                    self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return ByFolder(config, log)


@pytest.fixture(scope="session")
def compiled_emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("cuda_emulator"))


@pytest.fixture
def emulated_cuda(compiled_emulator: Emulator) -> Iterator[Emulator]:
    """While it lasts, `ops` and `sparse` take CPU tensors for CUDA tensors and the kernels run in the emulator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_launch, "launch", compiled_emulator.launch)
        patch.setattr(cuda_launch, "max_blocks", lambda *_: compiled_emulator.max_blocks)
        for module in (ops, sparse):
            patch.setattr(module, "runs_on_cuda", lambda tensor: True)
        yield compiled_emulator


@pytest.fixture(params=[1, 2, 3, 5])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
