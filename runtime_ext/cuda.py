"""Launches of the CUDA kernels that `ops` calls: their names, arguments and number of blocks.

N elements of a gradient. `ops` documents the arguments. Tensors that are not contiguous are copied.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from . import cuda_launch

# 8 threads work on a quantization bucket, as csrc/cuda/bucket.h says.
_BLOCK_SIZE = 256
_BUCKETS_PER_BLOCK = _BLOCK_SIZE // 8


def build_qsgd(bits: int, device: torch.device) -> None:
    """Build what the qsgd functions launch."""
    cuda_launch.build("qsgd", device, _bits_macro(bits))


def build_sign(device: torch.device) -> None:
    """Build what the sign functions launch."""
    cuda_launch.build("sign", device)


def qsgd_encode(
    grad_N: Tensor,
    residual_N: Tensor | None,
    next_N: Tensor | None,
    out: Tensor,
    *,
    bits: int,
    bucket_size: int,
    grid: int,
    key: int,
    stochastic: bool,
) -> None:
    options = (np.int32(bucket_size), np.int32(grid), np.uint32(key), np.int32(stochastic))
    kernel = f"qsgd_encode_{cuda_launch.dtype_name(grad_N)}"
    _encode(kernel, grad_N, residual_N, next_N, out, options, bucket_size, _bits_macro(bits))


def qsgd_decode(payload: Tensor, out_N: Tensor, *, bits: int, bucket_size: int, grid: int, add: bool) -> None:
    options = (np.int32(bucket_size), np.int32(grid), np.int32(add))
    _decode("qsgd_decode", payload, out_N, options, bucket_size, _bits_macro(bits))


def sign_encode(
    grad_N: Tensor, residual_N: Tensor | None, next_N: Tensor | None, out: Tensor, *, bucket_size: int, kind: int
) -> None:
    options = (np.int32(bucket_size), np.int32(kind))
    _encode(f"sign_encode_{cuda_launch.dtype_name(grad_N)}", grad_N, residual_N, next_N, out, options, bucket_size)


def sign_decode(payload: Tensor, out_N: Tensor, *, bucket_size: int, kind: int, add: bool) -> None:
    options = (np.int32(bucket_size), np.int32(kind), np.int32(add))
    _decode("sign_decode", payload, out_N, options, bucket_size)


def _encode(
    kernel: str,
    grad_N: Tensor,
    residual_N: Tensor | None,
    next_N: Tensor | None,
    out: Tensor,
    options: tuple[np.generic, ...],
    bucket_size: int,
    define: str | None = None,
) -> None:
    numel = grad_N.numel()
    if numel == 0:
        return
    num_blocks = _num_blocks(numel, bucket_size, kernel, grad_N.device, define)
    with cuda_launch.written(next_N, out) as (to_next, to_out):
        args = (cuda_launch.read(grad_N), cuda_launch.read(residual_N), to_next, np.int64(numel), to_out)
        cuda_launch.launch(kernel, num_blocks, _BLOCK_SIZE, *args, *options, define=define)


def _decode(
    kernel: str,
    payload: Tensor,
    out_N: Tensor,
    options: tuple[np.generic, ...],
    bucket_size: int,
    define: str | None = None,
) -> None:
    numel = out_N.numel()
    if numel == 0:
        return
    num_blocks = _num_blocks(numel, bucket_size, kernel, out_N.device, define)
    with cuda_launch.written(out_N) as (to_out,):
        cuda_launch.launch(
            kernel, num_blocks, _BLOCK_SIZE, cuda_launch.read(payload), to_out, np.int64(numel), *options, define=define
        )


def _num_blocks(numel: int, bucket_size: int, kernel: str, device: torch.device, define: str | None) -> int:
    num_buckets = -(-numel // bucket_size)
    return min(-(-num_buckets // _BUCKETS_PER_BLOCK), cuda_launch.max_blocks(kernel, _BLOCK_SIZE, device, define))


def _bits_macro(bits: int) -> str:
    return f"CGX_BITS={bits}"
