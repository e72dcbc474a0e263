"""Trainings that last until they are ended: `python -m support.endless ray ADDRESS LOG`, or `... rank LOG` by torchrun.

Each rank writes `rankN`, with its process id, after some steps. Once `LOG/fail` exists, rank 1 raises in its loop.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cgx_ray

# The error of the user's own loop.
SAID = "no more data"
# Steps after which all is at work: monitors report, plans are decided.
_WARM_STEPS = 20
_STEP_S = 0.05


def train(config: dict[str, Any]) -> None:
    """Train a small model until the process is ended; runs on each rank."""
    log, rank = Path(config["log"]), dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)))
    cgx_ray.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in itertools.count():
        x_BD = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        (model(x_BD) - x_BD).square().mean().backward()
        optimizer.step()
        if step == _WARM_STEPS:
            (log / f"rank{rank}").write_text(str(os.getpid()))
        if rank == 1 and (log / "fail").exists():
            raise ValueError(SAID)
        time.sleep(_STEP_S)


def _fit(address: str, log: str) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    options: dict[str, Any] = {"num_cpus": 2, "include_dashboard": False} if address == "local" else {}
    env_vars = {name: os.environ[name] for name in ("PYTHONPATH", "CGX_PORTS")}
    ray.init(address=address, runtime_env={"env_vars": {**env_vars, "OMP_NUM_THREADS": "1"}}, **options)
    TorchTrainer(
        train,
        train_loop_config={"log": log},
        torch_config=cgx_ray.CGXConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="endless", storage_path=log),
    ).fit()


if __name__ == "__main__":
    if sys.argv[1] == "ray":
        _fit(*sys.argv[2:])
    else:
        dist.init_process_group("gloo")
        train({"log": sys.argv[2]})
