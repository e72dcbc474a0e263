"""Codecs encode a gradient to bytes and decode it. `make_codec` turns a CodecSpec into one."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from cgx_ray.codecs.cast import Bf16, Raw
from cgx_ray.codecs.qsgd import Qsgd
from cgx_ray.codecs.topk import TopK
from cgx_ray.plan import CodecSpec


class Codec(Protocol):
    """What every codec does. Gradients are flat float32 on the CPU, payloads flat uint8.

    granule         chunks of a gradient may be cut at multiples of this many elements
    needs_feedback  True if what it drops must be added to the next step's gradient to converge
    """

    spec: CodecSpec
    granule: int
    needs_feedback: bool

    def encode(self, grad_N: Tensor, payload: Tensor, key: int) -> None:
        """Fill `payload`, of exactly `spec.payload_bytes(N)` bytes. `key` seeds the stochastic rounding."""

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool) -> None:
        """Write what `payload` holds to `out_N`, or add it. Raises WireError on an impossible payload."""


def make_codec(spec: CodecSpec) -> Codec:
    """The codec that `spec` names."""
    match spec.name:
        case "none":
            return Raw(spec)
        case "bf16":
            return Bf16(spec)
        case "qsgd":
            return Qsgd(spec)
        case "topk":
            return TopK(spec)
    raise AssertionError(f"CodecSpec let {spec.name!r} through")


__all__ = ["Codec", "make_codec"]
