"""A hash of the weights, which ranks compare every few steps: if they differ, the ranks train different models."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from cgx_ray.runtime_ext import ops

# Without a check in a step. No hash is 0.
NO_HASH = 0


class WeightCheck:
    """Hashes the weights in the first step, and once in each step that is a multiple of `every_steps`.

    CRC-32C finds any change within 32 bits of a layer, and misses one of 2^32 other changes.
    """

    def __init__(self, weights: Mapping[str, Tensor], every_steps: int) -> None:
        """
        weights      parameters by name, which all ranks should hold alike
        every_steps  0 for never
        """
        self._weights = dict(weights)
        self._every_steps = every_steps
        self._hashed_step = -1

    def hash_at(self, step: int) -> int:
        """Return a hash in [1, 2^63) at the first call in a step with a check, else NO_HASH.

        Call it while the weights are as they were in the forward pass. On a CUDA device it waits for the work before.
        """
        if not self._every_steps or step == self._hashed_step:
            return NO_HASH
        # After a restart the first step may have any number, and ranks may have loaded different weights.
        if step % self._every_steps and self._hashed_step >= 0:
            return NO_HASH
        self._hashed_step = step
        return hash_of(self._weights)


def hash_of(weights: Mapping[str, Tensor]) -> int:
    """Return a number in [1, 2^63) that is the same for the same weights in the same order."""
    digest = hashlib.blake2b(digest_size=8)
    for weight in weights.values():
        # One layer at a time: a copy on the host is as large as a layer, not as the model.
        bytes_N = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(struct.pack("<I", ops.crc32c(bytes_N)))
    # The agreement negates it, and 0 stands for no check.
    return max(int.from_bytes(digest.digest(), "little") >> 1, 1)
