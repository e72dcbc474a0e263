"""Codecs that send some elements and their indices. Payload: their number, int32; packed indices; values.

N elements of a gradient, K the largest number that is sent
"""

from __future__ import annotations

import torch
from torch import Tensor

from cgx_ray.codecs.codec import MOMENTUM, RESIDUALS, Codec, Memory
from cgx_ray.errors import WireError
from cgx_ray.plan import COUNT_BYTES, VALUE_BUCKET_SIZE, packed_index_bytes, value_bytes
from cgx_ray.runtime_ext import ops, sparse
from cgx_ray.runtime_ext.checks import check_sized


class Selection:
    """Memory for up to K elements of a gradient: ascending indices, int32; values; the number of elements, int32."""

    def __init__(self, num_kept: int, device: torch.device) -> None:
        self.index_K = torch.empty(num_kept, dtype=torch.int32, device=device)
        self.value_K = torch.empty(num_kept, dtype=torch.float32, device=device)
        self.count_1 = torch.empty(1, dtype=torch.int32, device=device)

    @property
    def num_kept(self) -> int:
        return self.index_K.numel()

    def fits(self, num_kept: int, device: torch.device) -> bool:
        return self.num_kept == num_kept and self.index_K.device == device

    def pack(self, numel: int, message: Tensor) -> None:
        """Fill `message`, `CodecSpec.index_bytes` long, with the number and the indices."""
        message[:COUNT_BYTES].view(torch.int32).copy_(self.count_1)
        sparse.pack_indices(self.index_K, self.count_1, numel, message[COUNT_BYTES:])

    def unpack(self, numel: int, message: Tensor) -> None:
        """Read number and indices from `message`: the inverse of `pack`. Raises WireError if it is broken."""
        self.count_1.copy_(message[:COUNT_BYTES].view(torch.int32))
        try:
            sparse.unpack_indices(message[COUNT_BYTES:], self.count_1, numel, self.index_K)
        except ValueError as error:
            raise self.broken(numel, error) from error

    def is_broken(self, numel: int) -> Tensor:
        """Return (1,) int32 on the device: 0 if `unpack` has found up to K indices that ascend below `numel`, else 1.

        On the host `unpack` raises of such a message. On a GPU that would wait, but an index beyond the gradient that
        torch then uses ends the CUDA context.
        """
        place_K = torch.arange(self.num_kept, dtype=torch.int32, device=self.index_K.device)
        is_outside_K = (self.index_K < 0) | (self.index_K >= numel)
        is_outside_K[1:] |= self.index_K[1:] <= self.index_K[:-1]
        is_counted = (self.count_1 >= 0) & (self.count_1 <= self.num_kept)
        return ((is_outside_K & (place_K < self.count_1)).any() | ~is_counted).int()

    def broken(self, numel: int, error: ValueError) -> WireError:
        """Return the error of a message that does not hold a selection from `numel` elements."""
        return WireError(f"a message of {self.num_kept} of {numel} elements is broken: {error}")


class Sparse(Codec):
    """Adds the residual to the gradient, selects elements and packs them. Subclasses define the selection."""

    _room: Selection | None = None

    def build_kernels(self) -> None:
        sparse.build(self.device)
        if self.spec.value_bits not in (16, 32):
            assert self.spec.value_bits is not None
            ops.build_qsgd(self.spec.value_bits, self.device)

    def num_kept(self, numel: int) -> int:
        """Return the most elements that are sent of `numel`."""
        return self.spec.num_kept(numel)

    def index_bytes(self, numel: int) -> int:
        return COUNT_BYTES + packed_index_bytes(numel, self.num_kept(numel))

    def payload_bytes(self, numel: int) -> int:
        assert self.spec.value_bits is not None
        return self.index_bytes(numel) + value_bytes(self.num_kept(numel), self.spec.value_bits)

    def room(self, numel: int, device: torch.device) -> Selection:
        """Return memory for a selection from `numel` elements: the same at every call."""
        num_kept = self.num_kept(numel)
        if self._room is None or not self._room.fits(num_kept, device):
            self._room = Selection(num_kept, device)
        return self._room

    def select(self, fed_N: Tensor, selection: Selection, key: int) -> None:
        """Write the selected elements of `fed_N` to `selection`, ascending in index."""
        raise NotImplementedError

    def take(self, grad_N: Tensor, selection: Selection, key: int, memory: Memory) -> None:
        """Add the residual, select, and remove the selected elements from the new residual."""
        self.select(self.feed(grad_N, memory), selection, key)
        self.forget(selection, memory)

    def forget(self, selection: Selection, memory: Memory) -> None:
        """Set `memory.next` to zero where elements were selected. For momentum: DGC's factor masking (section 3.2)."""
        for kind in (RESIDUALS, MOMENTUM):
            if kind in memory.next:
                sparse.scatter_zero(selection.index_K, selection.count_1, memory.next[kind])

    def encode(self, grad_N: Tensor, payload: Tensor, key: int, memory: Memory | None = None) -> None:
        numel = grad_N.numel()
        selection = self.room(numel, grad_N.device)
        if memory is None:
            self.select(grad_N, selection, key)
        else:
            self.take(grad_N, selection, key, memory)
        if self.spec.value_bits == 32:
            sparse.pack_message(selection.index_K, selection.value_K, selection.count_1, numel, payload)
            return
        index_bytes = self.index_bytes(numel)
        selection.pack(numel, payload[:index_bytes])
        self._write_values(selection.value_K, payload[index_bytes:], key)
        if memory is not None:
            lost_K = selection.value_K.sub_(self._read_values(payload[index_bytes:], selection.num_kept))
            sparse.scatter_add(selection.index_K, lost_K, selection.count_1, memory.next_N)

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
        numel = out_N.numel()
        selection = self.room(numel, out_N.device)
        if self.spec.value_bits == 32:
            try:
                sparse.unpack_message(payload, selection.index_K, out_N, add=add)
            except ValueError as error:
                raise selection.broken(numel, error) from error
            return
        check_sized("payload", payload, torch.uint8, self.payload_bytes(numel), out_N.device)
        index_bytes = self.index_bytes(numel)
        selection.unpack(numel, payload[:index_bytes])
        value_K = self._read_values(payload[index_bytes:], selection.num_kept)
        if not add:
            out_N.zero_()
        sparse.scatter_add(selection.index_K, value_K, selection.count_1, out_N)

    def _write_values(self, value_K: Tensor, part: Tensor, key: int) -> None:
        """Write the values in fewer than 32 bits each."""
        bits = self.spec.value_bits
        assert bits is not None
        if bits == 16:
            part.view(torch.float16).copy_(value_K)
        else:
            ops.qsgd_encode(value_K, part, bits=bits, bucket_size=VALUE_BUCKET_SIZE, key=key)

    def _read_values(self, part: Tensor, num_kept: int) -> Tensor:
        bits = self.spec.value_bits
        assert bits is not None
        if bits == 16:
            return part.view(torch.float16).to(torch.float32)
        value_K = torch.empty(num_kept, dtype=torch.float32, device=part.device)
        ops.qsgd_decode(part, value_K, bits=bits, bucket_size=VALUE_BUCKET_SIZE)
        return value_K


class RandomK(Codec):
    """Elements at random indices. Every rank derives them from the shared key, so only values are sent, and summed."""

    _room: Selection | None = None

    def build_kernels(self) -> None:
        sparse.build(self.device)

    def encode(self, grad_N: Tensor, payload: Tensor, key: int, memory: Memory | None = None) -> None:
        value_K = payload.view(torch.float32)
        selection = self._choose(grad_N, key)
        fed_N = grad_N if memory is None else self.feed(grad_N, memory)
        torch.index_select(fed_N, 0, selection.index_K, out=value_K)
        ops.add_poison(fed_N, value_K)
        if memory is not None:
            sparse.scatter_zero(selection.index_K, selection.count_1, memory.next_N)

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
        check_sized("payload", payload, torch.uint8, self.payload_bytes(out_N.numel()), out_N.device)
        if not add:
            out_N.zero_()
        selection = self._choose(out_N, key)
        sparse.scatter_add(selection.index_K, payload.view(torch.float32), selection.count_1, out_N)

    def _choose(self, like_N: Tensor, key: int) -> Selection:
        """Return the indices that `key` says, in memory that the next call overwrites."""
        numel, num_kept = like_N.numel(), self.spec.num_kept(like_N.numel())
        if self._room is None or not self._room.fits(num_kept, like_N.device):
            self._room = Selection(num_kept, like_N.device)
            self._room.count_1.fill_(num_kept)
        sparse.random_indices(numel, self._room.index_K, key=key)
        return self._room
