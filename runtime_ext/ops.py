"""Public kernels: check the arguments, then run the C++ kernel on the CPU or the reference elsewhere.

N elements of a gradient, K kept ones. Every tensor is 1-D; every format is little-endian.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference

try:
    from . import _native
except ImportError as error:
    raise ImportError(
        "cgx_ray.runtime_ext._native is missing or does not load; build it: "
        "pip install -e . --no-build-isolation (needs a C++20 compiler)"
    ) from error

__all__ = ["crc32c", "message_key", "qsgd_decode", "qsgd_encode", "topk_select"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_MAX_BUCKET_SIZE = 1 << 16
_UINT64 = (1 << 64) - 1


def crc32c(data: Tensor, seed: int = 0) -> int:
    """Return the CRC-32C of `data`, uint8 on any device; `seed` is the CRC of the bytes before it.

    Raises TypeError or ValueError for anything else.
    """
    _check_tensor("data", data, torch.uint8)
    _check_key("seed", seed)
    data = data.cpu().contiguous()
    return _native.crc32c(data.data_ptr(), data.numel(), seed)


def message_key(seed: int, step: int, group: int, rank: int, phase: int) -> int:
    """Return the 32-bit key of one message's random numbers, unrelated to that of any other message.

    The finalizer of splitmix64 (Steele et al. 2014), applied after each of the five numbers.
    """
    state = 0
    for number in (seed, step, group, rank, phase):
        state = (state + number + 0x9E3779B97F4A7C15) & _UINT64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _UINT64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _UINT64
        state ^= state >> 31
    return state >> 32


@torch.no_grad()
def qsgd_encode(grad_N: Tensor, out: Tensor, *, bits: int, bucket_size: int, key: int, stochastic: bool = True) -> None:
    """Quantize `grad_N` to `bits` bits an element on a max-min grid a bucket.

    grad_N      (N,) float32, float16 or bfloat16; read only
    out         uint8, same device, exactly the payload bytes; overwritten
    key         32 bits, see `message_key`; the same key rounds the same way
    stochastic  False rounds to nearest and ignores `key`

    A bucket with NaN or Inf, or whose grid would overflow float32, decodes to NaN throughout.
    Raises TypeError or ValueError for other arguments; `CodecSpec.payload_bytes` is the size of `out`.
    """
    _check_tensor("grad_N", grad_N, *_FLOATS)
    _check_payload("out", out, grad_N, bits, bucket_size)
    _check_key("key", key)
    grad_N = grad_N.to(torch.float32).contiguous()
    if _is_native(out):
        _native.qsgd_encode(grad_N.data_ptr(), grad_N.numel(), out.data_ptr(), bits, bucket_size, key, stochastic)
    else:
        reference.qsgd_encode(grad_N, out, bits, bucket_size, key, stochastic)


@torch.no_grad()
def qsgd_decode(payload: Tensor, out_N: Tensor, *, bits: int, bucket_size: int, add: bool = False) -> None:
    """Write what `qsgd_encode` encoded to `out_N`, or with `add` accumulate it there in the same pass.

    payload  uint8, same device; read only
    out_N    (N,) float32; changed in place

    Raises TypeError or ValueError for other arguments.
    """
    _check_tensor("out_N", out_N, torch.float32)
    _check_payload("payload", payload, out_N, bits, bucket_size)
    if _is_native(payload, out_N):
        _native.qsgd_decode(payload.data_ptr(), out_N.data_ptr(), out_N.numel(), bits, bucket_size, add)
    else:
        reference.qsgd_decode(payload, out_N, bits, bucket_size, add)


@torch.no_grad()
def topk_select(grad_N: Tensor, index_K: Tensor, value_K: Tensor) -> None:
    """Select the K elements of `grad_N` that are largest in magnitude, exactly.

    grad_N   (N,) float32, float16 or bfloat16; read only
    index_K  (K,) int32, same device; overwritten with ascending indices
    value_K  (K,) float32, same device; overwritten with the elements there

    NaN counts as largest, then Inf; ties go to the lowest index.
    Raises TypeError or ValueError for other arguments, also for K > N.
    """
    _check_tensor("grad_N", grad_N, *_FLOATS)
    _check_tensor("index_K", index_K, torch.int32, device=grad_N.device)
    _check_tensor("value_K", value_K, torch.float32, device=grad_N.device)
    numel, num_kept = grad_N.numel(), index_K.numel()
    if value_K.numel() != num_kept:
        raise ValueError(f"index_K has {num_kept} elements, value_K {value_K.numel()}; both need K")
    if num_kept > numel or numel >= 1 << 31:
        raise ValueError(f"cannot keep {num_kept} of {numel} elements; need K <= N < 2**31")
    grad_N = grad_N.to(torch.float32).contiguous()
    if _is_native(index_K, value_K):
        _native.topk_select(grad_N.data_ptr(), numel, index_K.data_ptr(), value_K.data_ptr(), num_kept)
    else:
        reference.topk_select(grad_N, index_K, value_K)


def _is_native(*tensors: Tensor) -> bool:
    return all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors)


def _check_tensor(name: str, tensor: Tensor, *dtypes: torch.dtype, device: torch.device | None = None) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}; give {' or '.join(map(str, dtypes))}")
    if tensor.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; give a 1-D tensor, view(-1) flattens")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the gradient on {device}; move one of them")


def _check_payload(name: str, payload: Tensor, grad_N: Tensor, bits: int, bucket_size: int) -> None:
    _check_tensor(name, payload, torch.uint8, device=grad_N.device)
    if not 1 <= bits <= 8:
        raise ValueError(f"bits {bits} is not allowed; give 1 to 8")
    if not 8 <= bucket_size <= _MAX_BUCKET_SIZE or bucket_size % 8:
        raise ValueError(f"bucket_size {bucket_size} is not allowed; give 8 to {_MAX_BUCKET_SIZE}, a multiple of 8")
    numel = grad_N.numel()
    needed = 4 * -(-numel // bucket_size) + -(-numel * bits // 8)
    if payload.numel() != needed:
        raise ValueError(
            f"{name} has {payload.numel()} bytes; {numel} elements at {bits} bits in buckets of "
            f"{bucket_size} take {needed} bytes"
        )


def _check_key(name: str, key: int) -> None:
    if not 0 <= key < 1 << 32:
        raise ValueError(f"{name} {key} is not a 32-bit number; give 0 to 2**32 - 1")
