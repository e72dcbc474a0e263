"""Codecs that quantize every element, in quantization buckets: QSGD, TernGrad and the one-bit codecs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from cgx_ray.codecs.codec import HOST, Codec, Memory, PayloadRow
from cgx_ray.codecs.float32_room import float32_room, in_float32
from cgx_ray.plan import CodecSpec, Layer
from cgx_ray.runtime_ext import ops
from cgx_ray.runtime_ext.cuda import KernelRow


class _Options(TypedDict):
    bits: int
    bucket_size: int
    grid: str


class _RowKernels(NamedTuple):
    """Functions of `ops` for several rows."""

    encode: Callable[[Sequence[KernelRow]], None]
    decode: Callable[[Sequence[KernelRow]], None]
    sum: Callable[[KernelRow, Sequence[Tensor], int], None]


class _InBuckets(Codec):
    """A codec with CUDA kernels that take several rows. On a CPU one row is coded after the other."""

    _kernels: _RowKernels

    def encode_rows(self, rows: Sequence[PayloadRow]) -> None:
        if rows and ops.takes_rows(rows[0].part_N):
            self._kernels.encode(list(map(_of_kernel, rows)))
        else:
            super().encode_rows(rows)

    def decode_rows(self, rows: Sequence[PayloadRow]) -> None:
        if rows and ops.takes_rows(rows[0].part_N):
            self._kernels.decode(list(map(_of_kernel, rows)))
        else:
            super().decode_rows(rows)

    def sum_rows(self, own: PayloadRow, payloads: Sequence[Tensor], num_ranks: int) -> None:
        if ops.takes_rows(own.part_N):
            self._kernels.sum(_of_kernel(own), payloads, num_ranks)
        else:
            super().sum_rows(own, payloads, num_ranks)


def _of_kernel(row: PayloadRow) -> KernelRow:
    residual_N, next_N = (row.memory.residual_N, row.memory.next_N) if row.memory is not None else (None, None)
    return KernelRow(row.part_N, row.payload, row.key, residual_N, next_N)


class Qsgd(_InBuckets):
    """`bits` bits per element, one grid per quantization bucket (Alistarh et al. 2017; CGX, section 3).

    terngrad is its ternary case. With stochastic rounding it is unbiased and converges without feedback. Rounding to
    nearest is biased and needs feedback.
    """

    def __init__(self, spec: CodecSpec, layers: Sequence[Layer] = (), world_size: int = 1) -> None:
        super().__init__(spec, layers, world_size)
        # TernGrad (Wen et al. 2017) sends -s, 0 or s, where s is the largest magnitude of the quantization bucket.
        self._options = _Options(bits=spec.bits or 2, bucket_size=self.granule, grid=spec.grid or "linf")
        is_stochastic = not self.needs_feedback
        self._kernels = _RowKernels(
            partial(ops.qsgd_encode_rows, stochastic=is_stochastic, **self._options),
            partial(ops.qsgd_decode_rows, **self._options),
            partial(ops.qsgd_sum, stochastic=is_stochastic, **self._options),
        )

    def build_kernels(self) -> None:
        ops.build_qsgd(self._options["bits"], self.device)

    def encode(self, grad_N: Tensor, payload: Tensor, key: int, memory: Memory | None = None) -> None:
        ops.qsgd_encode(
            # On a CUDA device the kernel reads 16-bit gradients.
            in_float32(grad_N) if self.device == HOST else grad_N,
            payload,
            key=key,
            stochastic=not self.needs_feedback,
            residual_N=memory.residual_N if memory is not None else None,
            next_N=memory.next_N if memory is not None else None,
            **self._options,
        )

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
        is_wide = out_N.dtype == torch.float32
        value_N = out_N if is_wide else float32_room(out_N.numel())
        ops.qsgd_decode(payload, value_N, add=add, **self._options)
        if not is_wide:
            out_N.copy_(value_N)


class Sign(_InBuckets):
    """One bit per element, and one or two means per quantization bucket.

    ef_signsgd (Karimireddy et al. 2019) and onebit (Seide et al. 2014). Biased, so they converge with feedback only.
    """

    def __init__(self, spec: CodecSpec, layers: Sequence[Layer] = (), world_size: int = 1) -> None:
        super().__init__(spec, layers, world_size)
        functions = (ops.sign_encode_rows, ops.sign_decode_rows, ops.sign_sum)
        self._kernels = _RowKernels(*(partial(one, kind=spec.name, bucket_size=self.granule) for one in functions))

    def build_kernels(self) -> None:
        ops.build_sign(self.device)

    def encode(self, grad_N: Tensor, payload: Tensor, key: int, memory: Memory | None = None) -> None:
        ops.sign_encode(
            grad_N,
            payload,
            kind=self.spec.name,
            bucket_size=self.granule,
            residual_N=memory.residual_N if memory is not None else None,
            next_N=memory.next_N if memory is not None else None,
        )

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
        ops.sign_decode(payload, out_N, kind=self.spec.name, bucket_size=self.granule, add=add)
