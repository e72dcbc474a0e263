"""The header of 32 bytes before every payload whose receiver could hold another plan.

Little-endian: magic (2), format version (1), codec id (1), dtype id (1), phase (1), group (2), number of elements
(8), plan version (4), step (4), payload bytes (4), CRC-32C of the first 28 bytes and of the payload (4).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from cgx_ray.codecs.codec import HOST
from cgx_ray.errors import DamagedMessageError, WireError
from cgx_ray.plan import record_of
from cgx_ray.runtime_ext import ops
from cgx_ray.runtime_ext.mesh import SEALED_BYTES
from cgx_ray.runtime_ext.streams import Mark, streams_of

MAGIC = b"CG"
# What a mesh makes of it if the checksum is wrong.
DAMAGED = b"\0\0"
FORMAT_VERSION = 2
HEADER_BYTES = SEALED_BYTES
FLOAT32_ID = 0

_FIELDS = struct.Struct("<2sBBBBHQIII")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Values that must be the same at sender and receiver before a payload is decoded."""

    plan_version: int
    step: int
    group: int
    codec: str
    phase: int = 0


class Room:
    """Memory for messages, without initial values. It is taken when it is first used, also after `release`.

    device  of the codec
    """

    def __init__(
        self, num_bytes: int, device: torch.device = HOST, *, whole: Room | None = None, start: int = 0
    ) -> None:
        """`whole`: the room of which this one is `num_bytes` bytes from `start` on."""
        self.device = device
        self._num_bytes, self._whole, self._start = num_bytes, whole, start

    @cached_property
    def host(self) -> Tensor:
        """Memory on the host, (num_bytes,) uint8, from where messages are sent."""
        if self._whole is not None:
            return self._whole.host[self._start : self._start + self._num_bytes]
        return streams_of(self.device).host_memory(self._num_bytes, torch.uint8)

    @cached_property
    def elsewhere(self) -> Tensor:
        """The same on `device`; the same memory if that is the host."""
        if self.device == HOST:
            return self.host
        if self._whole is not None:
            return self._whole.elsewhere[self._start : self._start + self._num_bytes]
        return torch.empty(self._num_bytes, dtype=torch.uint8, device=self.device)

    def part(self, start: int, stop: int) -> Room:
        """Return the bytes [start, stop)."""
        return Room(stop - start, self.device, whole=self, start=start)

    def release(self) -> None:
        """Give the memory back: torch keeps it for the next room. Parts that are in use keep the whole."""
        self.__dict__.pop("host", None)
        self.__dict__.pop("elsewhere", None)

    def copy_out(self) -> Mark:
        """Copy `elsewhere` to `host`, and return the end of the copy. Nothing to do if both are the same."""
        streams = streams_of(self.device)
        if self.device != HOST:
            streams.copy_each([(self.elsewhere, self.host)])
        return streams.mark()


class Message:
    """Header and payload of one message.

    wire     (32 + payload bytes,) uint8 on the host
    header   first 32 bytes of `wire`
    body     the other bytes, or the memory given to `borrow`
    payload  the bytes that codecs write and read, on their device. On the host it is `body`. On another device it must
             be copied to `body` before `seal`, and `check` copies `body` there, without waiting
    """

    def __init__(self, payload_bytes: int, room: Room | None = None, *, is_sealed_by_mesh: bool = False) -> None:
        """
        room               memory to use, from its beginning, instead of new memory on the host
        is_sealed_by_mesh  True if the mesh writes and checks the checksum, see `Mesh.post`
        """
        self._is_sealed_by_mesh = is_sealed_by_mesh
        num_bytes = HEADER_BYTES + payload_bytes
        self.room = room.part(0, num_bytes) if room is not None else Room(num_bytes)
        self.wire = self.room.host
        self.header = self.wire[:HEADER_BYTES]
        self._fields_room = self.header.numpy().data
        self.body = self.wire[HEADER_BYTES:]
        self.payload = self.body if self.room.device == HOST else self.room.elsewhere[HEADER_BYTES:]

    def borrow(self, body: Tensor) -> None:
        """Use `body`, on the host, for the payload from now on."""
        self.body = self.payload = body

    def seal(self, stamp: Stamp, numel: int) -> None:
        """Write the header. Call it when the payload is complete, and on the host."""
        _FIELDS.pack_into(self._fields_room, 0, *self._fields(stamp, numel))
        if not self._is_sealed_by_mesh:
            _CRC.pack_into(self._fields_room, _FIELDS.size, self._checksum())

    def check(self, stamp: Stamp, numel: int, sender: int) -> None:
        """Raise WireError unless the received message is intact and matches `stamp` and `numel`."""
        found = _FIELDS.unpack_from(self._fields_room, 0)
        wanted = self._fields(stamp, numel)
        if found != wanted and found[0] != DAMAGED:
            names = ("magic", "format", "codec", "dtype", "phase", "group", "numel", "plan", "step", "payload_bytes")
            pairs = zip(names, found, wanted, strict=True)
            odd = "; ".join(f"{n} is {f!r}, expected {w!r}" for n, f, w in pairs if f != w)
            raise WireError(f"step {stamp.step}, group {stamp.group}: message of rank {sender} does not fit: {odd}")
        if found[0] == DAMAGED or not (self._is_sealed_by_mesh or self._has_checksum()):
            raise DamagedMessageError(
                f"step {stamp.step}, group {stamp.group}: message of rank {sender} was damaged (CRC-32C)"
            )
        if self.payload is not self.body:
            # Whoever receives into `body` again has waited for a later mark of this stream: of a message that goes out,
            # or of gradients that were computed after what is decoded now. A room that is released before the copy is
            # done stays torch's until then.
            streams_of(self.room.device).copy_each([(self.body, self.payload)])

    def _fields(self, stamp: Stamp, numel: int) -> tuple[bytes, int, int, int, int, int, int, int, int, int]:
        return (
            MAGIC,
            FORMAT_VERSION,
            record_of(stamp.codec).wire_id,
            FLOAT32_ID,
            stamp.phase,
            stamp.group,
            numel,
            stamp.plan_version,
            stamp.step,
            self.body.numel(),
        )

    def _has_checksum(self) -> bool:
        written: int = _CRC.unpack_from(self._fields_room, _FIELDS.size)[0]
        return written == self._checksum()

    def _checksum(self) -> int:
        return ops.crc32c(self.body, seed=ops.crc32c(self.header[: _FIELDS.size]))
