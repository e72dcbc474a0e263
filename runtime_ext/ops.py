"""Public kernels of the codecs that send every element, passes over gradients, and checksums and keys of messages.

N elements of a gradient. Tensors are 1-D, and all tensors of a call are on one device. Formats are little-endian.
Gradients are float32, float16 or bfloat16 and read only. Autograd records nothing. Arguments of another type, size or
device raise TypeError or ValueError.

CPU   kernels use `torch.get_num_threads()` threads. Tensors with gaps go to `reference`. A float16 or bfloat16 gradient
      is first copied to float32.
CUDA  kernels run on torch's current stream
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import cuda, reference
from .checks import (
    FLOATS,
    address,
    as_float32,
    check_gradient,
    check_integer,
    check_key,
    check_sized,
    check_tensor,
    is_contiguous,
    native,
    runs_on_cuda,
)
from .cuda import KernelRow

GRIDS = {"max_min": reference.MAX_MIN, "l2": reference.L2, "linf": reference.LINF}
SIGN_KINDS = {"ef_signsgd": reference.EF_SIGNSGD, "onebit": reference.ONEBIT}

_MAX_BUCKET_SIZE = 1 << 16
_UINT64 = (1 << 64) - 1


def crc32c(data: Tensor, seed: int = 0) -> int:
    """Return the CRC-32C of `data`, uint8; `seed` is the CRC of the bytes before it."""
    check_tensor("data", data, torch.uint8)
    check_key("seed", seed)
    if not (data.is_cpu and data.is_contiguous()):
        data = data.cpu().contiguous()
    return native.crc32c(data.data_ptr(), data.numel(), seed)


def message_key(seed: int, step: int, group: int, rank: int, phase: int) -> int:
    """Return a 32-bit key for the random numbers of one message, unrelated to the keys of other messages.

    The finalizer of splitmix64 (Steele et al. 2014) is applied after each of the five numbers.
    """
    state = 0
    for number in (seed, step, group, rank, phase):
        state = (state + number + 0x9E3779B97F4A7C15) & _UINT64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _UINT64
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _UINT64
        state ^= state >> 31
    return state >> 32


def poison(grad_N: Tensor) -> Tensor | float:
    """Return 0 if `grad_N`, of any shape, is finite, else NaN. -0 counts as 0.

    On a GPU the result is a tensor of one element, since reading it would wait for the device.
    """
    if grad_N.is_cpu and grad_N.dtype == torch.float32 and grad_N.is_contiguous():
        return native.poison(address(grad_N), grad_N.numel(), torch.get_num_threads())
    return reference.poison(grad_N)


def add_poison(grad_N: Tensor, value_K: Tensor) -> None:
    """Add `poison(grad_N)` to the first of `value_K`, (K,) float32, so that NaN and Inf arrive whatever is sent."""
    check_tensor("grad_N", grad_N, *FLOATS)
    check_tensor("value_K", value_K, torch.float32, device=grad_N.device)
    if value_K.numel() == 0:
        return
    if not runs_on_cuda(grad_N):
        grad_N = as_float32(grad_N)
        native.add_poison(address(grad_N), grad_N.numel(), address(value_K), torch.get_num_threads())
    else:
        value_K[:1] += reference.poison(grad_N)


def divide(values_N: Tensor, divisor: int) -> None:
    """Divide `values_N` in place, with the same bits on every device.

    On a GPU torch multiplies by 1 / `divisor`, unless that lies there.
    """
    values_N.div_(values_N.new_full((), divisor) if values_N.is_cuda else divisor)


def add_momentum(
    grad_N: Tensor,
    momentum_N: Tensor,
    residual_N: Tensor | None,
    next_momentum_N: Tensor,
    next_N: Tensor,
    *,
    factor: float,
    scale: Tensor | float = 1.0,
) -> None:
    """Write factor * momentum + scale * gradient to `next_momentum_N`, and that plus the residual to `next_N`.

    grad_N                                 (N,); read only
    momentum_N, residual_N                 (N,) float32; read only
    next_momentum_N, next_N                (N,) float32; overwritten; they overlap no other tensor
    scale                                  rounded to float32; a tensor of one element need not be read from a GPU
    """
    check_gradient(grad_N, residual_N, next_N)
    for name, tensor in (("momentum_N", momentum_N), ("next_momentum_N", next_momentum_N)):
        check_sized(name, tensor, torch.float32, grad_N.numel(), grad_N.device)
    if not runs_on_cuda(grad_N) and is_contiguous(momentum_N, residual_N, next_momentum_N, next_N):
        grad_N = as_float32(grad_N)
        args = (address(grad_N), address(momentum_N), address(residual_N), address(next_momentum_N), address(next_N))
        native.add_momentum(*args, grad_N.numel(), factor, float(scale), torch.get_num_threads())
    else:
        reference.add_momentum(grad_N, momentum_N, residual_N, next_momentum_N, next_N, factor, scale)


def build_qsgd(bits: int, device: torch.device) -> None:
    """Compile and load the kernels of qsgd for a CUDA `device`, or else their first call does. It takes seconds."""
    if device.type == "cuda":
        cuda.build_qsgd(bits, device)


def build_sign(device: torch.device) -> None:
    """Compile and load the kernels of the one-bit codecs, as `build_qsgd` does."""
    if device.type == "cuda":
        cuda.build_sign(device)


def qsgd_encode(
    grad_N: Tensor,
    out: Tensor,
    *,
    bits: int,
    bucket_size: int,
    key: int,
    grid: str = "max_min",
    stochastic: bool = True,
    residual_N: Tensor | None = None,
    next_N: Tensor | None = None,
) -> None:
    """Quantize `grad_N`, plus `residual_N` if given, to `bits` bits per element on one grid per quantization bucket.

    out         uint8, `qsgd_bytes` long; overwritten
    key         32 bits, see `message_key`; the same key rounds the same way
    grid        a key of GRIDS; grids around zero ("l2", "linf") need 2 bits or more
    stochastic  False rounds to nearest and ignores `key`
    residual_N  (N,) float32, the error that earlier steps left; read only
    next_N      (N,) float32, overwritten with the error that this call leaves; may be `residual_N`; other overlaps are
                not allowed

    A quantization bucket with NaN or Inf, or with a grid that would overflow float32, decodes to NaN in all elements.
    """
    check_gradient(grad_N, residual_N, next_N)
    _check_qsgd("out", out, grad_N, bits, bucket_size, grid)
    check_key("key", key)
    kind = GRIDS[grid]
    if runs_on_cuda(grad_N):
        row = KernelRow(grad_N, out, key, residual_N, next_N)
        cuda.qsgd_encode([row], bits=bits, bucket_size=bucket_size, grid=kind, stochastic=stochastic)
    elif is_contiguous(out, residual_N, next_N):
        grad_N = as_float32(grad_N)
        args = (address(grad_N), address(residual_N), address(next_N), grad_N.numel(), address(out))
        native.qsgd_encode(*args, bits, bucket_size, kind, key, stochastic, torch.get_num_threads())
    else:
        fed_N = reference.add_feedback(grad_N, residual_N)
        reference.qsgd_encode(fed_N, out, bits=bits, bucket_size=bucket_size, grid=kind, key=key, stochastic=stochastic)
        if next_N is not None:
            decoded_N = torch.empty_like(fed_N)
            reference.qsgd_decode(out, decoded_N, bits=bits, bucket_size=bucket_size, grid=kind, add=False)
            torch.sub(fed_N, decoded_N, out=next_N)


def qsgd_decode(
    payload: Tensor, out_N: Tensor, *, bits: int, bucket_size: int, grid: str = "max_min", add: bool = False
) -> None:
    """Decode the output of `qsgd_encode` into `out_N`; with `add`, add to it in the same pass.

    payload  uint8; read only
    out_N    (N,) float32; changed in place
    """
    check_tensor("out_N", out_N, torch.float32)
    _check_qsgd("payload", payload, out_N, bits, bucket_size, grid)
    kind = GRIDS[grid]
    if runs_on_cuda(out_N):
        cuda.qsgd_decode([KernelRow(out_N, payload)], bits=bits, bucket_size=bucket_size, grid=kind, add=add)
    elif is_contiguous(payload, out_N):
        args = (address(payload), address(out_N), out_N.numel())
        native.qsgd_decode(*args, bits, bucket_size, kind, add, torch.get_num_threads())
    else:
        reference.qsgd_decode(payload, out_N, bits=bits, bucket_size=bucket_size, grid=kind, add=add)


def takes_rows(grad_N: Tensor) -> bool:
    """Return True if the functions for rows take it. They are for GPUs, where a call for each row takes longer."""
    return runs_on_cuda(grad_N)


def qsgd_encode_rows(
    rows: Sequence[KernelRow], *, bits: int, bucket_size: int, grid: str = "max_min", stochastic: bool = True
) -> None:
    """Do as `qsgd_encode` for all of `rows`, on a GPU: in one launch if they lie in the same memory."""
    for row in rows:
        check_gradient(row.grad_N, row.residual_N, row.next_N)
        _check_qsgd("payload", row.payload, row.grad_N, bits, bucket_size, grid)
        check_key("key", row.key)
    cuda.qsgd_encode(rows, bits=bits, bucket_size=bucket_size, grid=GRIDS[grid], stochastic=stochastic)


def qsgd_decode_rows(rows: Sequence[KernelRow], *, bits: int, bucket_size: int, grid: str = "max_min") -> None:
    """Do as `qsgd_decode` for all of `rows`, on a GPU: in one launch if they lie in the same memory."""
    for row in rows:
        check_tensor("grad_N", row.grad_N, torch.float32)
        _check_qsgd("payload", row.payload, row.grad_N, bits, bucket_size, grid)
    cuda.qsgd_decode(rows, bits=bits, bucket_size=bucket_size, grid=GRIDS[grid], add=False)


def qsgd_sum(
    own: KernelRow,
    payloads: Sequence[Tensor],
    num_ranks: int,
    *,
    bits: int,
    bucket_size: int,
    grid: str = "max_min",
    stochastic: bool = True,
) -> None:
    """Encode 1 / `num_ranks` of the sum of a gradient and the decoded `payloads`, on a GPU in one launch.

    own       with a float32 gradient, which is read only; memory is in units of the sum
    payloads  at equal distances in the same memory; they are added in this order
    """
    _check_sum(own)
    for payload in (own.payload, *payloads):
        _check_qsgd("payload", payload, own.grad_N, bits, bucket_size, grid)
    check_key("key", own.key)
    kind = GRIDS[grid]
    cuda.qsgd_sum(own, payloads, num_ranks, bits=bits, bucket_size=bucket_size, grid=kind, stochastic=stochastic)


def qsgd_bytes(numel: int, bits: int, bucket_size: int, grid: str) -> int:
    """Return the number of bytes that `qsgd_encode` fills."""
    return reference.grid_bytes_per_bucket(GRIDS[grid]) * -(-numel // bucket_size) + -(-numel * bits // 8)


def sign_encode(
    grad_N: Tensor,
    out: Tensor,
    *,
    kind: str,
    bucket_size: int,
    residual_N: Tensor | None = None,
    next_N: Tensor | None = None,
) -> None:
    """Encode `grad_N`, plus `residual_N` if given, to one bit per element: which of two means stands for it.

    out                 uint8, `sign_bytes` long; overwritten
    kind                "ef_signsgd": plus and minus the mean magnitude of the quantization bucket; "onebit": the mean
                        of its negative elements and the mean of the others
    residual_N, next_N  as in `qsgd_encode`

    An element that is NaN or Inf decodes to NaN or Inf.
    """
    check_gradient(grad_N, residual_N, next_N)
    _check_sign("out", out, grad_N, kind, bucket_size)
    number = SIGN_KINDS[kind]
    if runs_on_cuda(grad_N):
        cuda.sign_encode([KernelRow(grad_N, out, 0, residual_N, next_N)], bucket_size=bucket_size, kind=number)
    elif is_contiguous(out, residual_N, next_N):
        grad_N = as_float32(grad_N)
        args = (address(grad_N), address(residual_N), address(next_N), grad_N.numel(), address(out))
        native.sign_encode(*args, bucket_size, number, torch.get_num_threads())
    else:
        fed_N = reference.add_feedback(grad_N, residual_N)
        reference.sign_encode(fed_N, out, bucket_size=bucket_size, kind=number)
        if next_N is not None:
            decoded_N = torch.empty_like(fed_N)
            reference.sign_decode(out, decoded_N, bucket_size=bucket_size, kind=number, add=False)
            torch.sub(fed_N, decoded_N, out=next_N)


def sign_decode(payload: Tensor, out_N: Tensor, *, kind: str, bucket_size: int, add: bool = False) -> None:
    """Decode the output of `sign_encode` into `out_N`; with `add`, add to it in the same pass."""
    check_tensor("out_N", out_N, torch.float32)
    _check_sign("payload", payload, out_N, kind, bucket_size)
    number = SIGN_KINDS[kind]
    if runs_on_cuda(out_N):
        cuda.sign_decode([KernelRow(out_N, payload)], bucket_size=bucket_size, kind=number, add=add)
    elif is_contiguous(payload, out_N):
        args = (address(payload), address(out_N), out_N.numel())
        native.sign_decode(*args, bucket_size, number, add, torch.get_num_threads())
    else:
        reference.sign_decode(payload, out_N, bucket_size=bucket_size, kind=number, add=add)


def sign_encode_rows(rows: Sequence[KernelRow], *, kind: str, bucket_size: int) -> None:
    """Do as `sign_encode` for all of `rows`, as `qsgd_encode_rows`."""
    for row in rows:
        check_gradient(row.grad_N, row.residual_N, row.next_N)
        _check_sign("payload", row.payload, row.grad_N, kind, bucket_size)
    cuda.sign_encode(rows, bucket_size=bucket_size, kind=SIGN_KINDS[kind])


def sign_decode_rows(rows: Sequence[KernelRow], *, kind: str, bucket_size: int) -> None:
    """Do as `sign_decode` for all of `rows`, as `qsgd_decode_rows`."""
    for row in rows:
        check_tensor("grad_N", row.grad_N, torch.float32)
        _check_sign("payload", row.payload, row.grad_N, kind, bucket_size)
    cuda.sign_decode(rows, bucket_size=bucket_size, kind=SIGN_KINDS[kind], add=False)


def sign_sum(own: KernelRow, payloads: Sequence[Tensor], num_ranks: int, *, kind: str, bucket_size: int) -> None:
    """Encode an average, as `qsgd_sum`."""
    _check_sum(own)
    for payload in (own.payload, *payloads):
        _check_sign("payload", payload, own.grad_N, kind, bucket_size)
    cuda.sign_sum(own, payloads, num_ranks, bucket_size=bucket_size, kind=SIGN_KINDS[kind])


def sign_bytes(numel: int, bucket_size: int, kind: str) -> int:
    """Return the number of bytes that `sign_encode` fills."""
    return reference.mean_bytes_per_bucket(SIGN_KINDS[kind]) * -(-numel // bucket_size) + -(-numel // 8)


def _check_sum(own: KernelRow) -> None:
    check_tensor("grad_N", own.grad_N, torch.float32)
    check_gradient(own.grad_N, own.residual_N, own.next_N)


def _check_bucket_size(bucket_size: int) -> None:
    check_integer("bucket_size", bucket_size)
    if not 8 <= bucket_size <= _MAX_BUCKET_SIZE or bucket_size % 8:
        raise ValueError(f"bucket_size {bucket_size} is not allowed; give 8 to {_MAX_BUCKET_SIZE}, a multiple of 8")


def _check_qsgd(name: str, payload: Tensor, grad_N: Tensor, bits: int, bucket_size: int, grid: str) -> None:
    check_tensor(name, payload, torch.uint8, device=grad_N.device)
    if grid not in GRIDS:
        raise ValueError(f"grid {grid!r} is not allowed; give {', '.join(GRIDS)}")
    check_integer("bits", bits)
    low = 1 if grid == "max_min" else 2
    if not low <= bits <= 8:
        raise ValueError(f"bits {bits} is not allowed; give {low} to 8 with grid {grid}")
    _check_bucket_size(bucket_size)
    numel = grad_N.numel()
    needed = qsgd_bytes(numel, bits, bucket_size, grid)
    if payload.numel() != needed:
        raise ValueError(
            f"{name} has {payload.numel()} bytes; {numel} elements at {bits} bits in quantization "
            f"buckets of {bucket_size} take {needed} bytes"
        )


def _check_sign(name: str, payload: Tensor, grad_N: Tensor, kind: str, bucket_size: int) -> None:
    check_tensor(name, payload, torch.uint8, device=grad_N.device)
    if kind not in SIGN_KINDS:
        raise ValueError(f"kind {kind!r} is not allowed; give {', '.join(SIGN_KINDS)}")
    _check_bucket_size(bucket_size)
    needed = sign_bytes(grad_N.numel(), bucket_size, kind)
    if payload.numel() != needed:
        raise ValueError(
            f"{name} has {payload.numel()} bytes; {grad_N.numel()} elements in quantization buckets of "
            f"{bucket_size} take {needed} bytes"
        )
