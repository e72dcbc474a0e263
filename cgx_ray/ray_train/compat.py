"""The only module that imports private names of Ray. tests/ray/test_train.py runs it on the pinned Ray."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from cgx_ray.errors import ConfigError
from cgx_ray.versions import check_version

check_version("ray", ray.__version__)  # before names that an old Ray lacks

from ray.train.torch.config import TorchConfig, _TorchBackend  # noqa: E402

TorchBackend = _TorchBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Name, id, folder and nodes of a run.

    folder    of the run's files; in ~/ray_results if the storage path is not on a file system of this machine
    node_ids  by rank
    """

    name: str
    run_id: str
    folder: Path
    node_ids: tuple[str, ...]


def run_facts(worker_group: Any) -> RunFacts:
    """Read name, id, folder and nodes from Ray Train's worker group. Raises ConfigError in the old Ray Train."""
    if not hasattr(worker_group, "_train_run_context"):
        raise ConfigError("cgx_ray needs Ray Train v2; leave out RAY_TRAIN_V2_ENABLED=0, here and in runtime_env")
    run_config = worker_group._train_run_context.run_config
    storage = str(run_config.storage_path).removeprefix("file://")
    filesystem = run_config.storage_filesystem
    is_local = "://" not in storage if filesystem is None else filesystem.type_name == "local"
    return RunFacts(
        name=run_config.name,
        run_id=worker_group._train_run_context.run_id,
        folder=(Path(storage).expanduser() if is_local else Path.home() / "ray_results") / run_config.name,
        node_ids=tuple(worker.metadata.node_id for worker in worker_group.get_workers()),
    )


__all__ = ["RunFacts", "TorchBackend", "TorchConfig", "run_facts"]
