"""The 32 bytes that go before every payload whose receiver could hold another plan.

Little-endian: magic (2), format version (1), codec id (1), dtype id (1), phase (1), group (2), number of elements
(8), plan version (4), step (4), payload bytes (4), CRC-32C of the 28 bytes before it and of the payload (4).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from cgx_ray.codecs.codec import HOST
from cgx_ray.errors import WireError
from cgx_ray.runtime_ext import ops

MAGIC = b"CG"
FORMAT_VERSION = 2
HEADER_BYTES = 32
CODEC_IDS = {
    "none": 0, "bf16": 1, "qsgd": 2, "topk": 3, "fp16": 4, "prefix": 5, "terngrad": 6, "lwtopk": 7, "mstopk": 8,
    "dgc": 9, "sidco": 10, "randomk": 11, "ef_signsgd": 12, "onebit": 13, "powersgd": 14,
}  # fmt: skip
FLOAT32_ID = 0

_FIELDS = struct.Struct("<2sBBBBHQIII")
_CRC = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What sender and receiver must agree on before a payload is decoded."""

    plan_version: int
    step: int
    group: int
    codec: str
    phase: int = 0


class Message:
    """Header and payload of one message.

    wire     (32 + payload bytes,) uint8 on the host
    header   its first 32 bytes
    body     the rest; or other memory on the host that `borrow` was given
    payload  what codecs write and read, on the device that was asked for: `body` on the host, memory of its own on any
             other device, which `seal` copies to `body`, and `check` back, waiting for the device
    """

    def __init__(self, payload_bytes: int, device: torch.device = HOST, room: Tensor | None = None) -> None:
        """Uninitialised. `room`: bytes on the host to lie in; own ones without."""
        num_bytes = HEADER_BYTES + payload_bytes
        # Pinned: a CUDA device then copies at full speed.
        is_pinned = device.type == "cuda"
        self.wire = (
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned) if room is None else room[:num_bytes]
        )
        self.header = self.wire[:HEADER_BYTES]
        self.body = self.wire[HEADER_BYTES:]
        self.payload = self.body if device == HOST else torch.empty_like(self.body, device=device)

    def borrow(self, body: Tensor) -> None:
        """Have the payload in `body`, on the host, from now on."""
        self.body = self.payload = body

    def seal(self, stamp: Stamp, numel: int) -> None:
        """Write the header: the payload is complete."""
        if self.payload is not self.body:
            self.body.copy_(self.payload)
        _FIELDS.pack_into(self.header.numpy().data, 0, *self._fields(stamp, numel))
        _CRC.pack_into(self.header.numpy().data, _FIELDS.size, self._checksum())

    def check(self, stamp: Stamp, numel: int, sender: int) -> None:
        """Raise WireError unless what came is whole and carries what `stamp` and `numel` say."""
        found = _FIELDS.unpack_from(self.header.numpy().data, 0)
        wanted = self._fields(stamp, numel)
        if found != wanted:
            names = ("magic", "format", "codec", "dtype", "phase", "group", "numel", "plan", "step", "payload_bytes")
            pairs = zip(names, found, wanted, strict=True)
            odd = "; ".join(f"{n} is {f!r}, expected {w!r}" for n, f, w in pairs if f != w)
            raise WireError(f"step {stamp.step}, group {stamp.group}: message of rank {sender} does not fit: {odd}")
        if _CRC.unpack_from(self.header.numpy().data, _FIELDS.size)[0] != self._checksum():
            raise WireError(f"step {stamp.step}, group {stamp.group}: message of rank {sender} was damaged (CRC-32C)")
        if self.payload is not self.body:
            self.payload.copy_(self.body)

    def _fields(self, stamp: Stamp, numel: int) -> tuple[bytes, int, int, int, int, int, int, int, int, int]:
        return (
            MAGIC,
            FORMAT_VERSION,
            CODEC_IDS[stamp.codec],
            FLOAT32_ID,
            stamp.phase,
            stamp.group,
            numel,
            stamp.plan_version,
            stamp.step,
            self.body.numel(),
        )

    def _checksum(self) -> int:
        return ops.crc32c(self.body, seed=ops.crc32c(self.header[: _FIELDS.size]))
