"""Torch's communication hooks for DistributedDataParallel, as `python -m bench step` compares them."""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from bench.step.cases import Kind
from cgx_ray.plan import CodecSpec

# Steps that are sent whole; 2 is the least that torch allows with error feedback.
_POWERSGD_FIRST_STEP = 2


def _bf16_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Torch's hook under another name: by its own name DDP allows it with NCCL only, though Gloo sums bfloat16 too."""
    return default_hooks.bf16_compress_hook(state, bucket)


def _sum_part(share: float, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    grad_N = bucket.buffer()
    work = dist.all_reduce(grad_N[: max(1, round(share * grad_N.numel()))], async_op=True)
    whole: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda _: grad_N)
    return whole


def register_hook(
    model: DistributedDataParallel, kind: Kind, codec: str = "none", *, share_sent: float = 1.0, first_alone: int = 0
) -> None:
    """Average the gradients of `model` by a hook of torch; "noop" and "local_sgd" leave them as they are.

    codec        of "powersgd_hook": has its rank
    share_sent   of "truncated", which sums the first part of each bucket
    first_alone  first step in which "local_sgd" leaves gradients as they are
    """
    hooks: dict[str, Callable[..., Any]] = {
        "noop": debugging_hooks.noop_hook,
        "fp16_hook": default_hooks.fp16_compress_hook,
        "bf16_hook": _bf16_hook,
        "powersgd_hook": powersgd.powerSGD_hook,
        "local_sgd": local_sgd.post_localSGD_hook,
        "truncated": _sum_part,
    }
    state: Any = share_sent if kind == "truncated" else None
    if kind == "powersgd_hook":
        state = powersgd.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=CodecSpec.parse(codec).rank,
            start_powerSGD_iter=_POWERSGD_FIRST_STEP,
        )
    elif kind == "local_sgd":
        # One rank per node: so its sums inside nodes, which it makes on GPUs only, would be of one rank.
        state = local_sgd.PostLocalSGDState(
            process_group=None, subgroup=None, start_localSGD_iter=first_alone, post_local_gradient_allreduce=False
        )
    model.register_comm_hook(state, hooks[kind])
