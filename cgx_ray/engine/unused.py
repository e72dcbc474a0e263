"""Layers that no rank used in a step: DDP drops what their bucket holds for them, so nothing of them was sent.

L layers
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from cgx_ray.collectives import Transport


class UsedLayers:
    """Takes note of the layers that this rank uses, as DDP does with `find_unused_parameters` or `static_graph`."""

    def __init__(self, model: DistributedDataParallel) -> None:
        """Hook into the parameters if DDP may drop gradients, else do nothing."""
        self._is_needed = model.find_unused_parameters or model.static_graph
        self._used: set[int] = set()
        for parameter in model.parameters() if self._is_needed else ():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(partial(_note, self._used))

    def take_unused(self, bucket: dist.GradBucket, names: Sequence[str]) -> frozenset[str] | None:
        """Those of `names`, the layers of `bucket`, that this rank did not use in this step; None if all are kept.

        Call it for all buckets of a step in order. Passes without synchronisation count, as they do for DDP.
        """
        if not self._is_needed:
            return None
        parameters = zip(names, bucket.parameters(), strict=True)
        storage = bucket.buffer().untyped_storage().data_ptr()
        unused = frozenset(
            name
            for name, parameter in parameters
            if id(parameter) not in self._used and not _lies_in(parameter, storage)
        )
        if bucket.is_last():
            self._used.clear()
        return unused


def _note(used: set[int], parameter: Tensor) -> None:
    used.add(id(parameter))


def _lies_in(parameter: Tensor, storage: int) -> bool:
    """Whether the model has the average all the same: `gradient_as_bucket_view`, and the gradient is not None."""
    return parameter.grad is not None and parameter.grad.untyped_storage().data_ptr() == storage


def begin_unused_by_all(
    names: Iterable[str], unused: frozenset[str], transport: Transport
) -> Callable[[], frozenset[str]]:
    """Begin to find out which of `names` are in `unused` on all ranks; what is returned waits for the answer."""
    ordered = sorted(names)
    unused_L = torch.tensor([name in unused for name in ordered], dtype=torch.uint8)
    minimum = transport.start_minimum(unused_L, notes_lag=False)
    return lambda: frozenset(name for name, is_unused in zip(ordered, minimum().tolist(), strict=True) if is_unused)
