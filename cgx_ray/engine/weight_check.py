"""Comparison of the ranks' weights every few steps: do all ranks train the same model?

A hash finds any difference. Where there is one, the ranks project their weights onto random directions, and so learn
how large it is without sending the weights.

Processors of different kinds round differently in the optimizer. All ranks get the same averages, so such a difference
does not feed on itself. It grows as a sum of roundings: with float32 by at most 6e-8 of the weights per step, and by
the square root of the number of steps if they are unbiased. A rank that has loaded other weights differs by about 1.

L layers, P projections, N elements
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from cgx_ray.codecs.codec import HOST
from cgx_ray.runtime_ext import ops
from cgx_ray.runtime_ext.streams import DONE, Mark, streams_of

T = TypeVar("T")

# Without a check in a step. No hash is 0.
NO_HASH = 0
# Largest difference that counts as rounding, relative to the norm of a layer: float32 gets there after 3e8 unbiased
# steps. One changed weight of a layer of 4,096 x 4,096 exceeds it if it changes by four standard deviations.
ROUNDING = 1e-3
# Of 16-bit weights, in their relative precision, as one step may round every weight the other way.
ROUNDINGS_16_BIT = 10
# Projections of a layer; the estimate of a norm is off by some 20 %.
NUM_PROJECTIONS = 16
# Columns of the matrix that a layer is seen as. It is projected by signs of its rows and of its columns.
NUM_COLUMNS = 1024
# Elements at a time: 2 MiB as float64, which a processor keeps in its cache.
PIECE_NUMEL = 256 << 10
# Elements that are hashed at a time on a device: 32 MiB as int64.
HASHED_NUMEL = 4 << 20
# Odd, so that a product with it is another one for each 64-bit number: 2^64 divided by the golden ratio.
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
# By size of an element, integers with its bits.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements that are averaged at a time: 32 MiB as float64.
AVERAGED_NUMEL = 4 << 20
# A layer that is near zero, as a bias of one element may be, was computed from larger numbers. So it counts as if its
# mean square was at least this share of the model's.
NEAR_ZERO = 1e-2


class WeightHash(NamedTuple):
    """A hash of the weights. If a device computes it, it is on the host after `written`."""

    value: int | Tensor = NO_HASH
    written: Mark = DONE

    def read(self) -> int:
        """Return the hash, in [1, 2^63), or NO_HASH."""
        return int(self.value)


NOT_HASHED = WeightHash()


class Drift(NamedTuple):
    """Difference of the ranks' weights in the layer where it is largest, relative to the norm of the layer.

    limit  up to which it counts as rounding
    """

    layer: str
    ratio: float
    limit: float


class WeightCheck:
    """Hashes the weights in the first step, and once in each step that is a multiple of `every_steps`.

    On the CPU, CRC-32C finds any change within 32 bits of a layer, and misses one of 2^32 other changes. See
    `hash_on_device` for others.
    """

    def __init__(self, weights: Mapping[str, Tensor], every_steps: int) -> None:
        """
        weights      parameters by name, which all ranks should hold alike
        every_steps  0 for never
        """
        self._weights = dict(weights)
        # What was hashed last.
        self._compared: Mapping[str, Tensor] = self._weights
        self._every_steps = every_steps
        self._hashed_step = -1

    def hash_at(self, step: int, since: int | None = None, anchor: Mapping[str, Tensor] | None = None) -> WeightHash:
        """Return the hash of the weights at the first call in a step with a check, else NO_HASH. Waits for no device.

        since   first step of a round that ends with `step`, by default `step` itself
        anchor  what all ranks had alike when the round began, by default the weights

        Call it while the weights are as they were in the forward pass.
        """
        # Hashes of the step before may still be compared, and these are what it has left.
        self._compared = anchor or self._weights
        if not self._every_steps or step == self._hashed_step:
            return NOT_HASHED
        # After a restart the first step may have any number, and ranks may have loaded different weights.
        newest = step // self._every_steps * self._every_steps
        if newest < (step if since is None else since) and self._hashed_step >= 0:
            return NOT_HASHED
        self._hashed_step = step
        devices = {weight.device for weight in self._compared.values()}
        if len(devices) > 1 or HOST in devices:
            return WeightHash(hash_of(self._compared))
        streams = streams_of(devices.pop())
        value_1 = streams.host_memory(1, torch.int64)
        streams.copy_each([(hash_on_device(self._compared), value_1)])
        return WeightHash(value_1, streams.mark())

    def bounds(self) -> Tensor:
        """Return numbers (int64) whose minima over ranks `drift` takes. Call it in a backward pass, from any thread."""
        for device in {weight.device for weight in self._compared.values()}:
            streams_of(device).wait_for_all()
        values_LP = torch.stack([_projected(weight.detach()) for weight in self._compared.values()])
        # NaN would come out smaller or larger than all numbers.
        values_LP.nan_to_num_(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        return torch.cat([_ordered(values_LP), _ordered(-values_LP)]).flatten()

    def drift(self, minima: Tensor) -> Drift:
        """Return how much the weights differ between ranks, the same on all of them.

        minima  over ranks, of what `bounds` returned
        """
        low_LP, high_LP = _ordered(minima.view(2, len(self._compared), -1)).view(torch.float64)
        high_LP = -high_LP
        # Weights with NaN or Inf are no longer known to be the same.
        spread_LP = (high_LP - low_LP).nan_to_num_(nan=math.inf, posinf=math.inf)
        squares = high_LP[:, -1].tolist()
        numel = sum(weight.numel() for weight in self._compared.values())
        mean_square = math.fsum(squares) / max(numel, 1)
        found = []
        for (name, weight), spread_P, square in zip(self._compared.items(), spread_LP.tolist(), squares, strict=True):
            # Sums of float64 could round differently on different processors.
            difference = math.sqrt(math.fsum(one * one for one in spread_P[:-1]) / NUM_PROJECTIONS)
            norm = math.sqrt(max(square, NEAR_ZERO * mean_square * weight.numel()))
            ratio = difference / norm if 0 < difference < math.inf else difference
            found.append(Drift(name, ratio, _limit(weight.dtype)))
        return max(found, key=lambda one: one.ratio / one.limit)

    def average(self, group: dist.ProcessGroup) -> None:
        """Replace the weights by their means over `group`, the same bits on all ranks. Call it before a forward pass.

        Sums are made in float64, so that weights of fewer bits that are the same on all ranks stay as they are.
        """
        for weights in in_batches(self._weights.values(), Tensor.numel):
            sum_N = torch.cat([weight.detach().reshape(-1).to(torch.float64) for weight in weights])
            dist.all_reduce(sum_N, group=group)
            sum_N /= group.size()
            for weight, mean_K in zip(weights, sum_N.split([weight.numel() for weight in weights]), strict=True):
                weight.detach().copy_(mean_K.view(weight.shape))


def hash_of(weights: Mapping[str, Tensor]) -> int:
    """Return a number in [1, 2^63) that is the same for the same weights in the same order."""
    digest = hashlib.blake2b(digest_size=8)
    for weight in weights.values():
        # One layer at a time: a copy on the host is as large as a layer, not as the model.
        bytes_N = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(struct.pack("<I", ops.crc32c(bytes_N)))
    # The agreement negates it, and 0 stands for no check.
    return max(int.from_bytes(digest.digest(), "little") >> 1, 1)


def hash_on_device(weights: Mapping[str, Tensor]) -> Tensor:
    """Return such a number, another one than `hash_of`, as (1,) int64 on the weights' device, which may run late.

    Each element is mixed with its place to 64 bits, and sums of these do not depend on the order in which the device
    adds. A change of one element changes the sum of its layer. Of other changes one in 2^63 is missed.
    """
    sums = []
    for weight in weights.values():
        flat_N = weight.detach().contiguous().reshape(-1)
        bits_N = flat_N.view(_INTEGERS[min(flat_N.element_size(), 8)])
        place_K = torch.arange(min(len(bits_N), HASHED_NUMEL), dtype=torch.int64, device=weight.device)
        pieces = enumerate(bits_N.split(HASHED_NUMEL))
        mixed = [_mixed(bits_K.long(), place_K[: len(bits_K)] + index * HASHED_NUMEL).sum() for index, bits_K in pieces]
        sums.append(torch.stack(mixed).sum())
    sum_L = torch.stack(sums)
    of_model = _mixed(sum_L, torch.arange(len(sums), dtype=torch.int64, device=sum_L.device)).sum()
    # The agreement negates it, and 0 stands for no check.
    return (of_model & torch.iinfo(torch.int64).max).clamp(min=1).view(1)


def _mixed(bits_N: Tensor, place_N: Tensor) -> Tensor:
    """Return for each element 64 bits that depend on all its bits and its place: others for other bits."""
    mixed_N = (bits_N + place_N * _ODD) * _ODD
    for _ in range(2):
        # The upper bits, without the sign that a shift of int64 repeats.
        mixed_N = (mixed_N ^ ((mixed_N >> 32) & 0xFFFFFFFF)) * _ODD
    return mixed_N


def _limit(dtype: torch.dtype) -> float:
    return max(ROUNDING, ROUNDINGS_16_BIT * torch.finfo(dtype).eps)


def _projected(weight: Tensor) -> Tensor:
    """Return P projections of a layer, and then its squared norm, in float64 on the host.

    Projection p of a matrix W is r_p W c_p, where r_p and c_p are random signs. The mean square of the differences of
    two layers' projections estimates the squared norm of the layers' difference (Johnson and Lindenstrauss 1984). If
    only one weight differs, it is that square.
    """
    flat_N = weight.reshape(-1)
    columns_PC = _signs("columns", NUM_COLUMNS).to(weight.device, torch.float64)
    rows_PR = _signs("rows", -(-flat_N.numel() // NUM_COLUMNS))
    found_P = torch.zeros(NUM_PROJECTIONS + 1, dtype=torch.float64, device=weight.device)
    num_rows = PIECE_NUMEL // NUM_COLUMNS
    for index, piece_K in enumerate(flat_N.split(PIECE_NUMEL)):
        values_K = piece_K.to(torch.float64)
        found_P[-1] += values_K.dot(values_K)
        if num_left := -len(values_K) % NUM_COLUMNS:
            values_K = torch.nn.functional.pad(values_K, (0, num_left))
        signs_PR = rows_PR[:, index * num_rows : (index + 1) * num_rows].to(weight.device, torch.float64)
        found_P[:-1] += (signs_PR @ values_K.view(-1, NUM_COLUMNS)).mul_(columns_PC).sum(1)
    return found_P.cpu()


def _signs(name: str, num: int) -> Tensor:
    """Return (P, num) random signs, int8, the same wherever this is called. The first `num` of more are others."""
    random = np.frombuffer(hashlib.shake_256(name.encode()).digest(NUM_PROJECTIONS * num // 8), dtype=np.uint8)
    return torch.from_numpy(2 * np.unpackbits(random).view(np.int8) - 1).view(NUM_PROJECTIONS, num)


def _ordered(values: Tensor) -> Tensor:
    """Return the bits of float64 numbers as int64 in the same order; of such int64 numbers, the bits of the former."""
    bits = values.view(torch.int64)
    return torch.where(bits < 0, bits ^ torch.iinfo(torch.int64).max, bits)


def in_batches(tensors: Iterable[T], numel: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield `tensors`, several together if they are small. `numel` returns the elements of one."""
    batch: list[T] = []
    num_elements = 0
    for one in tensors:
        if batch and num_elements + numel(one) > AVERAGED_NUMEL:
            yield batch
            batch, num_elements = [], 0
        batch.append(one)
        num_elements += numel(one)
    if batch:
        yield batch
