"""The interface of all codecs, and their memory of a group of layers from one step to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cgx_ray.plan import CodecSpec, Layer
from cgx_ray.runtime_ext import ops

HOST = torch.device("cpu")

# Kinds of memory, by their names in a checkpoint.
RESIDUALS = "residuals"
MOMENTUM = "momentum"
POWERSGD_Q = "powersgd_q"
KINDS = (RESIDUALS, MOMENTUM, POWERSGD_Q)
# Kinds that are sums of gradients, so they have a loss scale. Q has none: P is made orthonormal, so scaling Q changes
# nothing.
SCALED_KINDS = (RESIDUALS, MOMENTUM)


class Memory:
    """Flat float32 buffers by kind, two of each: `now` is read, `next` is written, and `commit` swaps them.

    A step that is not committed leaves no trace, whatever was encoded in it.

    scale  loss scale of the gradients that the memory was made from
    """

    def __init__(self, now: Mapping[str, Tensor], next_: Mapping[str, Tensor], scale: float = 1.0) -> None:
        self.now = now
        self.next = next_
        self.scale = scale

    @classmethod
    def joined(cls, parts: Sequence[Mapping[str, Tensor]], device: torch.device | str = "cpu") -> Memory | None:
        """Return memory that begins with `parts`, one per layer, all of the same kinds; None if they have no kind."""
        if not parts or not parts[0]:
            return None
        now = {kind: torch.cat([part[kind].to(device) for part in parts]) for kind in parts[0]}
        return cls(now, {kind: torch.zeros_like(buffer) for kind, buffer in now.items()})

    @property
    def residual_N(self) -> Tensor | None:  # noqa: N802 - tensors end in their dimensions
        """(N,) the residual; None if this memory has none."""
        return self.now.get(RESIDUALS)

    @property
    def next_N(self) -> Tensor:  # noqa: N802
        """(N,) the residual of the next step."""
        return self.next[RESIDUALS]

    def part(self, start: int, stop: int) -> Memory:
        """Return views of the memory of the elements [start, stop), for kinds that have one number per element."""
        now, next_ = (
            {kind: kinds[kind][start:stop] for kind in (RESIDUALS, MOMENTUM) if kind in kinds}
            for kinds in (self.now, self.next)
        )
        return Memory(now, next_, self.scale)

    def rescale(self, scale: float) -> None:
        """Convert to the loss scale `scale`. Exact for powers of two, the default factors of GradScaler."""
        if scale == self.scale:
            return
        for kind in SCALED_KINDS:
            if kind in self.now:
                self.now[kind].mul_(scale / self.scale)
        self.scale = scale

    def without_residual(self) -> Memory:
        """Return memory with the same `next` buffers and no residual."""
        return Memory({}, self.next, self.scale)

    def commit(self) -> None:
        """Make valid what the last `encode` wrote. Call it only for steps whose averages are all finite."""
        self.now, self.next = self.next, self.now


@dataclass(frozen=True, slots=True)
class PayloadRow:
    """A part of a gradient and its payload, as `Codec.encode` and `Codec.decode` take them."""

    part_N: Tensor  # noqa: N815 - tensors end in their dimensions
    payload: Tensor
    key: int = 0
    memory: Memory | None = None


class Codec:
    """Encodes a flat float32 gradient to a payload, flat uint8, and decodes it.

    On the host, codecs with `takes_16_bit` also encode 16-bit gradients, and decode to them without `add`. The bits are
    those of float32, rounded to 16 bits once, at the end.

    record      what is known of the codec, see `CodecRecord`
    device      where the gradients are
    granule     chunks of a gradient may be cut at multiples of this many elements
    wire_dtype  of the payload's numbers, for codecs whose messages an all-reduce adds
    """

    device = HOST
    wire_dtype = torch.float32

    def __init__(self, spec: CodecSpec, layers: Sequence[Layer] = (), world_size: int = 1) -> None:
        self.spec = spec
        self.record = spec.record
        self.layers = layers
        self.world_size = world_size
        self.granule = spec.bucket_size or 1
        self.needs_feedback = self.record.feeds_back(spec)
        self.takes_16_bit = self.record.takes_16_bit and not self.needs_feedback

    def payload_bytes(self, numel: int) -> int:
        """Return the exact size of the payload of `numel` elements."""
        return self.spec.payload_bytes(numel)

    def index_bytes(self, numel: int) -> int:
        """Return the part of `payload_bytes` that says which elements are sent."""
        return self.spec.index_bytes(numel)

    def memory_of(self, numel: int, layer: Layer | None = None) -> dict[str, Tensor]:
        """Return by kind the memory of one layer, or of a whole group of unknown layers, before the first step."""
        return {RESIDUALS: torch.zeros(numel, dtype=torch.float32, device=HOST)} if self.needs_feedback else {}

    def new_memory(self, numel: int, device: torch.device | str = "cpu") -> Memory | None:
        """Return the memory of a group before its first step; None for codecs without memory."""
        parts = [self.memory_of(layer.numel, layer) for layer in self.layers] or [self.memory_of(numel)]
        return Memory.joined(parts, device)

    def feed(self, grad_N: Tensor, memory: Memory) -> Tensor:
        """Return the gradient plus the residual, (N,) float32, in `memory.next_N`. `encode` later overwrites it."""
        if memory.residual_N is None:
            return memory.next_N.copy_(grad_N)
        return torch.add(grad_N, memory.residual_N, out=memory.next_N)

    def build_kernels(self) -> None:
        """Compile and load what `encode` and `decode` launch on `device`, or else the first of them does, in a step."""

    def encode(self, grad_N: Tensor, payload: Tensor, key: int, memory: Memory | None = None) -> None:
        """Fill `payload`, of exactly `payload_bytes(N)` bytes. `key`, 32 bits, seeds the random numbers.

        With `memory`, the gradient plus the residual is encoded, and `memory.next` gets the new residual. A gradient
        with NaN or Inf gives a payload that decodes to a gradient with NaN or Inf.
        """
        raise NotImplementedError

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
        """Write the decoded `payload` to `out_N`, float32, or add it. `key` as in `encode`; only randomk uses it.

        Raises WireError if the payload is broken, and ValueError if it has another size. `out_N` is unchanged then.
        """
        raise NotImplementedError

    def encode_rows(self, rows: Sequence[PayloadRow]) -> None:
        """Encode several parts of a gradient."""
        for row in rows:
            self.encode(row.part_N, row.payload, row.key, row.memory)

    def decode_rows(self, rows: Sequence[PayloadRow]) -> None:
        """Decode several parts of a gradient."""
        for row in rows:
            self.decode(row.payload, row.part_N, add=False)

    def encode_share(self, row: PayloadRow, residual_scale: float) -> None:
        """Encode the average of `residual_scale` gradients, or a part of it.

        row  `part_N`, float32, is changed in place. `memory` is in units of the sum: the residual is added divided by
             `residual_scale`, and what the encoding drops is kept multiplied by it
        """
        if row.memory is None:
            self.encode(row.part_N, row.payload, row.key)
            return
        if row.memory.residual_N is not None:
            row.part_N.add_(row.memory.residual_N, alpha=1 / residual_scale)
        self.encode(row.part_N, row.payload, row.key, row.memory.without_residual())
        row.memory.next_N.mul_(residual_scale)

    def sum_rows(self, own: PayloadRow, payloads: Sequence[Tensor], num_ranks: int) -> None:
        """Add the decoded `payloads`, in their order, to a part of the gradient, and encode 1 / `num_ranks` of the sum.

        own  as for `encode_share`; what `part_N` holds afterwards is undefined
        """
        for payload in payloads:
            self.decode(payload, own.part_N, add=True)
        ops.divide(own.part_N, num_ranks)
        self.encode_share(own, num_ranks)


def nan_if_not_finite(grad_N: Tensor) -> Tensor | float:
    """Return 0 if `grad_N` is finite, else NaN; see `ops.poison`.

    Codecs that might not send NaN and Inf elements add it to an element that they send.
    """
    return ops.poison(grad_N)


def is_finite(grad_N: Tensor) -> bool:
    """Return True if no element is NaN or Inf."""
    return not math.isnan(float(nan_if_not_finite(grad_N)))
