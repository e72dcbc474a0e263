"""The drop-in backend: `torch.distributed.init_process_group("cgx")`. Imports no Ray."""

from __future__ import annotations

import torch.distributed as dist

from cgx_ray.backend.backend_options import configure_backend
from cgx_ray.backend.buckets import exclude_layers, register_model
from cgx_ray.backend.process_group import CgxProcessGroup, make_group

dist.Backend.register_backend("cgx", make_group, extended_api=True, devices=["cpu", "cuda"])

__all__ = ["CgxProcessGroup", "configure_backend", "exclude_layers", "make_group", "register_model"]
