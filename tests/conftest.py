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

# Tests that run one after the other on one worker of pytest-xdist, by folder or file. The first ones look at rates and
# latencies, or start a Ray that other programs of this machine may find; the others start Ray clusters that only they
# know. All other tests of one file stay together, for the sake of what they share.
_SCOPES = {
    "rates and Ray": {"ray", "lab", "monitors", "bench", "test_failing_controller", "test_network_cut"},
    "own clusters of Ray": {"test_job_submit", "test_wheel", "test_elastic", "test_driver_ends"},
}


@pytest.hookimpl(optionalhook=True)  # `make test-gpu` does without pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spread scopes over workers. xdist's own groups (xdist_group) do nothing with pytest 9."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(nodeid.partition("::")[0])
            scopes = {name: scope for scope, names in _SCOPES.items() for name in names}
            return scopes.get(file.stem) or scopes.get(file.parent.name) or str(file)

        def _assign_work_unit(self, node: Any) -> None:
            # They take the longest, so they begin first.
            for name in reversed(_SCOPES):
                if name in self.workqueue:
                    self.workqueue.move_to_end(name, last=False)
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
