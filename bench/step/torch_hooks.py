"""Torch's communication hooks for DistributedDataParallel, as `python -m bench step` compares them."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from bench.step.cases import POWERSGD_RANK, Kind

# Steps that are sent whole; 2 is the least that torch allows with error feedback.
_POWERSGD_FIRST_STEP = 2


def _bf16_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Torch's hook under another name: by its own name DDP allows it with NCCL only, though Gloo sums bfloat16 too."""
    return default_hooks.bf16_compress_hook(state, bucket)


def register_hook(model: DistributedDataParallel, kind: Kind) -> None:
    """Average the gradients of `model` by a hook of torch; "noop" leaves them as they are."""
    hooks: dict[str, Callable[..., Any]] = {
        "noop": debugging_hooks.noop_hook,
        "fp16_hook": default_hooks.fp16_compress_hook,
        "bf16_hook": _bf16_hook,
        "powersgd_hook": powersgd.powerSGD_hook,
    }
    state = None
    if kind == "powersgd_hook":
        state = powersgd.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=POWERSGD_RANK,
            start_powerSGD_iter=_POWERSGD_FIRST_STEP,
        )
    model.register_comm_hook(state, hooks[kind])
