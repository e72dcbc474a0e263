"""Bytes and errors of the bits in force beside those of 4 bits everywhere, on the gradients of a training."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.gain import squared_error
from cgx_ray.control.learned.measured import bits_by_layer
from cgx_ray.plan import Plan
from cgx_ray.planner.bits import QSGD, STATIC_BITS


class BitsBesideStatic:
    """Sums over the steps that were compared. All ranks have the same."""

    def __init__(self) -> None:
        self._num_bytes, self._num_static_bytes = 0, 0
        # Squared errors in the average over ranks: with the bits in force, and with 4 bits.
        self._errors = torch.zeros(2, dtype=torch.float64)

    def add_step(self, plan: Plan, gradients: Mapping[str, Tensor], step: int) -> None:
        """Compare the bits of `plan`, if it has any. A collective call. `gradients`: of this rank, by layer."""
        # While a new plan is taken up, ranks may not hold the same one here.
        chosen = [bits_by_layer(plan)]
        dist.broadcast_object_list(chosen)
        (bits,) = chosen
        codecs = {number: make_codec(QSGD.replace(bits=number)) for number in {STATIC_BITS, *bits.values()}}
        num_ranks = dist.get_world_size()
        for index, (name, number) in enumerate(bits.items()):
            grad_N = gradients[name].flatten().contiguous()
            mean_N = grad_N.clone()
            dist.all_reduce(mean_N)
            mean_N /= num_ranks
            both = [
                # What this rank loses, and what the mean of all loses when it is sent back, which all ranks compute.
                [squared_error(codec, grad_N, key) / num_ranks**2, squared_error(codec, mean_N, key) / num_ranks]
                for key in ((step << 16) + index,)
                for codec in (codecs[number], codecs[STATIC_BITS])
            ]
            lost = torch.tensor(both, dtype=torch.float64).sum(1)
            dist.all_reduce(lost)
            self._errors += lost
            self._num_bytes += codecs[number].payload_bytes(grad_N.numel())
            self._num_static_bytes += codecs[STATIC_BITS].payload_bytes(grad_N.numel())

    @property
    def bytes_share(self) -> float:
        """Wire bytes over those of 4 bits; NaN if no plan had bits."""
        return self._num_bytes / self._num_static_bytes if self._num_static_bytes else math.nan

    @property
    def error_ratio(self) -> float:
        """Error of the average over ranks, as an l2 norm over all steps, over that of 4 bits; NaN without any."""
        chosen, static = self._errors.tolist()
        return math.sqrt(chosen / static) if static > 0 else math.nan
