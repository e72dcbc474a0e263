"""A training function whose first part does not mention cgx_ray, and whose second part calls `attach` without a config.

One worker group for two claims. The second part imports cgx_ray, so the first one has ended by then.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from support import plain_script


def train(config: dict[str, Any]) -> None:
    plain_script.train(config)
    import cgx_ray

    # `attach` compresses for Gloo; the default group is the backend cgx by now.
    model = DistributedDataParallel(torch.nn.Linear(64, 64), process_group=dist.new_group(backend="gloo"))
    cgx_ray.attach(model)
    model(torch.ones(1, 64)).sum().backward()
