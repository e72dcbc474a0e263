"""What torch itself imports, through the entry point `torch.backends`: init_process_group("cgx") without an import.

A package of its own because importing any part of cgx_ray imports its kernels: every program that imports torch
would pay for that, and fail where they do.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def register() -> None:
    """Make the name "cgx" known to torch.distributed. cgx_ray is imported when a group is first made."""
    # cgx_ray, where it was imported before torch, registers by itself.
    if dist.is_available() and "cgx" not in dist.Backend.backend_list:
        dist.Backend.register_backend("cgx", _make_group, extended_api=True, devices=["cpu"])


def _make_group(options: Any, backend_options: Any) -> Any:
    from cgx_ray.backend import make_group  # noqa: PLC0415

    return make_group(options, backend_options)
