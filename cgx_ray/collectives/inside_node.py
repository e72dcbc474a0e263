"""The two halves of a hierarchical exchange inside a node: sum the chunks, then give out the results.

Each rank of the node has one chunk, empty ones last. Both halves are iterators that yield each handle to wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from cgx_ray.codecs.codec import HOST, POWERSGD_Q, RESIDUALS, Memory
from cgx_ray.collectives.parcel import Step
from cgx_ray.collectives.sra import Sra
from cgx_ray.collectives.subset import MessageGroup
from cgx_ray.collectives.transport.transport import Transport
from cgx_ray.collectives.transport.transport_like import Handle
from cgx_ray.collectives.transport.vendor_group import VendorGroup
from cgx_ray.runtime_ext.shm import LocalGroup


class DenseInside:
    """Uncompressed sums: through shared memory, by messages, or of the vendor in a device's memory."""

    def __init__(
        self,
        transport: Transport,
        local: LocalGroup | MessageGroup | VendorGroup,
        bounds: Sequence[tuple[int, int]],
    ) -> None:
        """`bounds`: by rank of the node, the elements [start, stop) of its chunk."""
        self._transport = transport
        self._local = local
        self._bounds = bounds
        self._has_taken_over = False

    def reduce(self, step: Step) -> Iterator[Handle]:
        """Replace the own chunk by its sum over the node."""
        if step.memory is not None:
            if not self._has_taken_over:
                yield from self._take_over(step.memory)
            # This rank encodes only its own chunk, so it keeps no residual of the others.
            for kind, value in step.memory.next.items():
                value.copy_(step.memory.now[kind]) if kind == POWERSGD_Q else value.zero_()
        step.phases.lap("encode")
        with step.phases.round():
            yield from self._reduce_scatter(step.grad_N)

    def share(self, step: Step) -> Iterator[Handle]:
        """Give the own chunk to the node, and take over the others."""
        with step.phases.round(), self._transport.reporting("a gathering inside the node"):
            if isinstance(self._local, LocalGroup):
                self._local.all_gather(step.grad_N, self._bounds)
            else:
                yield from self._local.all_gather(step.grad_N, self._bounds)

    def _take_over(self, memory: Memory) -> Iterator[Handle]:
        """Before the first step, move the node's residuals and momentum to the owners of the chunks.

        Their sums over ranks stay the same, so this holds even if the step is not committed.
        """
        start, stop = self._bounds[self._local.rank]
        for kind, value in memory.now.items():
            if kind != POWERSGD_Q:
                yield from self._reduce_scatter(value)
                value[:start].zero_()
                value[stop:].zero_()
        self._has_taken_over = True

    def _reduce_scatter(self, values_N: Tensor) -> Iterator[Handle]:
        with self._transport.reporting("a sum inside the node"):
            if isinstance(self._local, LocalGroup):
                self._local.reduce_scatter(values_N, self._bounds)
            else:
                yield from self._local.reduce_scatter(values_N, self._bounds)


class CompressedInside:
    """The two halves of `Sra`, by messages."""

    def __init__(self, sra: Sra, numel: int, residual_scale: float, own: tuple[int, int]) -> None:
        """Use `sra`, whose ranks are those of the node.

        residual_scale  times that this rank keeps what encoding the average of its chunk drops
        own             elements [start, stop) of this rank's chunk
        """
        self._sra = sra
        self._residual_scale = residual_scale
        self._own = slice(*own)
        self._dropped_N = torch.zeros(numel, dtype=torch.float32, device=HOST)

    def reduce(self, step: Step) -> Iterator[Handle]:
        """Replace the own chunk by its sum over the node."""
        yield from self._sra.scatter(step)
        yield from self._sra.reduce(step)

    def share(self, step: Step) -> Iterator[Handle]:
        """Give the own chunk to the node, and take over the others."""
        if step.memory is None:
            yield from self._sra.share(step, self._residual_scale)
            return
        # Encode without the residual: each node has another one, and would get another average.
        yield from self._sra.share(replace(step, memory=Memory({}, {RESIDUALS: self._dropped_N})), self._residual_scale)
        step.memory.next_N[self._own].add_(self._dropped_N[self._own])
