"""Before a codec works on a device, it must code as on a CPU: a wrong compiler is found, whatever it does wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cgx_ray import codecs
from cgx_ray.codecs.codec import HOST, Codec, Memory
from cgx_ray.errors import ConfigError
from cgx_ray.plan import CodecSpec, Layer

# Not HOST, but the CPU all the same.
ELSEWHERE = torch.device("cpu", 0)
SPECS = [
    CodecSpec.parse(text)
    for text in ("qsgd:bits=3", "terngrad", "ef_signsgd", "onebit", "topk", "dgc:density=0.1", "sidco", "randomk")
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_device_that_codes_as_a_cpu_passes(spec: CodecSpec) -> None:
    assert type(codecs.make_codec(spec)).build_kernels is not Codec.build_kernels
    codecs._try_kernels(spec, ELSEWHERE)


def _beyond(payload: Tensor, out_N: Tensor, memory: Memory | None) -> None:
    payload.as_strided((payload.numel() + 1,), (1,))[-1] = 7


def _in_payload(payload: Tensor, out_N: Tensor, memory: Memory | None) -> None:
    payload[-1] ^= 1


def _in_gradient(payload: Tensor, out_N: Tensor, memory: Memory | None) -> None:
    out_N[-1] += 1e-3


def _in_residual(payload: Tensor, out_N: Tensor, memory: Memory | None) -> None:
    assert memory is not None
    memory.next_N[-1] += 1e-3


@pytest.mark.parametrize("mistake", [_beyond, _in_payload, _in_gradient, _in_residual])
def test_a_device_that_codes_otherwise_is_refused(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make = codecs.make_codec

    def make_wrong(
        spec: CodecSpec, layers: Sequence[Layer] = (), world_size: int = 1, device: torch.device = HOST
    ) -> Codec:
        codec = make(spec, layers, world_size, device)
        if device != HOST:
            encode, decode = codec.encode, codec.decode
            seen: list[Memory | None] = []

            def wrong_encode(grad_N: Tensor, payload: Tensor, key: int, memory: Memory | None = None) -> None:
                encode(grad_N, payload, key, memory)
                seen.append(memory)

            def wrong_decode(payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
                decode(payload, out_N, add=add, key=key)
                mistake(payload, out_N, seen[-1])

            codec.encode, codec.decode = wrong_encode, wrong_decode  # type: ignore[method-assign]
        return codec

    monkeypatch.setattr(codecs, "make_codec", make_wrong)
    with pytest.raises(ConfigError, match=r"codec ef_signsgd.* computes other bits on cpu:0 than on a CPU"):
        codecs._try_kernels.__wrapped__(CodecSpec.parse("ef_signsgd"), ELSEWHERE)
