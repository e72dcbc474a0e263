"""One message of a gradient's elements, and the arguments of one exchange."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from cgx_ray.codecs.cast import Raw
from cgx_ray.codecs.codec import HOST, Codec, Memory
from cgx_ray.codecs.wire import HEADER_BYTES, Message, Stamp
from cgx_ray.collectives.phases import Phases
from cgx_ray.errors import PlanError
from cgx_ray.plan import MAX_PAYLOAD_BYTES
from cgx_ray.runtime_ext import ops


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The arguments of `Exchange.run`."""

    grad_N: Tensor  # noqa: N815 - tensors end in their dimensions
    memory: Memory | None
    stamp: Stamp
    seed: int
    phases: Phases

    def run_of(self, bounds: tuple[int, int]) -> Tensor:
        """Return the view of the gradient within `bounds`."""
        return self.grad_N[bounds[0] : bounds[1]]

    def memory_of(self, bounds: tuple[int, int]) -> Memory | None:
        """Return views of the codec's memory within `bounds`."""
        return self.memory.part(*bounds) if self.memory is not None else None

    def key(self, rank: int, number: int) -> int:
        """Return the key of the random numbers for the encoding that has this `number` on `rank` in this step."""
        return ops.message_key(self.seed, self.stamp.step, self.stamp.group, rank, number)


class Parcel:
    """A message of `numel` elements: a header of 32 bytes, then the encoded elements.

    parts  the tensors to send, or to receive into

    With codec none a parcel may borrow memory of the gradient: its payload is then sent from there and received into
    it, without a copy. Raises PlanError if the payload is too long for the header's length field.
    """

    def __init__(self, codec: Codec, numel: int, room: Tensor | None = None) -> None:
        """`room`: `num_bytes` or more bytes on the host to use as memory. A parcel with room must not borrow."""
        payload_bytes = codec.payload_bytes(numel)
        if payload_bytes > MAX_PAYLOAD_BYTES:
            raise PlanError(
                f"{numel} elements make a message of {payload_bytes} bytes with codec {codec.spec}; at most "
                f"{MAX_PAYLOAD_BYTES} fit into one, so give smaller groups (group_bytes)"
            )
        self.num_bytes = HEADER_BYTES + payload_bytes
        self._codec = codec
        self._message = Message(payload_bytes, codec.device, room)
        # Header and payload are two messages on both ends, even if only one has borrowed. Gloo sends no empty message.
        is_two = isinstance(codec, Raw) and numel > 0
        self._can_borrow = is_two and codec.device == HOST
        self._is_borrowed = False
        self.parts: tuple[Tensor, ...] = (self._message.wire,)
        if is_two:
            self.parts = (self._message.header, self._message.body)

    def borrow(self, run_N: Tensor) -> None:
        """With codec none, use `run_N` as the payload from now on. Other codecs ignore this."""
        if self._can_borrow:
            self._message.borrow(run_N.view(torch.uint8))
            self._is_borrowed = True
            self.parts = (self._message.header, self._message.body)

    def encode(self, run_N: Tensor, stamp: Stamp, key: int, memory: Memory | None) -> None:
        """Encode `run_N` with its residual, and write the header."""
        if not self._is_borrowed:
            self._codec.encode(run_N, self._message.payload, key, memory)
        self._message.seal(stamp, run_N.numel())

    def encode_share(
        self, share_N: Tensor, stamp: Stamp, key: int, memory: Memory | None, residual_scale: float
    ) -> None:
        """Encode the average of `residual_scale` gradients, or a part of it.

        share_N  (N,) float32; changed in place
        memory   in units of the sum: the residual is added divided by `residual_scale`, and what the encoding drops is
                 kept multiplied by it
        """
        if memory is None:
            self.encode(share_N, stamp, key, None)
            return
        if memory.residual_N is not None:
            share_N.add_(memory.residual_N, alpha=1 / residual_scale)
        self.encode(share_N, stamp, key, memory.without_residual())
        memory.next_N.mul_(residual_scale)

    def decode(self, run_N: Tensor, stamp: Stamp, sender: int, *, add: bool, key: int = 0) -> None:
        """Write the received elements to `run_N`, or add them. Raises WireError on a broken or unexpected message."""
        self._message.check(stamp, run_N.numel(), sender)
        self.use(run_N, add=add, key=key)

    def use(self, run_N: Tensor, *, add: bool = False, key: int = 0) -> None:
        """Decode a message of this rank's own: as `decode`, without checks."""
        if not self._is_borrowed:
            self._codec.decode(self._message.payload, run_N, add=add, key=key)


def parts_of(parcels: Iterable[Parcel]) -> tuple[Tensor, ...]:
    """Return the tensors to send, or to receive into, of all `parcels`."""
    return tuple(part for parcel in parcels for part in parcel.parts)
