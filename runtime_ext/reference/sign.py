"""The one-bit codecs: per quantization bucket one or two means, then one bit per element.

N elements of a gradient, B quantization buckets, S elements per quantization bucket, W means per quantization bucket
"""

from __future__ import annotations

import torch
from torch import Tensor

from .bits import pack_levels, unpack_levels
from .buckets import lane_sum, spread, to_buckets, write

EF_SIGNSGD, ONEBIT = range(2)  # kinds of one-bit codec


def sign_encode(grad_N: Tensor, out: Tensor, *, bucket_size: int, kind: int) -> None:
    """Encode `grad_N`, float32, into `out`: the means, float32, then one bit per element, 1 for a plus sign.

    EF_SIGNSGD (Karimireddy et al. 2019, Algorithm 2) has one mean, that of the magnitudes. ONEBIT (Seide et al. 2014)
    has the mean of the negative elements and the mean of the others. Departure: means are per quantization bucket,
    the papers' are per layer or per column.
    """
    numel = grad_N.numel()
    if numel == 0:
        return
    grad_BS = to_buckets(grad_N, bucket_size)
    is_real_BS = to_buckets(torch.ones_like(grad_N), bucket_size) == 1
    is_positive_BS = (grad_BS.view(torch.int32) >= 0) & is_real_BS
    zero_BS = torch.zeros_like(grad_BS)
    if kind == EF_SIGNSGD:
        means = [lane_sum(grad_BS.abs()) / is_real_BS.sum(1)]
    else:
        is_negative_BS = ~is_positive_BS & is_real_BS
        means = [
            # Without an element of this sign the mean is 0 / 1.
            lane_sum(torch.where(chosen_BS, grad_BS, zero_BS)) / chosen_BS.sum(1).clamp(min=1)
            for chosen_BS in (is_negative_BS, is_positive_BS)
        ]
    mean_BW = torch.stack(means, 1)
    # The NaN bits that a sum of NaNs gives depend on the machine, so all become one NaN.
    mean_BW = torch.where(mean_BW.isnan(), torch.nan, mean_BW)
    mean_bytes = mean_bytes_per_bucket(kind) * grad_BS.shape[0]
    out[:mean_bytes] = mean_BW.view(-1).view(torch.uint8)
    out[mean_bytes:] = pack_levels(is_positive_BS.view(-1)[:numel].to(torch.uint8), 1)


def sign_decode(payload: Tensor, out_N: Tensor, *, bucket_size: int, kind: int, add: bool) -> None:
    """Write each element's mean to `out_N`, or add it."""
    numel = out_N.numel()
    if numel == 0:
        return
    mean_bytes = mean_bytes_per_bucket(kind) * -(-numel // bucket_size)
    mean_BW = payload[:mean_bytes].clone().view(torch.float32).view(-1, 2 if kind == ONEBIT else 1)
    low_B, high_B = (mean_BW[:, 0], mean_BW[:, 1]) if kind == ONEBIT else (-mean_BW[:, 0], mean_BW[:, 0])
    is_positive_N = unpack_levels(payload[mean_bytes:], numel, 1) == 1
    low_N, high_N = spread(low_B, bucket_size, numel), spread(high_B, bucket_size, numel)
    write(torch.where(is_positive_N, high_N, low_N), out_N, add)


def mean_bytes_per_bucket(kind: int) -> int:
    return 8 if kind == ONEBIT else 4
