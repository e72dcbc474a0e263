"""Layers that no rank used in a step. DDP does not deliver their averages, so their memory must not change.

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
    """Notes the layers that this rank uses, as DDP does with `find_unused_parameters` or `static_graph`."""

    def __init__(self, model: DistributedDataParallel) -> None:
        """Put hooks on the parameters if DDP may leave out averages, else do nothing."""
        self._is_needed = model.find_unused_parameters or model.static_graph
        self._used: set[int] = set()
        hooked = [parameter for parameter in model.parameters() if parameter.requires_grad] if self._is_needed else []
        self._hooks = [p.register_post_accumulate_grad_hook(partial(_note, self._used)) for p in hooked]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def take_unused(self, bucket: dist.GradBucket, names: Sequence[str]) -> frozenset[str] | None:
        """Return the layers of `bucket` that this rank did not use in this step; None if DDP delivers all averages.

        names  of the layers in `bucket`

        Call it for all buckets of a step in order. A layer used in a pass without synchronisation counts as used, as
        it does for DDP.
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
    """Return True if the gradient is a view of the bucket (`gradient_as_bucket_view`): the model gets its average."""
    return parameter.grad is not None and parameter.grad.untyped_storage().data_ptr() == storage


def begin_unused_by_all(
    names: Iterable[str], unused: frozenset[str], transport: Transport
) -> Callable[[], frozenset[str]]:
    """Begin to find the `names` that are in `unused` on all ranks. Return a function that waits for the result."""
    ordered = sorted(names)
    unused_L = torch.tensor([name in unused for name in ordered], dtype=torch.uint8)
    minimum = transport.start_minimum(unused_L, within_step=True)
    return lambda: frozenset(name for name, is_unused in zip(ordered, minimum().tolist(), strict=True) if is_unused)
