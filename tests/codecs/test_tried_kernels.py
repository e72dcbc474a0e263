"""Before a codec works on a device, it must code as on a CPU: a wrong compiler is found, whatever it does wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from support.cuda.small_run import TEXTS
from torch import Tensor

from cgx_ray import codecs
from cgx_ray.codecs.codec import HOST, Codec, Memory, PayloadRow
from cgx_ray.codecs.qsgd import Sign
from cgx_ray.errors import ConfigError
from cgx_ray.plan import CodecSpec, Layer

# Not HOST, but the CPU all the same.
ELSEWHERE = torch.device("cpu", 0)


@pytest.mark.parametrize("text", TEXTS)
def test_a_device_that_codes_as_a_cpu_passes(text: str) -> None:
    spec = CodecSpec.parse(text)
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
    """A codec that makes a mistake elsewhere, in one of its methods."""

    method = ""
    mistake: Mistake | None = None

    def _err(self, method: str, payload: Tensor, out_N: Tensor, memory: Memory | None) -> None:
        if self.mistake is not None and self.method == method:
            self.mistake(payload, out_N, memory)

    def encode(self, grad_N: Tensor, payload: Tensor, key: int, memory: Memory | None = None) -> None:
        super().encode(grad_N, payload, key, memory)
        self._err("encode", payload, grad_N, memory)

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
        super().decode(payload, out_N, add=add, key=key)
        self._err("add" if add else "decode", payload, out_N, None)

    def sum_rows(self, own: PayloadRow, payloads: Sequence[Tensor], num_ranks: int) -> None:
        if self.method == "forgetful sum":
            own = replace(own, memory=Memory({}, own.memory.next)) if own.memory is not None else own
        super().sum_rows(own, payloads, num_ranks)
        self._err("sum", own.payload, own.part_N, own.memory)


@pytest.mark.parametrize(
    ("method", "mistake"),
    [
        ("encode", _beyond),
        ("encode", _in_payload),
        ("encode", _in_residual),
        ("decode", _in_gradient),
        ("add", _in_gradient),
        ("sum", _beyond),
        ("sum", _in_payload),
        ("sum", _in_residual),
        ("forgetful sum", None),
    ],
)
def test_a_device_that_codes_otherwise_is_refused(
    method: str, mistake: Mistake | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(spec: CodecSpec, layers: Sequence[Layer] = (), world_size: int = 1, device: torch.device = HOST) -> Codec:
        codec = _Wrong(spec, layers, world_size)
        codec.device = device
        if device != HOST:
            codec.method, codec.mistake = method, mistake
        return codec

    monkeypatch.setattr(codecs, "make_codec", make)
    with pytest.raises(ConfigError, match=r"codec ef_signsgd.* computes other bits on cpu:0 than on a CPU"):
        codecs._try_kernels.__wrapped__(CodecSpec.parse("ef_signsgd"), ELSEWHERE)
