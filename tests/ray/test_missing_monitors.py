"""TorchTrainer runs whose monitors cannot start, or that attach a second model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from support.train_again import UnwatchedConfig, train_twice

import cgx_ray

pytestmark = [
    # Ray's own: it leaves sockets and files open until its processes end, and calls its own deprecated APIs.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env_vars = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": env_vars})
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.fault("an agent's constructor fails", "training goes on without the node's monitors")
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("config", [UnwatchedConfig(), cgx_ray.CGXConfig()], ids=["no monitors", "monitors"])
def test_a_run_trains_two_models_one_after_the_other(config: Any, tmp_path: Path) -> None:
    TorchTrainer(
        train_twice,
        train_loop_config={"steps": 20, "log": str(tmp_path)},
        torch_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
    ).fit()
    assert (tmp_path / "rank0").read_text() == (tmp_path / "rank1").read_text()
