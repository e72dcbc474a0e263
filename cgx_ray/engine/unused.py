"""Layers whose average changes no weight, so that their memory must not change: no rank used them, or it is not finite.

L layers
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
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


def begin_marked_by_all(
    names: Iterable[str], marked: Container[str], transport: Transport
) -> Callable[[], frozenset[str]]:
    """Begin to find the `names` that are in `marked` on all ranks. Return a function that waits for the result."""
    ordered = sorted(names)
    marked_L = torch.tensor([name in marked for name in ordered], dtype=torch.uint8, device="cpu")
    minimum = transport.start_minimum(marked_L, within_step=True)
    return lambda: frozenset(name for name, is_marked in zip(ordered, minimum().tolist(), strict=True) if is_marked)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Layers whose averages a step did not apply, the same on all ranks.

    unused  layers that no rank used: DDP does not deliver their averages
    broken  layers with NaN or Inf
    """

    unused: frozenset[str] = frozenset()
    broken: frozenset[str] = frozenset()

    def not_applied(self, layers: Iterable[str], judged_together: Iterable[frozenset[str]]) -> frozenset[str]:
        """Return the `layers` whose averages change no weight, so that their memory must stay as it was.

        judged_together  the layers of each optimizer that skips its step if one of them is not finite. All other layers
                         count as those of one optimizer
        """
        if not self.broken:
            return self.unused
        judged, everything = list(judged_together), frozenset(layers)
        others = everything.difference(*judged)
        stepped = (one for one in (*judged, others) if one.isdisjoint(self.broken - self.unused))
        return everything.difference(*stepped) | self.unused
