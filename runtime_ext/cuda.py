"""Launches of the CUDA kernels that `ops` calls: their names, arguments and number of blocks.

N elements of a gradient. `ops` documents the arguments. Tensors that are not contiguous are copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import cuda_launch

# 8 threads work on a quantization bucket, as csrc/cuda/bucket.h says.
_BLOCK_SIZE = 256
_BUCKETS_PER_BLOCK = _BLOCK_SIZE // 8

# The struct of csrc/cuda/bucket.h that a launch is given by value: start, numel, payload and key of each row, and the
# number of rows, in 64 bits each. CuPy takes one element; of one with named fields it would describe all fields, which
# takes longer than the launch.
MAX_ROWS = 32
_ROW_WORDS = 4
ROWS = np.dtype((np.void, 8 * (MAX_ROWS * _ROW_WORDS + 1)))


class KernelRow(NamedTuple):
    """A part of a gradient and its payload, as the functions of `ops` for one of them take them."""

    grad_N: Tensor  # noqa: N815 - tensors end in their dimensions
    payload: Tensor
    key: int = 0
    residual_N: Tensor | None = None  # noqa: N815
    next_N: Tensor | None = None  # noqa: N815


def build_qsgd(bits: int, device: torch.device) -> None:
    """Build what the qsgd functions launch."""
    cuda_launch.build("qsgd", device, _bits_macro(bits))


def build_sign(device: torch.device) -> None:
    """Build what the sign functions launch."""
    cuda_launch.build("sign", device)


def qsgd_encode(rows: Iterable[KernelRow], *, bits: int, bucket_size: int, grid: int, stochastic: bool) -> None:
    options = (np.int32(bucket_size), np.int32(grid), np.int32(stochastic))
    _encode("qsgd_encode", rows, options, bucket_size, _bits_macro(bits))


def qsgd_decode(rows: Iterable[KernelRow], *, bits: int, bucket_size: int, grid: int, add: bool) -> None:
    options = (np.int32(bucket_size), np.int32(grid), np.int32(add))
    _decode("qsgd_decode", rows, options, bucket_size, _bits_macro(bits))


def qsgd_sum(
    own: KernelRow,
    payloads: Sequence[Tensor],
    num_ranks: int,
    *,
    bits: int,
    bucket_size: int,
    grid: int,
    stochastic: bool,
) -> None:
    options = (np.int32(bucket_size), np.int32(grid), np.uint32(own.key), np.int32(stochastic))
    _sum("qsgd_sum", own, payloads, num_ranks, options, bucket_size, _bits_macro(bits))


def sign_encode(rows: Iterable[KernelRow], *, bucket_size: int, kind: int) -> None:
    _encode("sign_encode", rows, (np.int32(bucket_size), np.int32(kind)), bucket_size)


def sign_decode(rows: Iterable[KernelRow], *, bucket_size: int, kind: int, add: bool) -> None:
    _decode("sign_decode", rows, (np.int32(bucket_size), np.int32(kind), np.int32(add)), bucket_size)


def sign_sum(own: KernelRow, payloads: Sequence[Tensor], num_ranks: int, *, bucket_size: int, kind: int) -> None:
    _sum("sign_sum", own, payloads, num_ranks, (np.int32(bucket_size), np.int32(kind)), bucket_size)


def _encode(
    prefix: str, rows: Iterable[KernelRow], options: tuple[np.generic, ...], bucket_size: int, define: str | None = None
) -> None:
    for some in _of_launches(rows):
        kernel = f"{prefix}_{cuda_launch.dtype_name(some[0].grad_N)}"
        grad_N, starts = _span([cuda_launch.read(row.grad_N) for row in some])
        residual_N, residual_starts = _span([cuda_launch.read(row.residual_N) for row in some])
        parts = [part for row in some for part in (row.next_N, row.payload)]
        with cuda_launch.written(*parts) as to_parts:
            next_N, next_starts = _span(to_parts[::2])
            assert all(other in (starts, []) for other in (residual_starts, next_starts)), "memory lies otherwise"
            out, offsets = _span(to_parts[1::2])
            table = _table(some, starts, offsets)
            num_blocks = _num_blocks(some, bucket_size, kernel, define)
            args = (table, grad_N, residual_N, next_N, out, *options)
            cuda_launch.launch(kernel, num_blocks, _BLOCK_SIZE, *args, define=define)


def _decode(
    kernel: str, rows: Iterable[KernelRow], options: tuple[np.generic, ...], bucket_size: int, define: str | None = None
) -> None:
    for some in _of_launches(rows):
        payload, offsets = _span([cuda_launch.read(row.payload) for row in some])
        with cuda_launch.written(*(row.grad_N for row in some)) as to_parts:
            out_N, starts = _span(to_parts)
            args = (_table(some, starts, offsets), payload, out_N, *options)
            num_blocks = _num_blocks(some, bucket_size, kernel, define)
            cuda_launch.launch(kernel, num_blocks, _BLOCK_SIZE, *args, define=define)


def _sum(
    kernel: str,
    own: KernelRow,
    payloads: Sequence[Tensor],
    num_ranks: int,
    options: tuple[np.generic, ...],
    bucket_size: int,
    define: str | None = None,
) -> None:
    numel = own.grad_N.numel()
    if numel == 0:
        return
    parts, offsets = _span(payloads)
    pitch = offsets[1] if len(offsets) > 1 else 0
    assert offsets == [index * pitch for index in range(len(payloads))], "payloads must lie at equal distances"
    messages = (parts, np.int64(pitch), np.int32(len(payloads)), np.int32(num_ranks))
    args = (own.grad_N, own.residual_N, own.next_N, np.int64(numel), *messages, own.payload, *options)
    num_blocks = _num_blocks([own], bucket_size, kernel, define)
    cuda_launch.launch(kernel, num_blocks, _BLOCK_SIZE, *args, define=define)


def _of_launches(rows: Iterable[KernelRow]) -> Iterator[list[KernelRow]]:
    """Yield the rows that have elements: those of one launch lie in the same memory, without gaps."""
    filled = [row for row in rows if row.grad_N.numel()]
    if len(filled) == 1:
        yield filled
        return
    for _, group in itertools.groupby(filled, _memory_of):
        same = list(group)
        yield from (same[first : first + MAX_ROWS] for first in range(0, len(same), MAX_ROWS))


def _memory_of(row: KernelRow) -> object:
    """Return what is equal for rows of one launch."""
    tensors = [row.grad_N, row.payload, row.residual_N, row.next_N]
    if not all(tensor is None or tensor.is_contiguous() for tensor in tensors):
        return object()
    return row.grad_N.dtype, *(tensor is not None and tensor.untyped_storage().data_ptr() for tensor in tensors)


def _span(parts: Sequence[Tensor | None]) -> tuple[Tensor | None, list[int]]:
    """Return one tensor over all `parts`, and where each begins in it."""
    tensors = [part for part in parts if part is not None]
    if not tensors:
        return None, []
    if len(tensors) == 1:
        return tensors[0], [0]
    first = min(part.storage_offset() for part in tensors)
    last = max(part.storage_offset() + part.numel() for part in tensors)
    starts = [int(part.storage_offset() - first) for part in tensors]
    return tensors[0].as_strided((last - first,), (1,), first), starts


def _table(rows: Sequence[KernelRow], starts: Sequence[int], payloads: Sequence[int]) -> npt.NDArray[np.void]:
    table = np.zeros(MAX_ROWS * _ROW_WORDS + 1, np.int64)
    each = zip(rows, starts, payloads, strict=True)
    words = [word for row, start, payload in each for word in (start, row.grad_N.numel(), payload, row.key)]
    table[: len(words)] = words
    table[-1] = len(rows)
    return table.view(ROWS)


def _num_blocks(rows: Sequence[KernelRow], bucket_size: int, kernel: str, define: str | None) -> int:
    """Return a number of blocks that the rows can share evenly."""
    num_buckets = -(-max(row.grad_N.numel() for row in rows) // bucket_size)
    most = cuda_launch.max_blocks(kernel, _BLOCK_SIZE, rows[0].grad_N.device, define)
    return len(rows) * min(-(-num_buckets // _BUCKETS_PER_BLOCK), max(1, most // len(rows)))


def _bits_macro(bits: int) -> str:
    return f"CGX_BITS={bits}"
