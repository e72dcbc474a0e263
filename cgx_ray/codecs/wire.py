"""The 32 bytes that go before every payload whose receiver could hold another plan.

Little-endian: magic (2), format version (1), codec id (1), dtype id (1), phase (1), group (2), number of elements
(8), plan version (4), step (4), payload bytes (4), CRC-32C of the 28 bytes before it and of the payload (4).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from cgx_ray.errors import WireError
from cgx_ray.runtime_ext import ops

MAGIC = b"CG"
FORMAT_VERSION = 2
HEADER_BYTES = 32
# What its field in the header holds.
MAX_PAYLOAD_BYTES = 2**32 - 1
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


def new_message(payload_bytes: int) -> Tensor:
    """An uninitialised message with room for header and payload."""
    return torch.empty(HEADER_BYTES + payload_bytes, dtype=torch.uint8)


def payload_of(message: Tensor) -> Tensor:
    """The part behind the header, as a view."""
    return message[HEADER_BYTES:]


def seal(message: Tensor, stamp: Stamp, numel: int, payload: Tensor | None = None) -> None:
    """Write the header of a message whose payload is complete. `payload`: if it does not lie behind the header."""
    payload = payload_of(message) if payload is None else payload
    _FIELDS.pack_into(message.numpy().data, 0, *_fields(stamp, numel, payload))
    _CRC.pack_into(message.numpy().data, _FIELDS.size, _checksum(message, payload))


def check(message: Tensor, stamp: Stamp, numel: int, sender: int, payload: Tensor | None = None) -> None:
    """Raise WireError unless the message is whole and carries what `stamp` and `numel` say. `payload` as in `seal`."""
    payload = payload_of(message) if payload is None else payload
    found = _FIELDS.unpack_from(message.numpy().data, 0)
    wanted = _fields(stamp, numel, payload)
    if found != wanted:
        names = ("magic", "format", "codec", "dtype", "phase", "group", "numel", "plan", "step", "payload_bytes")
        odd = "; ".join(f"{n} is {f!r}, expected {w!r}" for n, f, w in zip(names, found, wanted, strict=True) if f != w)
        raise WireError(f"step {stamp.step}, group {stamp.group}: message of rank {sender} does not fit: {odd}")
    if _CRC.unpack_from(message.numpy().data, _FIELDS.size)[0] != _checksum(message, payload):
        raise WireError(f"step {stamp.step}, group {stamp.group}: message of rank {sender} was damaged (CRC-32C)")


def _fields(stamp: Stamp, numel: int, payload: Tensor) -> tuple[bytes, int, int, int, int, int, int, int, int, int]:
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
        payload.numel(),
    )


def _checksum(message: Tensor, payload: Tensor) -> int:
    return ops.crc32c(payload, seed=ops.crc32c(message[: _FIELDS.size]))
