"""What every codec does, and what it remembers of a group of layers from one step to the next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cgx_ray.plan import CodecSpec, Layer

HOST = torch.device("cpu")

# Kinds of memory, as they are called in a checkpoint.
RESIDUALS = "residuals"
MOMENTUM = "momentum"
POWERSGD_Q = "powersgd_q"
KINDS = (RESIDUALS, MOMENTUM, POWERSGD_Q)
# Sums of gradients. Q is left out: a factor of it changes nothing, since P is made orthonormal.
SCALED_KINDS = (RESIDUALS, MOMENTUM)


class Memory:
    """Flat float32 buffers by kind, twice each: `now` is read, `next` is written, and `commit` swaps them.

    So a step that is not committed leaves no trace, whatever was encoded in it. `scale` is the unit: what is remembered
    is that many times what it would be of true gradients, as the loss was scaled by it.
    """

    def __init__(self, now: Mapping[str, Tensor], next_: Mapping[str, Tensor], scale: float = 1.0) -> None:
        self.now = now
        self.next = next_
        self.scale = scale

    @classmethod
    def joined(cls, parts: Sequence[Mapping[str, Tensor]], device: torch.device | str = "cpu") -> Memory | None:
        """Memory that begins with `parts`, one a layer and all of the same kinds; None if there is no kind."""
        if not parts or not parts[0]:
            return None
        now = {kind: torch.cat([part[kind].to(device) for part in parts]) for kind in parts[0]}
        return cls(now, {kind: torch.zeros_like(buffer) for kind, buffer in now.items()})

    @property
    def residual_N(self) -> Tensor | None:  # noqa: N802 - tensors end in their dimensions
        """(N,) what is owed; None if nothing can be."""
        return self.now.get(RESIDUALS)

    @property
    def next_N(self) -> Tensor:  # noqa: N802
        """(N,) what will be owed."""
        return self.next[RESIDUALS]

    def part(self, start: int, stop: int) -> Memory:
        """What is remembered of the elements [start, stop), each for itself, as views."""
        now, next_ = (
            {kind: kinds[kind][start:stop] for kind in (RESIDUALS, MOMENTUM) if kind in kinds}
            for kinds in (self.now, self.next)
        )
        return Memory(now, next_, self.scale)

    def rescale(self, scale: float) -> None:
        """Change the unit to `scale`: exactly by powers of two, which GradScaler takes unless told otherwise."""
        if scale == self.scale:
            return
        for kind in SCALED_KINDS:
            if kind in self.now:
                self.now[kind].mul_(scale / self.scale)
        self.scale = scale

    def without_debt(self) -> Memory:
        """The same room for what will be owed, with nothing owed."""
        return Memory({}, self.next, self.scale)

    def commit(self) -> None:
        """Let what the last `encode` wrote take effect: only for a step whose averages are all finite."""
        self.now, self.next = self.next, self.now


class Codec:
    """Encodes a flat gradient, float32 unless said otherwise, to a payload, flat uint8, and decodes it.

    device          where the gradients are
    granule         chunks of a gradient may be cut at multiples of this many elements
    needs_feedback  True if what it drops must be added to the next step's gradient to converge
    shares_key      True if all ranks must encode with the same key
    """

    device = HOST
    granule = 1
    needs_feedback = False
    shares_key = False

    def __init__(self, spec: CodecSpec, layers: Sequence[Layer] = (), world_size: int = 1) -> None:
        self.spec = spec
        self.layers = layers
        self.world_size = world_size

    def payload_bytes(self, numel: int) -> int:
        """Exact size of the payload of `numel` elements."""
        return self.spec.payload_bytes(numel)

    def memory_of(self, numel: int, layer: Layer | None = None) -> dict[str, Tensor]:
        """By kind, what this codec remembers of a layer, or a whole group of unknown layers, before the first step."""
        return {RESIDUALS: torch.zeros(numel)} if self.needs_feedback else {}

    def new_memory(self, numel: int, device: torch.device | str = "cpu") -> Memory | None:
        """Memory of a group at its first step; None for codecs that need none."""
        parts = [self.memory_of(layer.numel, layer) for layer in self.layers] or [self.memory_of(numel)]
        return Memory.joined(parts, device)

    def feed(self, grad_N: Tensor, memory: Memory) -> Tensor:
        """The error-fed gradient, (N,) float32, which overwrites `memory.next_N` until `encode` does."""
        if memory.residual_N is None:
            return memory.next_N.copy_(grad_N)
        return torch.add(grad_N, memory.residual_N, out=memory.next_N)

    def encode(self, grad_N: Tensor, payload: Tensor, key: int, memory: Memory | None = None) -> None:
        """Fill `payload`, of exactly `payload_bytes(N)` bytes. `key`, 32 bits, seeds the random numbers.

        With `memory` what is encoded is `grad_N` and what is owed, and `memory.next` gets what will be owed. A
        gradient with NaN or Inf makes a payload that decodes to some.
        """
        raise NotImplementedError

    def decode(self, payload: Tensor, out_N: Tensor, *, add: bool, key: int = 0) -> None:
        """Write what `payload` holds to `out_N`, float32, or add it. `key` as in `encode`; only randomk uses it.

        Raises WireError on an impossible payload.
        """
        raise NotImplementedError


def poison(grad_N: Tensor) -> Tensor:
    """0 if `grad_N` is finite, else NaN: for codecs that might leave out the elements that are not."""
    if grad_N.numel() == 0:
        return grad_N.new_zeros((), dtype=torch.float32)
    low, high = torch.aminmax(grad_N)
    return (low * 0 + high * 0).float()


def is_finite(grad_N: Tensor) -> bool:
    """True if no element is NaN or Inf."""
    return not math.isnan(float(poison(grad_N)))
