"""Registers backend "cgx" when torch is imported, so that init_process_group("cgx") needs no import of cgx_ray.

Torch imports this package through the entry point `torch.backends`. It is a package of its own because importing any
part of cgx_ray imports the kernels: every program that imports torch would take that time, and fail where they fail.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def register() -> None:
    """Make the name "cgx" known to torch.distributed. cgx_ray is imported when a group is first made."""
    # If cgx_ray was imported before torch, it has registered the name already.
    if dist.is_available() and "cgx" not in dist.Backend.backend_list:
        dist.Backend.register_backend("cgx", _make_group, extended_api=True, devices=["cpu"])


def _make_group(options: Any, backend_options: Any) -> Any:
    from cgx_ray.backend import make_group  # noqa: PLC0415

    return make_group(options, backend_options)
