"""The specification of every kernel in plain PyTorch, on any device. Arguments are checked in `ops`.

N elements of a gradient, K kept ones, B quantization buckets, S elements of a bucket, L lanes of a sum
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

MAX_MIN, L2, LINF = range(3)  # grids of qsgd
EF_SIGNSGD, ONEBIT = range(2)  # kinds of one-bit codec
HISTOGRAM_SHIFT = 19  # a histogram's bin is the exponent and the 4 bits after it
NUM_BINS = 1 << 12

_Number = TypeVar("_Number", int, Tensor)

_UINT32 = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF
_NAN_MAGNITUDE = 0x7F800001
_INF_MAGNITUDE = 0x7F800000
_CRC32C_POLYNOMIAL = 0x82F63B78
_NUM_LANES = 32


def crc32c(data: Tensor, seed: int) -> int:
    """CRC-32C (Castagnoli) of `data`, going on from `seed`, the CRC of what came before."""
    crc = seed ^ _UINT32
    for byte in data.tolist():
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_CRC32C_POLYNOMIAL if crc & 1 else 0)
    return crc ^ _UINT32


def lowbias32(x: _Number, key: _Number | None = None) -> _Number:
    """Mix 32-bit numbers, an int or held as int64, with the constants of Chris Wellons' lowbias32.

    `key` enters between the two multiplications: there it makes the sequences of two keys differ by more
    than their order.
    """
    x = (x ^ x >> 16) * 0x7FEB352D & _UINT32
    if key is not None:
        x = x + key & _UINT32
    x = (x ^ x >> 15) * 0x846CA68B & _UINT32
    return x ^ x >> 16


def uniform(numel: int, key: int, device: torch.device) -> Tensor:
    """(N,) float32 in [0, 1): element i is a 16-bit half of the hash of i // 2 under the 32-bit `key`."""
    index_N = torch.arange(numel, dtype=torch.int64, device=device)
    key_1 = torch.tensor([key], dtype=torch.int64, device=device)
    hash_N = lowbias32((index_N >> 1 & _UINT32) ^ key_1, lowbias32(key_1))
    half_N = torch.where(index_N & 1 == 1, hash_N >> 16, hash_N & 0xFFFF)
    return half_N.to(torch.float32) * 2.0**-16


def add_feedback(grad_N: Tensor, residual_N: Tensor | None) -> Tensor:
    """The error-fed gradient, float32: `grad_N` plus what is owed, in one float32 addition."""
    grad_N = grad_N.detach().to(torch.float32)
    return grad_N if residual_N is None else grad_N + residual_N


def qsgd_encode(
    grad_N: Tensor, out: Tensor, *, bits: int, bucket_size: int, grid: int, key: int, stochastic: bool
) -> None:
    """Encode `grad_N`, float32, into `out`: every bucket's grid, then the packed levels.

    QSGD (Alistarh et al. 2017); MAX_MIN grids as CGX ships them: lo and scale; L2 as QSGD's formula and LINF as
    TernGrad's (Wen et al. 2017): the scale alone, levels from -top/2 to top/2. Departure: lo and scale are
    bfloat16, rounded outwards so that the grid covers the bucket.
    """
    numel = grad_N.numel()
    if numel == 0:
        return
    num_buckets = -(-numel // bucket_size)
    lo_B, scale_B = _make_grids(grad_N, bits, bucket_size, grid)
    words = [_bf16_bits(lo_B), _bf16_bits(scale_B)] if grid == MAX_MIN else [_bf16_bits(scale_B)]
    grid_bytes = grid_bytes_a_bucket(grid) * num_buckets
    out[:grid_bytes] = torch.stack(words, 1).view(-1).view(torch.uint8)

    inverse_B = torch.ones_like(scale_B) / scale_B
    # NaN and Inf fail the comparison: scale 0, a denormal scale and a NaN bucket send level 0.
    usable_B = inverse_B < torch.inf
    lo_N, inverse_N, usable_N = (_spread(x_B, bucket_size, numel) for x_B in (lo_B, inverse_B, usable_B))
    # Around zero, zero must be a level exactly, which lo * inverse need not be.
    t_N = (grad_N - lo_N) * inverse_N if grid == MAX_MIN else grad_N * inverse_N + top_level(bits, grid) // 2
    rounding_N = uniform(numel, key, grad_N.device) if stochastic else torch.full_like(t_N, 0.5)
    level_N = (t_N + rounding_N).floor().clamp(0, top_level(bits, grid))
    # A symmetric grid without a usable scale sends the level that stands for zero.
    unusable = 0 if grid == MAX_MIN else top_level(bits, grid) // 2
    level_N = torch.where(usable_N, level_N, torch.full_like(level_N, unusable)).to(torch.uint8)
    out[grid_bytes:] = pack_levels(level_N, bits)


def qsgd_decode(payload: Tensor, out_N: Tensor, *, bits: int, bucket_size: int, grid: int, add: bool) -> None:
    """Write `lo + level * scale` to `out_N`, or add it: multiply, then add, float32, never fused."""
    numel = out_N.numel()
    if numel == 0:
        return
    num_buckets = -(-numel // bucket_size)
    grid_bytes = grid_bytes_a_bucket(grid) * num_buckets
    # A slice may start at an odd address, which view(int16) refuses.
    grid_BW = payload[:grid_bytes].clone().view(torch.bfloat16).view(num_buckets, -1).to(torch.float32)
    scale_B = grid_BW[:, -1]
    lo_B = grid_BW[:, 0] if grid == MAX_MIN else -(top_level(bits, grid) // 2) * scale_B
    level_N = unpack_levels(payload[grid_bytes:], numel, bits).to(torch.float32)
    _write(_spread(lo_B, bucket_size, numel) + level_N * _spread(scale_B, bucket_size, numel), out_N, add)


def top_level(bits: int, grid: int) -> int:
    """The largest level. Grids around zero have an odd number of levels, so that zero is one of them."""
    return (1 << bits) - 1 if grid == MAX_MIN else (1 << bits) - 2


def grid_bytes_a_bucket(grid: int) -> int:
    return 4 if grid == MAX_MIN else 2


def sign_encode(grad_N: Tensor, out: Tensor, *, bucket_size: int, kind: int) -> None:
    """Encode `grad_N`, float32, into `out`: every bucket's means, float32, then one bit an element, 1 for sign +.

    EF_SIGNSGD (Karimireddy et al. 2019, Algorithm 2): the mean magnitude. ONEBIT (Seide et al. 2014): the mean of
    the negative and that of the other elements. Departure: a bucket where they scale a layer or a column.
    """
    numel = grad_N.numel()
    if numel == 0:
        return
    grad_BS = _to_buckets(grad_N, bucket_size)
    is_real_BS = _to_buckets(torch.ones_like(grad_N), bucket_size) == 1
    is_positive_BS = (grad_BS.view(torch.int32) >= 0) & is_real_BS
    zero_BS = torch.zeros_like(grad_BS)
    if kind == EF_SIGNSGD:
        means = [_lane_sum(grad_BS.abs()) / is_real_BS.sum(1)]
    else:
        is_negative_BS = ~is_positive_BS & is_real_BS
        means = [
            # No element of one sign: 0 / 1.
            _lane_sum(torch.where(chosen_BS, grad_BS, zero_BS)) / chosen_BS.sum(1).clamp(min=1)
            for chosen_BS in (is_negative_BS, is_positive_BS)
        ]
    mean_BW = torch.stack(means, 1)
    # One NaN for all, because which one a sum of NaNs gives depends on the machine.
    mean_BW = torch.where(mean_BW.isnan(), torch.nan, mean_BW)
    mean_bytes = sign_bytes_a_bucket(kind) * grad_BS.shape[0]
    out[:mean_bytes] = mean_BW.view(-1).view(torch.uint8)
    out[mean_bytes:] = pack_levels(is_positive_BS.view(-1)[:numel].to(torch.uint8), 1)


def sign_decode(payload: Tensor, out_N: Tensor, *, bucket_size: int, kind: int, add: bool) -> None:
    """Write each element's mean to `out_N`, or add it."""
    numel = out_N.numel()
    if numel == 0:
        return
    mean_bytes = sign_bytes_a_bucket(kind) * -(-numel // bucket_size)
    mean_BW = payload[:mean_bytes].clone().view(torch.float32).view(-1, 2 if kind == ONEBIT else 1)
    low_B, high_B = (mean_BW[:, 0], mean_BW[:, 1]) if kind == ONEBIT else (-mean_BW[:, 0], mean_BW[:, 0])
    is_positive_N = unpack_levels(payload[mean_bytes:], numel, 1) == 1
    low_N, high_N = _spread(low_B, bucket_size, numel), _spread(high_B, bucket_size, numel)
    _write(torch.where(is_positive_N, high_N, low_N), out_N, add)


def sign_bytes_a_bucket(kind: int) -> int:
    return 8 if kind == ONEBIT else 4


def magnitudes(grad_N: Tensor) -> Tensor:
    """(N,) int32 in the order of |x|: NaN counts as largest (all NaNs alike), then Inf."""
    return (grad_N.view(torch.int32) & _MAGNITUDE).clamp(max=_NAN_MAGNITUDE)


def topk_select(grad_N: Tensor, index_K: Tensor, value_K: Tensor) -> None:
    """Write the K elements of `grad_N`, float32, that are largest in magnitude, in ascending order of index.

    Of equal magnitudes the lowest indices win.
    """
    order_N = torch.sort(magnitudes(grad_N), descending=True, stable=True).indices
    kept_K = order_N[: index_K.numel()].sort().values
    index_K.copy_(kept_K)
    value_K.copy_(grad_N[kept_K])


def magnitude_histogram(grad_N: Tensor) -> Tensor:
    """(NUM_BINS,) int64: how many elements of `grad_N`, float32, have a magnitude with these 12 high bits."""
    return torch.bincount(magnitudes(grad_N) >> HISTOGRAM_SHIFT, minlength=NUM_BINS)


def bisect_thresholds(grad_N: Tensor, num_kept: int, num_rounds: int) -> tuple[int, int]:
    """(sure, maybe): at most `num_kept` magnitudes reach `sure`, more reach `maybe` unless it is 0.

    MSTopk (Shi et al. 2021, Algorithm 1). Departure: it halves the range of the bit patterns, 2^31, where the paper
    halves the range from the mean to the largest magnitude: no rounding, and NaN and Inf have their place.
    """
    magnitude_N = magnitudes(grad_N)
    sure, maybe = 1 << 31, 0
    for _ in range(num_rounds):
        middle = (sure + maybe) // 2
        if int((magnitude_N >= middle).sum()) <= num_kept:
            sure = middle
        else:
            maybe = middle
    return sure, maybe


def sidco_threshold(histogram: Tensor, ratios: Sequence[float], num_kept: int) -> int:
    """Magnitude that should leave the share prod(exp(-ratio)) of the elements, after one exponential fit a stage.

    SIDCo (Abdelmoniem et al. 2021, Algorithm 1, exponential fit): eta += mean excess over eta * ln(1 / share of the
    stage). `ratios` are these logarithms. Departures: means come from the histogram (a bin counts as its middle), in
    float64 and in the order of the bins, so they depend on no order of summation. Inf and NaN are not fitted. The
    paper adapts the number of stages; here, where the bins above the threshold's hold less than half of `num_kept`
    elements or more than twice as many, the threshold is the lower edge of the bin of the `num_kept`-th largest. Zeros
    never pass.
    """
    num_finite = _INF_MAGNITUDE >> HISTOGRAM_SHIFT
    middle_bits = (torch.arange(num_finite, dtype=torch.int32) << HISTOGRAM_SHIFT) + (1 << HISTOGRAM_SHIFT - 1)
    middles = middle_bits.view(torch.float32).double().tolist()
    counts = histogram[:num_finite].tolist()
    eta = 0.0
    for ratio in ratios:
        total, excess = 0, 0.0
        for count, middle in zip(counts, middles, strict=True):
            if middle > eta:
                total += count
                excess = excess + count * (middle - eta)
        if total == 0:
            break
        eta = eta + excess / total * ratio
    # Beyond the largest float32 only Inf and NaN are left.
    bits = int(torch.tensor([eta], dtype=torch.float64).to(torch.float32).view(torch.int32))
    num_above = int(histogram[(bits >> HISTOGRAM_SHIFT) + 1 :].sum())
    if 2 * num_above < num_kept or num_above > 2 * num_kept:
        num_reaching = histogram.flip(0).cumsum(0).tolist()
        bits = NUM_BINS - 1 - bisect.bisect_left(num_reaching, num_kept) << HISTOGRAM_SHIFT
    return max(bits, 1)


def collect(grad_N: Tensor, thresholds: tuple[int, int], key: int, index_K: Tensor, value_K: Tensor) -> int:
    """Write what `thresholds` (sure, maybe) let through, ascending in index, zeros behind it; returns how many.

    Every magnitude >= sure is written; at most K are. Of those in [maybe, sure) as many as there is room for: a run of
    them, in the order of the indices and around the end, that starts where `key` says.
    """
    sure, maybe = thresholds
    magnitude_N = magnitudes(grad_N).long()
    is_sure_N = magnitude_N >= sure
    is_maybe_N = (magnitude_N >= maybe) & ~is_sure_N
    num_maybe = int(is_maybe_N.sum())
    room = index_K.numel() - int(is_sure_N.sum())
    assert room >= 0, "more than K elements are sure"
    rank_N = is_maybe_N.cumsum(0) - 1
    start = random_below(key, num_maybe)
    chosen_N = is_sure_N | (is_maybe_N & ((rank_N - start) % max(num_maybe, 1) < room))
    kept = chosen_N.nonzero().view(-1)
    index_K.zero_()
    value_K.zero_()
    index_K[: kept.numel()] = kept.to(torch.int32)
    value_K[: kept.numel()] = grad_N[kept]
    return kept.numel()


def random_indices(numel: int, key: int, index_K: Tensor) -> None:
    """Write one index from each of K near-equal runs of [0, numel): ascending, the same for the same key."""
    num_kept = index_K.numel()
    i_K = torch.arange(num_kept, dtype=torch.int64, device=index_K.device)
    begin_K, end_K = i_K * numel // max(num_kept, 1), (i_K + 1) * numel // max(num_kept, 1)
    key_1 = torch.tensor([key], dtype=torch.int64, device=index_K.device)
    hash_K = lowbias32(i_K ^ key_1, lowbias32(key_1))
    index_K.copy_(begin_K + (hash_K * (end_K - begin_K) >> 32))


@functools.lru_cache(maxsize=1 << 10)
def index_layout(numel: int, num_kept: int) -> tuple[str, int, int]:
    """(kind, low_bits, bytes) of the smallest way to write `num_kept` ascending indices below `numel`.

    "offsets"  Elias-Fano code, that is the offset of each index in its block of 2^low_bits elements, packed, then for
               each block as many ones as it has indices and a zero. Both parts fill whole 32-bit words.
    "bitmap"   bit i is 1 if i is kept
    "raw"      int32
    The number of bytes depends on `numel` and `num_kept` only, so that receivers know it.
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
    """Write the first `count` of `index_K` into `out` as `index_layout(numel, K)` says; unused bits are zero.

    An index outside of [0, `numel`) gets no one in a bitmap or a block.
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
        shift = torch.arange(low_bits, device=out.device)
        bit_M = torch.zeros(8 * low_bytes, dtype=torch.uint8, device=out.device)
        bit_M[: count * low_bits] = (index[:, None] >> shift & 1).view(-1).to(torch.uint8)
        out[:low_bytes] = pack_levels(bit_M, 1)
        high_M = torch.zeros(8 * (num_bytes - low_bytes), dtype=torch.uint8, device=out.device)
        high = (index >> low_bits) + torch.arange(count, device=out.device)
        high_M[high[is_inside]] = 1
        out[low_bytes:] = pack_levels(high_M, 1)


def unpack_indices(packed: Tensor, count: int, numel: int, index_K: Tensor) -> None:
    """Undo `pack_indices`; `index_K` behind `count` is zero. Raises ValueError unless `count` indices ascend below
    `numel`."""
    num_kept = index_K.numel()
    kind, low_bits, _ = index_layout(numel, num_kept)
    if not 0 <= count <= num_kept:
        raise ValueError(f"{count} indices in a message for at most {num_kept}")
    if kind == "raw":
        index = packed[: 4 * count].clone().view(torch.int32).long()
    elif kind == "bitmap":
        index = unpack_levels(packed, 8 * packed.numel(), 1).nonzero().view(-1)
    else:
        low_bytes = 4 * -(-num_kept * low_bits // 32)
        bit_KW = unpack_levels(packed[:low_bytes], num_kept * low_bits, 1).view(num_kept, low_bits).long()
        low_K = (bit_KW << torch.arange(low_bits, device=packed.device)).sum(1)
        ones = unpack_levels(packed[low_bytes:], 8 * (packed.numel() - low_bytes), 1).nonzero().view(-1)
        high = ones - torch.arange(ones.numel(), device=packed.device)
        index = (high << low_bits) + low_K[: ones.numel()] if ones.numel() == count else high
    is_below = index.numel() == count and (count == 0 or 0 <= int(index[0]) <= int(index[-1]) < numel)
    if not is_below or bool((index[1:] <= index[:-1]).any()):
        raise ValueError(f"the message does not hold {count} indices that ascend below {numel}")
    index_K.zero_()
    index_K[:count] = index.to(torch.int32)


def scatter_add(index_K: Tensor, value_K: Tensor, count: int, out_N: Tensor) -> None:
    """Add the first `count` values to `out_N` at their indices, which are distinct; those outside are left out."""
    count = min(max(count, 0), index_K.numel())
    is_inside = (index_K[:count] >= 0) & (index_K[:count] < out_N.numel())
    out_N.index_add_(0, index_K[:count][is_inside], value_K[:count][is_inside])


def pack_levels(level_N: Tensor, bits: int) -> Tensor:
    """Pack uint8 levels: element i at bit i * bits, little-endian, unused bits zero."""
    bit_NW = level_N[:, None] >> torch.arange(bits, dtype=torch.uint8, device=level_N.device) & 1
    bit_M = torch.nn.functional.pad(bit_NW.view(-1), (0, -bit_NW.numel() % 8))
    shift_8 = torch.arange(8, dtype=torch.uint8, device=level_N.device)
    return (bit_M.view(-1, 8) << shift_8).sum(1, dtype=torch.uint8)


def unpack_levels(packed: Tensor, numel: int, bits: int) -> Tensor:
    """Undo `pack_levels`."""
    shift_8 = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bit_NW = (packed[:, None] >> shift_8 & 1).view(-1)[: numel * bits].view(numel, bits)
    return (bit_NW << shift_8[:bits]).sum(1, dtype=torch.uint8)


def _make_grids(grad_N: Tensor, bits: int, bucket_size: int, grid: int) -> tuple[Tensor, Tensor]:
    """(lo, scale) of every bucket, float32, scale exact in bfloat16; both NaN if decoding would overflow."""
    top = top_level(bits, grid)
    if grid == MAX_MIN:
        # Filling up with the last element changes neither min nor max.
        grad_BS = _to_buckets(grad_N, bucket_size, fill=grad_N[-1:])
        # As integers in the order of the floats, min and max are exact also for -0 against +0 and see every NaN.
        ordered_BS = _flip_negative(grad_BS.view(torch.int32))
        min_B = _flip_negative(ordered_BS.amin(1)).view(torch.float32)
        max_B = _flip_negative(ordered_BS.amax(1)).view(torch.float32)
        lo_B = _bf16_floor(min_B)
        top_B = torch.full_like(lo_B, top)  # a tensor: CUDA divides by a scalar through its reciprocal
        scale_B = _bf16_ceil((max_B - lo_B) / top_B)
        finite_B = torch.isfinite(max_B - min_B) & torch.isfinite(lo_B + top_B * scale_B)
    else:
        norm_B = _norms(_to_buckets(grad_N, bucket_size), grid)
        half_B = torch.full_like(norm_B, top // 2)
        scale_B = _bf16_ceil(norm_B / half_B)
        lo_B = -half_B * scale_B
        finite_B = torch.isfinite(norm_B) & torch.isfinite(2 * half_B * scale_B)
    nan_B = torch.full_like(lo_B, torch.nan)
    return torch.where(finite_B, lo_B, nan_B), torch.where(finite_B, scale_B, nan_B)


def _norms(grad_BS: Tensor, grid: int) -> Tensor:
    """(B,) largest magnitude, or Euclidean norm, of every bucket; not finite if an element is not."""
    largest_B = magnitudes(grad_BS).amax(1)
    if grid == LINF:
        return largest_B.view(torch.float32)
    # Scaled by a power of two, exactly, so that squares neither overflow nor vanish.
    exponent_B = (largest_B >> 23).clamp(1, 253)
    down_B, up_B = (254 - exponent_B << 23).view(torch.float32), (exponent_B << 23).view(torch.float32)
    scaled_BS = grad_BS * down_B[:, None]
    return _lane_sum(scaled_BS * scaled_BS).sqrt() * up_B


def _lane_sum(x_BS: Tensor) -> Tensor:
    """(B,) sums in the one order that all implementations keep: 32 lanes, element i in lane i % 32, each from its
    first element on; then the upper half of the lanes is added to the lower until one is left."""
    pad = -x_BS.shape[1] % _NUM_LANES
    x_BRL = torch.nn.functional.pad(x_BS, (0, pad)).view(x_BS.shape[0], -1, _NUM_LANES)
    sum_BL = x_BRL[:, 0].clone()
    for row in range(1, x_BRL.shape[1]):
        sum_BL += x_BRL[:, row]
    while sum_BL.shape[1] > 1:
        half = sum_BL.shape[1] // 2
        sum_BL = sum_BL[:, :half] + sum_BL[:, half:]
    return sum_BL[:, 0]


def _to_buckets(x_N: Tensor, bucket_size: int, fill: Tensor | None = None) -> Tensor:
    """(B, S): `x_N` with the last bucket filled up, with zeros unless `fill`, one element, says otherwise."""
    num_buckets = -(-x_N.numel() // bucket_size)
    rest = num_buckets * bucket_size - x_N.numel()
    return torch.cat([x_N, (x_N.new_zeros(1) if fill is None else fill).expand(rest)]).view(num_buckets, bucket_size)


def _spread(x_B: Tensor, bucket_size: int, numel: int) -> Tensor:
    """(N,) each bucket's number for each of its elements."""
    return x_B[:, None].expand(-1, bucket_size).reshape(-1)[:numel]


def _write(decoded_N: Tensor, out_N: Tensor, add: bool) -> None:
    if add:
        out_N += decoded_N
    else:
        out_N.copy_(decoded_N)


def random_below(key: int, limit: int) -> int:
    """A number in [0, limit), 0 if that is empty: the hash of `key`, scaled."""
    return lowbias32(key) * limit >> 32


def _flip_negative(bits: Tensor) -> Tensor:
    return bits ^ (bits >> 31 & _MAGNITUDE)


def _bf16_floor(x: Tensor) -> Tensor:
    bits = x.view(torch.int32)
    return (bits + (bits >> 31 & 0xFFFF) & ~0xFFFF).view(torch.float32)


def _bf16_ceil(x: Tensor) -> Tensor:
    """Round up. `x` >= +0."""
    return (x.view(torch.int32) + 0xFFFF & ~0xFFFF).view(torch.float32)


def _bf16_bits(x: Tensor) -> Tensor:
    """(B,) int16 bits of float32 numbers that are exact in bfloat16."""
    return (x.view(torch.int32) >> 16).to(torch.int16)
