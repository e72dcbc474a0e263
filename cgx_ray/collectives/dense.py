"""Dense: an all-reduce, nothing compressed; the vendor's, or through shared memory if all ranks are on one host."""

from __future__ import annotations

from torch import Tensor

from cgx_ray.codecs.codec import Memory
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport import Transport


class Dense:
    """Divide, then sum, as DDP does: a sum of fp16 gradients would overflow first."""

    def __init__(self, dense_bytes: int, transport: Transport) -> None:
        self._transport = transport
        self.sent_bytes = 2 * (transport.world_size - 1) * dense_bytes // transport.world_size

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """`grad_N` may be of any dtype here. See `Exchange.run`."""
        grad_N.div_(self._transport.world_size)
        phases.lap("encode")
        self._transport.all_reduce(grad_N)
        phases.lap("exchange")
