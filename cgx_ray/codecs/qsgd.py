"""Codecs that quantize every element, in quantization buckets: QSGD, TernGrad and the one-bit codecs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cgx_ray.codecs.codec import HOST, Codec, Memory
from cgx_ray.codecs.float32_room import float32_room, in_float32
from cgx_ray.plan import CodecSpec, Layer
from cgx_ray.runtime_ext import ops


class Qsgd(Codec):
    """`bits` bits per element, one grid per quantization bucket (Alistarh et al. 2017; CGX, section 3).

    terngrad is its ternary case. With stochastic rounding it is unbiased and converges without feedback. Rounding to
    nearest is biased and needs feedback.
    """

    def __init__(self, spec: CodecSpec, layers: Sequence[Layer] = (), world_size: int = 1) -> None:
        super().__init__(spec, layers, world_size)
        # TernGrad (Wen et al. 2017) sends -s, 0 or s, where s is the largest magnitude of the quantization bucket.
        self._bits, self._grid = spec.bits or 2, spec.grid or "linf"

    def build_kernels(self) -> None:
        ops.build_qsgd(self._bits, self.device)

    def encode(self, grad_N: Tensor, payload: Tensor, key: int, memory: Memory | None = None) -> None:
        ops.qsgd_encode(
            # On a CUDA device the kernel reads 16-bit gradients.
            in_float32(grad_N) if self.device == HOST else grad_N,
            payload,
            bits=self._bits,
            bucket_size=self.granule,
            key=key,
            grid=self._grid,
            stochastic=not self.needs_feedback,
            residual_N=memory.residual_N if memory is not None else None,
            next_N=memory.next_N if memory is not None else None,
        )

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
        is_wide = out_N.dtype == torch.float32
        value_N = out_N if is_wide else float32_room(out_N.numel())
        ops.qsgd_decode(payload, value_N, bits=self._bits, bucket_size=self.granule, grid=self._grid, add=add)
        if not is_wide:
            out_N.copy_(value_N)


class Sign(Codec):
    """One bit per element, and one or two means per quantization bucket.

    ef_signsgd (Karimireddy et al. 2019) and onebit (Seide et al. 2014). Biased, so they converge with feedback only.
    """

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
