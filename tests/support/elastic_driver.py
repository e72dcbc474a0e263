"""The driver of the elastic training: `python -m support.elastic_driver ADDRESS STORAGE LOG SIZE...`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import cgx_ray
from support import train_functions


def main() -> None:
    address, storage, log, *sizes = sys.argv[1:]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    runtime_env = {"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}}
    ray.init(address, log_to_driver=False, runtime_env=runtime_env)
    TorchTrainer(
        train_functions.train_elastically,
        train_loop_config={"log": log, "sizes": tuple(map(int, sizes)), "steps": 6},
        torch_config=cgx_ray.CGXConfig(policy="static", codec="topk:density=0.05", scheme="allgather"),
        scaling_config=ScalingConfig(num_workers=(1, 4), elastic_resize_monitor_interval_s=1.0),
        run_config=RunConfig(name="run", storage_path=storage, failure_config=FailureConfig(max_failures=-1)),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
