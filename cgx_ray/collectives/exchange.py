"""What all schemes have in common."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from cgx_ray.codecs.codec import Memory
from cgx_ray.codecs.wire import Stamp
from cgx_ray.collectives.phases import Phases


class Exchange(Protocol):
    """One scheme for one group, with its buffers. Every rank must call `run` for the same groups in the same order.

    sent_bytes  what this rank sends a step, headers included; of a hierarchical one only what goes to other nodes
    """

    sent_bytes: int

    def run(self, grad_N: Tensor, memory: Memory | None, stamp: Stamp, seed: int, phases: Phases) -> None:
        """Replace `grad_N` by its average over ranks.

        grad_N  (N,) this rank's gradient; changed in place
        memory  what the codec keeps of this group, None for codecs that keep nothing. `memory.next` gets what it will
                keep; the caller commits it

        Raises WireError on a message that is broken or of another plan, TransportError if a peer is gone.
        """
