"""Runs without monitors, and with two models one after the other, in a module that workers can import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray.train
import ray.train.torch
import torch

import cgx_ray
from cgx_ray.ray_train import agent_watch
from cgx_ray.ray_train.config import CGXBackend
from support.train_functions import small_model, weights_hash


class UnwatchedBackend(CGXBackend):
    """Its agents get an address that is not their node's, so they cannot listen and their constructors fail."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        addresses = dict.fromkeys(agent_watch.node_addresses(), "192.0.2.1")
        with patch.object(agent_watch, "node_addresses", lambda: addresses):
            super().on_start(worker_group, backend_config)


@dataclass
class UnwatchedConfig(cgx_ray.CGXConfig):
    @property
    def backend_cls(self) -> type[CGXBackend]:
        return UnwatchedBackend


def train_twice(config: dict[str, Any]) -> None:
    """Train a model, close its attachment, and train another one; write the hash of its weights to folder `log`."""
    rank = ray.train.get_context().get_world_rank()
    for _ in range(2):
        model = ray.train.torch.prepare_model(small_model())
        attachment = cgx_ray.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(config["steps"]):
            x_BD = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank))
            optimizer.zero_grad()
            (model(x_BD) - x_BD).square().mean().backward()
            optimizer.step()
        assert attachment.last_step is not None
        assert attachment.last_step.step == config["steps"] - 1
        attachment.close()
    (Path(config["log"]) / f"rank{rank}").write_text(weights_hash(model))
