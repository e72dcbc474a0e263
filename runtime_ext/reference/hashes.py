"""Checksums, and random numbers that depend on a key and a counter only."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

_Number = TypeVar("_Number", int, Tensor)

_UINT32 = 0xFFFFFFFF
_CRC32C_POLYNOMIAL = 0x82F63B78


def crc32c(data: Tensor, seed: int) -> int:
    """Return the CRC-32C (Castagnoli) of `data`, uint8; `seed` is the CRC of the bytes before it."""
    crc = seed ^ _UINT32
    for byte in data.tolist():
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_CRC32C_POLYNOMIAL if crc & 1 else 0)
    return crc ^ _UINT32


def lowbias32(x: _Number, key: _Number | None = None) -> _Number:
    """Hash 32-bit numbers, an int or an int64 tensor, with the constants of Chris Wellons' lowbias32.

    `key` is added between the two multiplications. Added before them, two keys would give the same numbers in another
    order.
    """
    x = (x ^ x >> 16) * 0x7FEB352D & _UINT32
    if key is not None:
        x = x + key & _UINT32
    x = (x ^ x >> 15) * 0x846CA68B & _UINT32
    return x ^ x >> 16


def uniform(numel: int, key: int, device: torch.device) -> Tensor:
    """Return (N,) float32 in [0, 1): element i is a 16-bit half of the hash of i // 2 under the 32-bit `key`."""
    index_N = torch.arange(numel, dtype=torch.int64, device=device)
    key_1 = torch.tensor([key], dtype=torch.int64, device=device)
    hash_N = lowbias32((index_N >> 1 & _UINT32) ^ key_1, lowbias32(key_1))
    half_N = torch.where(index_N & 1 == 1, hash_N >> 16, hash_N & 0xFFFF)
    return half_N.to(torch.float32) * 2.0**-16


def random_below(key: int, limit: int) -> int:
    """Return a number in [0, limit), the scaled hash of `key`; 0 if `limit` is 0."""
    return lowbias32(key) * limit >> 32
