"""QSGD: bucketed stochastic quantization on a max-min grid (CGX, section 3; Alistarh et al. 2017)."""

from __future__ import annotations

from torch import Tensor

from cgx_ray.plan import CodecSpec
from cgx_ray.runtime_ext import ops


class Qsgd:
    """`bits` bits an element and 4 bytes a bucket. Unbiased, so it converges without error feedback."""

    needs_feedback = False

    def __init__(self, spec: CodecSpec) -> None:
        assert spec.bits is not None
        assert spec.bucket_size is not None
        self.spec = spec
        self.granule = spec.bucket_size
        self._bits, self._bucket_size = spec.bits, spec.bucket_size

    def encode(self, grad_N: Tensor, payload: Tensor, key: int) -> None:
        ops.qsgd_encode(grad_N, payload, bits=self._bits, bucket_size=self._bucket_size, key=key)

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool) -> None:
        ops.qsgd_decode(payload, out_N, bits=self._bits, bucket_size=self._bucket_size, add=add)
