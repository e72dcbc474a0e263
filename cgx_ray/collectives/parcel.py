"""One message of a gradient's elements, and the arguments of one exchange."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cgx_ray.codecs.cast import Raw
from cgx_ray.codecs.codec import HOST, Codec, Memory, PayloadRow
from cgx_ray.codecs.wire import HEADER_BYTES, Message, Room, Stamp
from cgx_ray.collectives.phases import Phases
from cgx_ray.collectives.transport.transport_like import Handle, TransportLike
from cgx_ray.errors import PlanError
from cgx_ray.plan import MAX_PAYLOAD_BYTES
from cgx_ray.runtime_ext import ops

# Messages begin at multiples of this many bytes, as memory of torch does, so that kernels find payloads aligned.
_ALIGNMENT = 64
# Messages are posted together, and on the host coded together, while they have no more bytes than this. A call for each
# costs as much as coding some 100 KB, and with many ranks most messages are short.
TOGETHER_BYTES = 256 << 10


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

    parts    the tensors to send, or to receive into
    payload  what codecs write and read
    room     the memory of the message

    It takes memory when it is first used, also after `release`. With codec none a parcel may borrow memory of the
    gradient: its payload is then sent from there and received into it, without a copy. Raises PlanError if the payload
    is too long for the header's length field.
    """

    def __init__(self, codec: Codec, numel: int, room: Room | None = None, *, is_sealed_by_mesh: bool = False) -> None:
        """
        room               `num_bytes` or more bytes to use, from the beginning, instead of new memory
        is_sealed_by_mesh  as in `Message`; `seals_by_mesh` says where
        """
        self.num_bytes = message_bytes(codec, numel)
        self._codec = codec
        self._numel = numel
        self._room = room
        self._is_sealed_by_mesh = is_sealed_by_mesh
        # Header and payload are two messages on both ends, even if only one has borrowed. Gloo sends no empty message.
        self._is_two = isinstance(codec, Raw) and numel > 0

    @cached_property
    def _message(self) -> Message:
        room = self._room or Room(self.num_bytes, self._codec.device)
        return Message(self.num_bytes - HEADER_BYTES, room, is_sealed_by_mesh=self._is_sealed_by_mesh)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        message = self._message
        return (message.header, message.body) if self._is_two else (message.wire,)

    @property
    def payload(self) -> Tensor:
        return self._message.payload

    @property
    def room(self) -> Room:
        return self._message.room

    def borrow(self, run_N: Tensor) -> None:
        """With codec none, use `run_N` as the payload from now on. Other codecs ignore this."""
        if self._is_two and self._codec.device == HOST:
            self._message.borrow(run_N.view(torch.uint8))

    def release(self) -> None:
        """Give the memory back, if a device encodes: an exchange needs it again in the next step only.

        What the device was asked to do with the memory, it does first.
        """
        if self._codec.device == HOST:
            return
        self.__dict__.pop("_message", None)
        if self._room is not None:
            self._room.release()

    def seal(self, stamp: Stamp) -> None:
        """Write the header. Call it when the payload is complete, and on the host."""
        self._message.seal(stamp, self._numel)

    def check(self, stamp: Stamp, sender: int) -> None:
        """Take the received payload to the codec's device. Raises WireError on a broken or unexpected message."""
        self._message.check(stamp, self._numel, sender)

    def encode(self, run_N: Tensor, stamp: Stamp, key: int, memory: Memory | None) -> None:
        """Encode `run_N` with its residual, and write the header."""
        self._codec.encode(run_N, self.payload, key, memory)
        self.room.copy_out().wait()
        self.seal(stamp)

    def encode_share(
        self, share_N: Tensor, stamp: Stamp, key: int, memory: Memory | None, residual_scale: float
    ) -> None:
        """Encode the average of `residual_scale` gradients, see `Codec.encode_share`, and write the header."""
        self._codec.encode_share(PayloadRow(share_N, self.payload, key, memory), residual_scale)
        self.room.copy_out().wait()
        self.seal(stamp)

    def decode(self, run_N: Tensor, stamp: Stamp, sender: int, *, add: bool, key: int = 0) -> None:
        """Write the received elements to `run_N`, or add them. Raises WireError on a broken or unexpected message."""
        self.check(stamp, sender)
        self.use(run_N, add=add, key=key)

    def use(self, run_N: Tensor, *, add: bool = False, key: int = 0) -> None:
        """Decode a message of this rank's own: as `decode`, without checks."""
        self._codec.decode(self.payload, run_N, add=add, key=key)


def message_bytes(codec: Codec, numel: int) -> int:
    """Return the bytes of a message of `numel` elements. Raises PlanError if they are too many."""
    payload_bytes = codec.payload_bytes(numel)
    if payload_bytes > MAX_PAYLOAD_BYTES:
        raise PlanError(
            f"{numel} elements make a message of {payload_bytes} bytes with codec {codec.spec}; at most "
            f"{MAX_PAYLOAD_BYTES} fit into one, so give smaller groups (group_bytes)"
        )
    return HEADER_BYTES + payload_bytes


def padded_bytes(codec: Codec, numel: int) -> int:
    """Return the bytes that a message of `numel` elements takes of a common memory."""
    return -(-message_bytes(codec, numel) // _ALIGNMENT) * _ALIGNMENT


def seals_by_mesh(codec: Codec, transport: TransportLike) -> bool:
    """Return True if the mesh writes and checks the checksums of the codec's parcels, by `TransportLike.start_sealed`.

    The thread that has encoded on a CPU has the message in its cache, so it does so itself. Codec none sends header and
    payload apart.
    """
    return codec.device != HOST and not isinstance(codec, Raw) and transport.seals


def side_by_side(codec: Codec, numels: Sequence[int], *, is_sealed_by_mesh: bool = False) -> tuple[Room, list[Parcel]]:
    """Return parcels of these numbers of elements, and their common memory: one copy takes all of them to the host."""
    sizes = [padded_bytes(codec, numel) for numel in numels]
    room = Room(sum(sizes), codec.device)
    starts = itertools.accumulate(sizes, initial=0)
    parts = [room.part(start, start + size) for start, size in zip(starts, sizes, strict=False)]
    pairs = zip(numels, parts, strict=True)
    return room, [Parcel(codec, numel, part, is_sealed_by_mesh=is_sealed_by_mesh) for numel, part in pairs]


def copied_out(room: Room, phases: Phases) -> Iterator[Handle]:
    """Copy what was encoded to the host, and yield the end of the copy. On the host there is nothing to do."""
    if room.device != HOST:
        phases.lap("encode")
        yield room.copy_out()


def parts_of(parcels: Iterable[Parcel]) -> tuple[Tensor, ...]:
    """Return the tensors to send, or to receive into, of all `parcels`."""
    return tuple(part for parcel in parcels for part in parcel.parts)


def batches_of(peers: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the peers in batches of at most TOGETHER_BYTES, or of one. `sizes`: of their messages, in bytes."""
    batches: list[tuple[int, ...]] = []
    num_bytes = 0
    for peer, size in zip(peers, sizes, strict=True):
        num_bytes += size
        if batches and num_bytes <= TOGETHER_BYTES:
            batches[-1] += (peer,)
        else:
            batches.append((peer,))
            num_bytes = size
    return batches
