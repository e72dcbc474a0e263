"""The process that calls `TorchTrainer.fit`, once per line on standard input.

`python -m cgx_ray.demo.driver '{"address": ..., "num_workers": 4}'`; a line is a `RunRequest`. The process ends when
standard input ends. The demo starts it inside host 0 of the lab, or directly where there is no lab.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from cgx_ray import SimulatedLink
from cgx_ray.demo.run_request import RunRequest
from cgx_ray.demo.train import train_fn
from cgx_ray.ray_train.config import CGXConfig


def main() -> None:
    settings = json.loads(sys.argv[1])
    num_workers = settings["num_workers"]
    options: dict[str, Any] = {"address": settings["address"]}
    if settings["address"] == "local":
        options |= {"num_cpus": num_workers, "include_dashboard": False, "object_store_memory": 128 << 20}
    ray.init(logging_level=logging.WARNING, **options)
    for line in sys.stdin:
        _fit(RunRequest(**json.loads(line)), num_workers)


def _fit(run: RunRequest, num_workers: int) -> None:
    config = {
        "steps": run.steps,
        "seed": run.seed,
        "batch_size": run.batch_size,
        "attach": run.policy is not None,
        "run_dir": str(run.run_dir),
    }
    TorchTrainer(
        train_fn,
        train_loop_config=config,
        torch_config=_torch_config(run),
        scaling_config=ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name=run.name, storage_path=run.storage_path),
    ).fit()


def _torch_config(run: RunRequest) -> TorchConfig:
    if run.policy is None:
        return TorchConfig(backend="gloo")
    options: dict[str, Any] = {"policy": run.policy, "seed": run.seed}
    if run.policy == "adaptive":
        options["fidelity"] = run.fidelity
    if run.policy == "static":
        options |= {"codec": "none", "scheme": "dense"}
    if run.simulated_link is not None:
        latency_s, schedule = run.simulated_link
        options["simulated_link"] = SimulatedLink(
            latency_s=latency_s, schedule=tuple((step, rate) for step, rate in schedule)
        )
    return CGXConfig(**options)


if __name__ == "__main__":
    main()
