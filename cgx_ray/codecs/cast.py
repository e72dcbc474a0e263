"""Codecs that change the number format, or send only the beginning of the gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cgx_ray.codecs.codec import Codec, Memory, PayloadRow
from cgx_ray.runtime_ext import ops
from cgx_ray.runtime_ext.checks import check_sized
from cgx_ray.runtime_ext.streams import streams_of

# On a CPU torch converts a whole operand before it adds it to another type. A converted piece of this size stays in the
# cache.
_PIECE_NUMEL = 1 << 18


class _Cast(Codec):
    def encode(self, grad_N: Tensor, payload: Tensor, key: int, memory: Memory | None = None) -> None:
        """Round each element to `wire_dtype`, to nearest even. NaN and Inf survive; `key` is not used."""
        assert memory is None, "casts keep no residuals"
        payload.view(self.wire_dtype).copy_(grad_N)

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
        check_sized("payload", payload, torch.uint8, self.payload_bytes(out_N.numel()), out_N.device)
        values_N = payload.view(self.wire_dtype)
        if not add:
            out_N.copy_(values_N)
        elif not out_N.is_cpu:
            out_N.add_(values_N)
        else:
            for values, out in zip(values_N.split(_PIECE_NUMEL), out_N.split(_PIECE_NUMEL), strict=True):
                out.add_(values)

    def encode_rows(self, rows: Sequence[PayloadRow]) -> None:
        self._copy([(row.part_N, self._values(row)) for row in rows])

    def decode_rows(self, rows: Sequence[PayloadRow]) -> None:
        self._copy([(self._values(row), row.part_N) for row in rows])

    def _values(self, row: PayloadRow) -> Tensor:
        check_sized("payload", row.payload, torch.uint8, self.payload_bytes(row.part_N.numel()), row.part_N.device)
        return row.payload.view(self.wire_dtype)

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy the first of each pair to the second, unless it lies there: by one call on a GPU."""
        apart = [pair for pair in pairs if pair[0].data_ptr() != pair[1].data_ptr()]
        streams_of(self.device).copy_each(apart)


class Raw(_Cast):
    """Codec none: float32, unchanged. Its messages may lie in the gradient; then nothing is to be done."""

    def encode(self, grad_N: Tensor, payload: Tensor, key: int, memory: Memory | None = None) -> None:
        if payload.data_ptr() != grad_N.data_ptr():
            super().encode(grad_N, payload, key, memory)

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
        if payload.data_ptr() != out_N.data_ptr():
            super().decode(payload, out_N, add=add)


class Fp16(_Cast):
    """float16: half the bytes, 11 bits of precision. Finite elements from 65520 on become Inf."""

    wire_dtype = torch.float16


class Bf16(_Cast):
    """bfloat16: half the bytes, the range of float32, 8 bits of precision."""

    wire_dtype = torch.bfloat16


class Prefix(Codec):
    """The first N / ratio elements as float32, zeros for the others.

    CGX's synthetic bandwidth experiment (section 2): it shows how fast training would be with `ratio` times fewer
    bytes. A diagnostic that does not converge, since the other elements are lost. NaN or Inf among them makes the
    first element NaN.
    """

    def encode(self, grad_N: Tensor, payload: Tensor, key: int, memory: Memory | None = None) -> None:
        assert memory is None, "prefix keeps no residuals"
        sent_K = payload.view(torch.float32)
        sent_K.copy_(grad_N[: sent_K.numel()])
        ops.add_poison(grad_N[sent_K.numel() :], sent_K)

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
        check_sized("payload", payload, torch.uint8, self.payload_bytes(out_N.numel()), out_N.device)
        sent_K = payload.view(torch.float32)
        if add:
            out_N[: sent_K.numel()] += sent_K
        else:
            out_N[: sent_K.numel()] = sent_K
            out_N[sent_K.numel() :] = 0.0
