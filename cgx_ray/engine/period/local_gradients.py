"""Gradients of steps in which replicas train alone, from DDP's buckets.

A replica is a rank, or all ranks of a node, where gradients are averaged inside nodes in each step.

L layers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cgx_ray.codecs.codec import HOST, nan_if_not_finite
from cgx_ray.engine.engine import Engine
from cgx_ray.engine.loss_scale import Scales, one_scale
from cgx_ray.engine.period.rho import Fold


class LocalBucket(NamedTuple):
    """One of DDP's buckets; `future` gets `buffer` when all gradients of the step are right.

    gradients  by layer, in `buffer`
    scales     loss scales, as `LossScale.now`
    unused     layers that have no gradient on this rank, and whose average DDP does not deliver
    """

    buffer: Tensor
    gradients: Mapping[str, Tensor]
    future: torch.futures.Future[Tensor]
    scales: Scales
    unused: frozenset[str]


class LocalGradients:
    """Averages gradients inside the replica, tells rho of them, and multiplies them by it.

    All on the thread that runs backward. Sums inside nodes begin with their bucket; the rest is done at the last one,
    on the stream of that.

    Where a loss is scaled, all ranks get NaN in the layers in which one of them has NaN or Inf, as an average would. So
    a GradScaler skips the step of an optimizer on all ranks or on none. It takes one sum of L numbers over all ranks.

    is_inside  True if the ranks of a node make up a replica
    """

    def __init__(self, engine: Engine, residuals: dict[str, Tensor], *, is_inside: bool) -> None:
        """`residuals`: not sent by codecs before, by layer. Each rank adds its own to its first gradients."""
        self._engine = engine
        self._node_group = engine.sums.node_group() if is_inside else None
        self.is_inside = self._node_group is not None
        self._residuals = residuals
        # Those added in this step, which is skipped if a gradient overflows.
        self._added: dict[str, Tensor] = {}
        numels = {layer.name: layer.numel for layer in engine.layers}
        self._places = {name: place for place, name in enumerate(numels)}
        self._fold = Fold(numels, engine.device)
        self._buckets: list[LocalBucket] = []
        self._sums: list[Callable[[], None]] = []

    @property
    def num_replicas(self) -> int:
        """Replicas that train alone."""
        return self._engine.sums.num_nodes if self.is_inside else self._engine.plan.world_size

    def forget_residuals(self) -> None:
        """Add none any more."""
        self._residuals = {}

    def take(self, bucket: LocalBucket) -> None:
        """Take a bucket of the step under way.

        Raises CGXError if residuals have to be added and the loss scale is not known.
        """
        waiting = [name for name in bucket.gradients if name in self._residuals and name not in bucket.unused]
        if waiting:
            if bucket.scales:
                # The device has written them then.
                self._engine.streams.mark().wait()
            scale = one_scale(bucket.scales, where=f"step {self._engine.step}: ")
            for name in waiting:
                # Those of offloaded groups lie on the host.
                gradient, residual = bucket.gradients[name], self._residuals.pop(name)
                gradient.add_(residual.to(gradient.device).view_as(gradient), alpha=scale)
                self._added[name] = residual
        self._buckets.append(bucket)
        if self._node_group is not None:
            bucket.buffer.div_(dist.get_world_size(self._node_group))
            self._sums.append(self._engine.sums.begin("a sum inside the node", bucket.buffer, self._node_group))

    def finish(self, rho: Mapping[str, float]) -> Tensor:
        """Finish the step at its last bucket. Return the fold of its gradients, see `Fold.take`. `rho`: by layer.

        Raises TransportError if a rank is gone.
        """
        with self._engine.failing_together():
            for end in self._sums:
                end()
            gradients = {name: one for bucket in self._buckets for name, one in bucket.gradients.items()}
            for name, gradient in gradients.items():
                self._fold.add(name, gradient)
                gradient.mul_(rho[name])
            if any(bucket.scales is None or len(bucket.scales) for bucket in self._buckets):
                self._spread_overflow(gradients)
        for bucket in self._buckets:
            bucket.future.set_result(bucket.buffer)
        self._buckets, self._sums, self._added = [], [], {}
        return self._fold.take()

    def _spread_overflow(self, gradients: Mapping[str, Tensor]) -> None:
        """Give all ranks NaN in the layers in which one of them has NaN or Inf."""
        num_broken_L = torch.zeros(len(self._places), dtype=torch.float32, device=self._engine.device)
        for name, gradient in gradients.items():
            num_broken_L[self._places[name]] = nan_if_not_finite(gradient)
        num_broken_L = num_broken_L.isnan().float()
        self._engine.sums.begin("the overflow of a loss scale", num_broken_L)()
        # Only a device that nobody waits for is not asked.
        if (self._engine.device == HOST or self._added) and not num_broken_L.any():
            return
        for name, gradient in gradients.items():
            gradient.masked_fill_(num_broken_L[self._places[name]] > 0, torch.nan)
        self._residuals |= self._added
