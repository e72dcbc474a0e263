"""The process of `python -m bench chaos` that calls `TorchTrainer.fit`, in host 0 of the lab.

`python -m bench.chaos.driver ADDRESS`; each line on standard input is a `ChaosRun`. It ends when standard input
ends.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from bench.chaos.train import train_with_faults
from cgx_ray.ray_train.config import CGXConfig

# Steps between two comparisons of the weights: often enough that a step which broke them is near.
_WEIGHT_CHECK_STEPS = 25


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosRun:
    """One training, as a line of JSON. `config` is that of `train_with_faults`, without `log_dir`."""

    name: str
    num_workers: int
    storage_path: str
    config: dict[str, Any]

    @property
    def run_dir(self) -> Path:
        return Path(self.storage_path) / self.name

    @property
    def log_dir(self) -> Path:
        """Folder of `steps.jsonl`, apart from the journal, whose disk may be full."""
        return Path(self.storage_path) / f"{self.name}-steps"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    ray.init(address=sys.argv[1], logging_level=logging.WARNING)
    for line in sys.stdin:
        _fit(ChaosRun(**json.loads(line)))


def _fit(run: ChaosRun) -> None:
    TorchTrainer(
        train_with_faults,
        train_loop_config={**run.config, "log_dir": str(run.log_dir)},
        torch_config=CGXConfig(seed=run.config["seed"], weight_check_steps=_WEIGHT_CHECK_STEPS),
        scaling_config=ScalingConfig(num_workers=run.num_workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name=run.name, storage_path=run.storage_path),
    ).fit()


if __name__ == "__main__":
    main()
