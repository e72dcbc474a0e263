"""A controller that fails, in a module that actors can import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import cgx_ray
from cgx_ray.ray_train import config as ray_config
from cgx_ray.ray_train.config import CGXBackend
from support.loop_policies import RaisingPolicy


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
