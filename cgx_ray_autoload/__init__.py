"""Registers backend "cgx" when torch is imported, so that init_process_group("cgx") needs no import of cgx_ray.

With CGX_WHY set it also lets `cgx-ray why` observe the training.

Torch imports this package through the entry point `torch.backends`. It is a package of its own because importing any
part of cgx_ray imports the kernels: every program that imports torch would take that time, and fail where they fail.
"""

from __future__ import annotations

import os
import warnings
from typing import Any


def register() -> None:
    """Make the name "cgx" known to torch.distributed. cgx_ray is imported when a group is first made, or observed.

    Whatever fails here, `import torch` does not: programs that never use "cgx" must not notice it.
    """
    try:
        import torch.distributed as dist  # noqa: PLC0415 - may fail in a broken torch, which then says so itself

        # If cgx_ray was imported before torch, it has registered the name already.
        if dist.is_available() and "cgx" not in dist.Backend.backend_list:
            dist.Backend.register_backend("cgx", _make_group, extended_api=True, devices=["cpu", "cuda"])
        if folder := os.environ.get("CGX_WHY"):
            from cgx_ray_autoload.observing import arm  # noqa: PLC0415 - most programs are not observed

            arm(folder)
    except Exception as error:  # noqa: BLE001 - torch would end the program with an advice to switch off all backends
        warnings.warn(f"backend 'cgx' is not registered ({error!r}); see `cgx-ray doctor`", stacklevel=2)


def _make_group(options: Any, backend_options: Any) -> Any:
    from cgx_ray.backend import make_group  # noqa: PLC0415

    return make_group(options, backend_options)
