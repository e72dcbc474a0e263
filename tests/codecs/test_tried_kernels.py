"""Before a codec works on a device, it must code as on a CPU: a wrong compiler is found, whatever it does wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from cgx_ray import codecs
from cgx_ray.codecs.codec import HOST, Codec, Memory, PayloadRow
from cgx_ray.codecs.qsgd import Sign
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


Mistake = Callable[[Tensor, Tensor, Memory | None], None]


class _Wrong(Sign):
    """A codec that makes a mistake elsewhere: when it decodes, or when it sums."""

    in_decode: Mistake | None = None
    in_sum: Mistake | None = None

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
        super().decode(payload, out_N, add=add, key=key)
        if self.in_decode is not None and not add:
            self.in_decode(payload, out_N, None)

    def sum_rows(self, own: PayloadRow, payloads: Sequence[Tensor], num_ranks: int) -> None:
        super().sum_rows(own, payloads, num_ranks)
        if self.in_sum is not None:
            self.in_sum(own.payload, own.part_N, own.memory)


@pytest.mark.parametrize(
    ("in_decode", "in_sum"),
    [
        (_beyond, None),
        (_in_payload, None),
        (_in_gradient, None),
        (None, _beyond),
        (None, _in_payload),
        (None, _in_residual),
    ],
)
def test_a_device_that_codes_otherwise_is_refused(
    in_decode: Mistake | None, in_sum: Mistake | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(spec: CodecSpec, layers: Sequence[Layer] = (), world_size: int = 1, device: torch.device = HOST) -> Codec:
        codec = _Wrong(spec, layers, world_size)
        codec.device = device
        if device != HOST:
            codec.in_decode, codec.in_sum = in_decode, in_sum
        return codec

    monkeypatch.setattr(codecs, "make_codec", make)
    with pytest.raises(ConfigError, match=r"codec ef_signsgd.* computes other bits on cpu:0 than on a CPU"):
        codecs._try_kernels.__wrapped__(CodecSpec.parse("ef_signsgd"), ELSEWHERE)
