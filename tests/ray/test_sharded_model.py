"""An FSDP2 model in Ray Train under `CGXConfig()`: its codecs are tried, and one is chosen."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from support import train_functions

import cgx_ray

pytestmark = [
    # Ray's own: it leaves sockets and files open until its processes end, and calls its own deprecated APIs.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]


@pytest.fixture
def cluster() -> Iterator[None]:
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env_vars = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": env_vars})
    yield
    ray.shutdown()


@pytest.mark.usefixtures("cluster")
def test_codecs_of_a_sharded_model_are_tried_and_chosen(tmp_path: Path) -> None:
    link = cgx_ray.SimulatedLink(latency_s=1e-4, schedule=((0, 2e7),))
    TorchTrainer(
        train_functions.train_sharded,
        train_loop_config={"log": str(tmp_path)},
        torch_config=cgx_ray.CGXConfig(simulated_link=link),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
    ).fit()
    first, second = (json.loads((tmp_path / f"plans{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert "<Plan 0: dense; " in first[0]
    assert "<Plan 1: qsgd 4-bit over sra; " in first[1]
    lines = [json.loads(line) for line in (tmp_path / "run" / "decisions.jsonl").read_text().splitlines()]
    trial, *_, choice = [line for line in lines if line["event"] == "decision"]
    assert (trial["made_by"], choice["made_by"]) == ("plan_trial", "policy")
    assert choice["predicted_step_s"] < choice["predicted_dense_s"]
