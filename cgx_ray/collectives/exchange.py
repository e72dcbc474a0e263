"""`Exchange`: the interface of all schemes."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from cgx_ray.codecs.codec import Memory
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.phases import Phases


class Exchange(Protocol):
    """One scheme for one group, with its buffers. Every rank must call `run` for the same groups in the same order.

    sent_bytes  bytes that this rank sends per step, headers included; a hierarchical exchange counts only bytes that go
                to other nodes
    """

    sent_bytes: int

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """Replace `grad_N` by its average over ranks.

        grad_N  (N,) this rank's gradient; changed in place
        memory  the codec's memory of this group, None for codecs that keep nothing. The exchange writes
                `memory.next`; the caller commits it

        Raises WireError on a message that is broken or of another plan, TransportError if a peer is gone.
        """
