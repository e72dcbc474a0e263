"""Indices of kept elements: random ones, and their smallest layout in a message.

K kept elements, M bits of a message
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .bits import pack_levels, unpack_levels
from .hashes import lowbias32


def random_indices(numel: int, key: int, index_K: Tensor) -> None:
    """Write one index from each of K near-equal runs of [0, numel), ascending. The same key gives the same indices."""
    num_kept = index_K.numel()
    i_K = torch.arange(num_kept, dtype=torch.int64, device=index_K.device)
    begin_K, end_K = i_K * numel // max(num_kept, 1), (i_K + 1) * numel // max(num_kept, 1)
    key_1 = torch.tensor([key], dtype=torch.int64, device=index_K.device)
    hash_K = lowbias32(i_K ^ key_1, lowbias32(key_1))
    index_K.copy_(begin_K + (hash_K * (end_K - begin_K) >> 32))


@functools.lru_cache(maxsize=1 << 10)
def index_layout(numel: int, num_kept: int) -> tuple[str, int, int]:
    """Return (kind, low_bits, bytes) of the smallest layout for `num_kept` ascending indices below `numel`.

    "offsets"  Elias-Fano code: the gradient is cut into blocks of 2^low_bits elements. First come the packed offsets of
               all indices in their blocks; then, per block, a one for each of its indices and a zero. Both parts fill
               whole 32-bit words.
    "bitmap"   bit i is 1 if element i is kept
    "raw"      int32

    The number of bytes depends on `numel` and `num_kept` only, so receivers know it.
    """
    if num_kept == 0:
        return "raw", 0, 0
    low_bits = max((numel // num_kept).bit_length() - 1, 0)
    num_high = num_kept + (numel - 1 >> low_bits) + 1
    sizes = {
        "offsets": 4 * (-(-num_kept * low_bits // 32) + -(-num_high // 32)),
        "bitmap": 4 * -(-numel // 32),
        "raw": 4 * num_kept,
    }
    kind = min(sizes, key=lambda name: sizes[name])
    return kind, low_bits, sizes[kind]


def pack_indices(index_K: Tensor, count: int, numel: int, out: Tensor) -> None:
    """Write the first `count` of `index_K` into `out` in the layout `index_layout(numel, K)`; unused bits are zero.

    An index outside of [0, `numel`) sets no bit in a bitmap and no one in a block.
    """
    num_kept = index_K.numel()
    kind, low_bits, num_bytes = index_layout(numel, num_kept)
    count = min(max(count, 0), num_kept)
    index = index_K[:count].long()
    is_inside = (index >= 0) & (index < numel)
    out.zero_()
    if kind == "raw":
        out[: 4 * count] = index_K[:count].contiguous().view(torch.uint8)
    elif kind == "bitmap":
        bit_M = torch.zeros(8 * num_bytes, dtype=torch.uint8, device=out.device)
        bit_M[index[is_inside]] = 1
        out.copy_(pack_levels(bit_M, 1))
    else:
        low_bytes = 4 * -(-num_kept * low_bits // 32)
        shift = torch.arange(low_bits, dtype=torch.int64, device=out.device)
        bit_M = torch.zeros(8 * low_bytes, dtype=torch.uint8, device=out.device)
        bit_M[: count * low_bits] = (index[:, None] >> shift & 1).view(-1).to(torch.uint8)
        out[:low_bytes] = pack_levels(bit_M, 1)
        high_M = torch.zeros(8 * (num_bytes - low_bytes), dtype=torch.uint8, device=out.device)
        high = (index >> low_bits) + torch.arange(count, dtype=torch.int64, device=out.device)
        high_M[high[is_inside]] = 1
        out[low_bytes:] = pack_levels(high_M, 1)


def unpack_indices(packed: Tensor, count: int, numel: int, index_K: Tensor) -> None:
    """Undo `pack_indices` and write zeros after the first `count` of `index_K`.

    Raises ValueError unless `packed` holds `count` indices that ascend below `numel`.
    """
    num_kept = index_K.numel()
    kind, low_bits, _ = index_layout(numel, num_kept)
    if not 0 <= count <= num_kept:
        raise ValueError(f"the message says that it holds {count} indices; it has room for {num_kept}")
    if kind == "raw":
        index = packed[: 4 * count].clone().view(torch.int32).long()
    elif kind == "bitmap":
        index = unpack_levels(packed, 8 * packed.numel(), 1).nonzero().view(-1)
    else:
        low_bytes = 4 * -(-num_kept * low_bits // 32)
        bit_KW = unpack_levels(packed[:low_bytes], num_kept * low_bits, 1).view(num_kept, low_bits).long()
        low_K = (bit_KW << torch.arange(low_bits, dtype=torch.int64, device=packed.device)).sum(1)
        ones = unpack_levels(packed[low_bytes:], 8 * (packed.numel() - low_bytes), 1).nonzero().view(-1)
        high = ones - torch.arange(ones.numel(), dtype=torch.int64, device=packed.device)
        index = (high << low_bits) + low_K[: ones.numel()] if ones.numel() == count else high
    is_below = index.numel() == count and (count == 0 or 0 <= int(index[0]) <= int(index[-1]) < numel)
    if not is_below or bool((index[1:] <= index[:-1]).any()):
        raise ValueError(f"the message does not hold {count} indices that ascend below {numel}")
    index_K.zero_()
    index_K[:count] = index.to(torch.int32)


def scatter_add(index_K: Tensor, value_K: Tensor, count: int, out_N: Tensor) -> None:
    """Add the first `count` values to `out_N` at their indices, which are distinct. Indices outside are skipped."""
    count = min(max(count, 0), index_K.numel())
    is_inside = (index_K[:count] >= 0) & (index_K[:count] < out_N.numel())
    out_N.index_add_(0, index_K[:count][is_inside], value_K[:count][is_inside])


def scatter_zero(index_K: Tensor, count: int, out_N: Tensor) -> None:
    """Set `out_N` to zero at the first `count` indices. Indices outside are skipped."""
    index = index_K[: min(max(count, 0), index_K.numel())].long()
    out_N.index_fill_(0, index[(index >= 0) & (index < out_N.numel())], 0.0)
