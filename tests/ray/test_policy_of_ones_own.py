"""The policy of docs/own-policy.md decides a real Ray training, from a package that only PYTHONPATH holds."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from support import train_functions
from support.installed_package import install_policy

import cgx_ray
from cgx_ray.report.journal_schema import journal_problem

pytestmark = [
    # Ray's own: it leaves sockets and files open until its processes end, and calls its own deprecated APIs.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an installed package that offers policy "thrifty", here and on a Ray cluster."""
    folder = install_policy(tmp_path / "site")
    monkeypatch.syspath_prepend(folder)
    paths = os.pathsep.join([str(folder), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env_vars = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": env_vars})
    yield folder
    ray.shutdown()
    sys.modules.pop("thrifty", None)


@pytest.mark.slow
@pytest.mark.usefixtures("package")
def test_an_installed_policy_decides_a_real_training(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    link = cgx_ray.SimulatedLink(latency_s=1e-4, schedule=((0, 2e7),))
    TorchTrainer(
        train_functions.train,
        train_loop_config={"log": str(tmp_path / "log"), "steps": 100, "pace": True},
        torch_config=cgx_ray.CGXConfig(policy="thrifty", simulated_link=link),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="run", storage_path=str(tmp_path)),
    ).fit()
    lines = [json.loads(line) for line in (tmp_path / "run" / "decisions.jsonl").read_text().splitlines()]
    assert set(map(journal_problem, lines)) == {""}
    assert lines[0]["policy"]["name"] == "thrifty:Thrifty"
    (first, *_) = [line for line in lines if line["event"] == "decision"]
    assert first["new"]["plan"].startswith("qsgd 4-bit"), first["new"]
    assert "Mbit/s, so" in first["reason"]
