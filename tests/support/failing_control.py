"""Controllers that fail, in a module that actors can import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import cgx_ray
from cgx_ray.control.policy import AdaptivePolicy, Decision, Situation
from cgx_ray.planner.options import candidate_options
from cgx_ray.ray_train import config as ray_config
from cgx_ray.ray_train.config import CGXBackend


class RaisingPolicy(AdaptivePolicy):
    """Raises at every decision."""

    def __init__(self) -> None:
        super().__init__(candidate_options((0.1,)), min_gain=0.8)

    def decide(self, situation: Situation) -> Decision:
        raise ZeroDivisionError("no plan can be found")


class RaisingBackend(CGXBackend):
    """Its controller has a RaisingPolicy."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        with patch.object(ray_config, "make_policy", lambda settings: RaisingPolicy()):
            super().on_start(worker_group, backend_config)


@dataclass
class RaisingConfig(cgx_ray.CGXConfig):
    @property
    def backend_cls(self) -> type[CGXBackend]:
        return RaisingBackend
