"""Dense: an uncompressed all-reduce, through shared memory if all ranks are on one host, else by the vendor's ring."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from cgx_ray.codecs.codec import Memory
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.exchange import Exchange
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport.transport_like import Handle, TransportLike, ring_bytes


class Dense(Exchange):
    """Cost 2(N-1) a + 2(N-1)/N M b. Divides before it sums, as DDP does, since sums of fp16 would overflow first."""

    def __init__(self, dense_bytes: int, transport: TransportLike) -> None:
        super().__init__(transport)
        self.sent_bytes = ring_bytes(dense_bytes, transport.world_size)

    def turns(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> Iterator[Handle]:
        """See `Exchange.turns`. `grad_N` may be of any dtype here."""
        grad_N.div_(self._transport.world_size)
        phases.lap("encode")
        with phases.round():
            yield from self._transport.all_reduce(grad_N)
