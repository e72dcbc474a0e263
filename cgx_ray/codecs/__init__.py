"""Codecs encode a gradient to bytes and decode it. `make_codec` makes one from a CodecSpec."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cgx_ray.codecs.cast import Bf16, Fp16, Prefix, Raw
from cgx_ray.codecs.codec import HOST, Codec, Memory
from cgx_ray.codecs.powersgd import PowerSgd
from cgx_ray.codecs.qsgd import Qsgd, Sign
from cgx_ray.codecs.selectors import Dgc, LwTopK, MsTopK, Sidco, TopK
from cgx_ray.codecs.sparse import RandomK
from cgx_ray.plan import CodecSpec, Layer

_CODECS: dict[str, type[Codec]] = {
    "none": Raw,
    "fp16": Fp16,
    "bf16": Bf16,
    "prefix": Prefix,
    "qsgd": Qsgd,
    "terngrad": Qsgd,
    "topk": TopK,
    "lwtopk": LwTopK,
    "mstopk": MsTopK,
    "dgc": Dgc,
    "sidco": Sidco,
    "randomk": RandomK,
    "ef_signsgd": Sign,
    "onebit": Sign,
    "powersgd": PowerSgd,
}


def make_codec(
    spec: CodecSpec, layers: Sequence[Layer] = (), world_size: int = 1, device: torch.device = HOST
) -> Codec:
    """Return the codec that `spec` names.

    layers  of the group; without them the codec treats the group as one layer
    device  of the gradients
    """
    codec = _CODECS[spec.name](spec, layers, world_size)
    codec.device = device
    return codec


__all__ = ["Codec", "Memory", "make_codec"]
