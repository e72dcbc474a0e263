"""`Exchange`: the interface of all schemes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import Tensor

from cgx_ray.codecs.codec import Memory
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport.transport_like import Handle, TransportLike, finish_all


class Exchange(ABC):
    """One scheme for one group, with its buffers.

    Several exchanges may be under way at once, each on a channel of its own. Ranks may then resume them in different
    orders; each sends and receives its own messages in an order that all ranks share.

    sent_bytes   bytes that this rank sends per step, headers included; a hierarchical exchange counts only bytes that
                 go to other nodes
    takes_16_bit  True if it averages 16-bit gradients with codecs that take them. Sums are made in float32, piece by
                  piece
    keeps_order  True while the exchange has a collective of the vendor, or one in shared memory, still to start. Those
                 of all exchanges must start in the same order on all ranks, so no other exchange may begin until then
    """

    sent_bytes: int
    takes_16_bit = False
    keeps_order = False

    def __init__(self, transport: TransportLike) -> None:
        self._transport = transport

    @abstractmethod
    def turns(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> Iterator[Handle]:
        """Replace `grad_N` by its average over ranks, in turns: yield each handle to wait for, resume when it is done.

        grad_N  (N,) this rank's gradient, float32 if not `takes_16_bit`; changed in place
        memory  the codec's memory of this group, None for codecs that keep nothing. The exchange writes
                `memory.next`; the caller commits it
        phases  call `Phases.resume` before resuming

        Raises WireError on a message that is broken or of another plan, TransportError if a peer is gone.
        """

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """Take all `turns`, waiting for one handle after the other."""
        finish_all(self.turns(grad_N, memory, stamp, seed, phases), self._transport, phases.resume)
