"""Kernels of the codecs that send every element, and their reference, under one set of names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cgx_ray.runtime_ext import ops, reference
from cgx_ray.runtime_ext.cuda import KernelRow

KEY = ops.message_key(1, 2, 3, 4, 5)


@dataclass(frozen=True)
class QsgdKernels:
    grid: str
    bits: int
    bucket_size: int = 128
    stochastic: bool = True
    key: int = KEY

    @property
    def _options(self) -> dict[str, int]:
        return {"bits": self.bits, "bucket_size": self.bucket_size}

    @property
    def _rounding(self) -> dict[str, Any]:
        return {"key": self.key, "stochastic": self.stochastic}

    def num_bytes(self, numel: int) -> int:
        return ops.qsgd_bytes(numel, self.bits, self.bucket_size, self.grid)

    def encode(self, grad_N: Tensor, out: Tensor, **feedback: Tensor | None) -> None:
        ops.qsgd_encode(grad_N, out, grid=self.grid, **self._options, **self._rounding, **feedback)

    def decode(self, payload: Tensor, out_N: Tensor, add: bool = False) -> None:
        ops.qsgd_decode(payload, out_N, grid=self.grid, add=add, **self._options)

    def encode_rows(self, rows: Sequence[KernelRow]) -> None:
        ops.qsgd_encode_rows(rows, grid=self.grid, stochastic=self.stochastic, **self._options)

    def decode_rows(self, rows: Sequence[KernelRow]) -> None:
        ops.qsgd_decode_rows(rows, grid=self.grid, **self._options)

    def sum(self, own: KernelRow, payloads: Sequence[Tensor], num_ranks: int) -> None:
        ops.qsgd_sum(own, payloads, num_ranks, grid=self.grid, stochastic=self.stochastic, **self._options)

    def reference_encode(self, fed_N: Tensor, out: Tensor) -> None:
        reference.qsgd_encode(fed_N, out, grid=ops.GRIDS[self.grid], **self._options, **self._rounding)

    def reference_decode(self, payload: Tensor, out_N: Tensor, add: bool = False) -> None:
        reference.qsgd_decode(payload, out_N, grid=ops.GRIDS[self.grid], add=add, **self._options)


@dataclass(frozen=True)
class SignKernels:
    kind: str
    bucket_size: int = 128

    def num_bytes(self, numel: int) -> int:
        return ops.sign_bytes(numel, self.bucket_size, self.kind)

    def encode(self, grad_N: Tensor, out: Tensor, **feedback: Tensor | None) -> None:
        ops.sign_encode(grad_N, out, kind=self.kind, bucket_size=self.bucket_size, **feedback)

    def decode(self, payload: Tensor, out_N: Tensor, add: bool = False) -> None:
        ops.sign_decode(payload, out_N, kind=self.kind, bucket_size=self.bucket_size, add=add)

    def encode_rows(self, rows: Sequence[KernelRow]) -> None:
        ops.sign_encode_rows(rows, bucket_size=self.bucket_size, kind=self.kind)

    def decode_rows(self, rows: Sequence[KernelRow]) -> None:
        ops.sign_decode_rows(rows, bucket_size=self.bucket_size, kind=self.kind)

    def sum(self, own: KernelRow, payloads: Sequence[Tensor], num_ranks: int) -> None:
        ops.sign_sum(own, payloads, num_ranks, bucket_size=self.bucket_size, kind=self.kind)

    def reference_encode(self, fed_N: Tensor, out: Tensor) -> None:
        reference.sign_encode(fed_N, out, bucket_size=self.bucket_size, kind=ops.SIGN_KINDS[self.kind])

    def reference_decode(self, payload: Tensor, out_N: Tensor, add: bool = False) -> None:
        kind = ops.SIGN_KINDS[self.kind]
        reference.sign_decode(payload, out_N, bucket_size=self.bucket_size, kind=kind, add=add)


BucketKernels = QsgdKernels | SignKernels
QSGD = [QsgdKernels(grid, bits) for grid in ops.GRIDS for bits in range(1 if grid == "max_min" else 2, 9)]
SIGN = [SignKernels(kind) for kind in ops.SIGN_KINDS]


def name(codec: BucketKernels) -> str:
    return f"{codec.grid}-{codec.bits}" if isinstance(codec, QsgdKernels) else codec.kind


def encode(codec: BucketKernels, grad_N: Tensor) -> Tensor:
    out = torch.full((codec.num_bytes(grad_N.numel()),), 0xA5, dtype=torch.uint8)
    codec.encode(grad_N, out)
    return out


def decode(codec: BucketKernels, payload: Tensor, numel: int) -> Tensor:
    out_N = torch.full((numel,), 7.0)
    codec.decode(payload, out_N)
    return out_N


def sent(codec: BucketKernels, grad_N: Tensor) -> Tensor:
    return decode(codec, encode(codec, grad_N), grad_N.numel())


def roundings(codec: BucketKernels) -> list[BucketKernels]:
    return [replace(codec, stochastic=value) for value in (True, False)] if isinstance(codec, QsgdKernels) else [codec]
