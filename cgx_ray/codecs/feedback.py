"""What codecs remember of every layer, error feedback first of all. And how much a codec drops: the gain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from cgx_ray.codecs.codec import KINDS, POWERSGD_Q, RESIDUALS, SCALED_KINDS, Codec, Memory
from cgx_ray.errors import StateError
from cgx_ray.plan import Layer
from cgx_ray.runtime_ext import reference, sparse

# Gains are measured on blocks, because neighbours share a scale that a bucketed codec makes use of.
GAIN_BLOCK = 1024
GAIN_SAMPLE_NUMEL = 1 << 16
# Counting is cheap, and of a large sample 0.1 % are many enough.
CURVE_SAMPLE_NUMEL = 1 << 18


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a layer's memory of one kind lies in that of its group."""

    memory: Memory
    kind: str
    start: int
    stop: int

    def now(self) -> Tensor:
        return self.memory.now[self.kind][self.start : self.stop]

    def keep(self) -> None:
        self.memory.next[self.kind][self.start : self.stop] = self.now()


class Memories:
    """What codecs remember, by kind and parameter name, so that it outlives buckets, groups and plans.

    scale  the unit of all of it, see `Memory`
    """

    def __init__(self) -> None:
        self.scale = 1.0
        self._entries: dict[str, dict[str, Tensor | _Place]] = {kind: {} for kind in KINDS}

    def of_group(self, codec: Codec) -> Memory | None:
        """Memory, on its device, of the group that `codec` was made for, filled with what is known of its layers.

        The layers' entries are then what it holds, and follow its commits. What `codec` has no use for is forgotten,
        but for residuals: those are owed until `forget`.

        Raises StateError if what is known has another size than the layer.
        """
        parts = [self._start(codec, layer) for layer in codec.layers]
        memory = Memory.joined(parts, codec.device)
        if memory is not None:
            memory.scale = self.scale
        for kind in KINDS:
            start = 0
            for layer, part in zip(codec.layers, parts, strict=True):
                if memory is not None and kind in part:
                    stop = start + part[kind].numel()
                    self._entries[kind][layer.name] = _Place(memory, kind, start, stop)
                    start = stop
                elif kind != RESIDUALS:
                    self._entries[kind].pop(layer.name, None)
        return memory

    def _start(self, codec: Codec, layer: Layer) -> dict[str, Tensor]:
        """What `codec` begins with for `layer`: what is known, else its own start."""
        part = codec.memory_of(layer.numel, layer)
        for kind, fresh in part.items():
            known = self._value(kind, layer.name)
            if known is not None and known.numel() == fresh.numel():
                part[kind] = known
            elif known is not None and kind != POWERSGD_Q:  # a Q of another rank is no start
                raise StateError(
                    f"{kind} of {layer.name!r} has {known.numel()} elements, the layer has {layer.numel}; "
                    "the checkpoint is of another model"
                )
        return part

    @property
    def is_empty(self) -> bool:
        """Nothing is remembered of any layer."""
        return not any(self._entries.values())

    def owed(self, name: str) -> Tensor | None:
        """What is owed to a layer: for codecs that send everything."""
        return self._value(RESIDUALS, name)

    def forget(self, name: str) -> None:
        """Nothing is owed to a layer any more."""
        self._entries[RESIDUALS].pop(name, None)

    def keep(self, names: Iterable[str]) -> None:
        """Let layers remember after the next commit of their groups what they do now."""
        for entry in (entries.get(name) for name in names for entries in self._entries.values()):
            if isinstance(entry, _Place):
                entry.keep()

    def rescale(self, scale: float) -> None:
        """Change the unit to `scale`, in place; costs nothing if it is that already."""
        if scale == self.scale:
            return
        for entry in (entry for kind in SCALED_KINDS for entry in self._entries[kind].values()):
            if isinstance(entry, _Place):
                entry.memory.rescale(scale)
            else:
                entry.mul_(scale / self.scale)
        self.scale = scale

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Copies on the host, by kind and name, for a checkpoint."""
        return {
            kind: {
                name: value.to("cpu", copy=True) for name in entries if (value := self._value(kind, name)) is not None
            }
            for kind, entries in self._entries.items()
        }

    def load(self, state: Mapping[str, Mapping[str, Tensor]], scale: float = 1.0) -> None:
        """Forget everything and keep `state`, whose unit is `scale`, until a group asks for it."""
        self.scale = scale
        self._entries = {kind: {name: value.clone() for name, value in state[kind].items()} for kind in KINDS}

    def _value(self, kind: str, name: str) -> Tensor | None:
        entry = self._entries[kind].get(name)
        return entry.now() if isinstance(entry, _Place) else entry


def sample_blocks(grad_N: Tensor, max_numel: int = GAIN_SAMPLE_NUMEL) -> Tensor:
    """About `max_numel` elements of `grad_N`, or all if it has fewer: whole blocks, evenly spaced."""
    num_blocks = grad_N.numel() // GAIN_BLOCK
    stride = num_blocks * GAIN_BLOCK // max_numel
    if stride <= 1:
        return grad_N
    return grad_N[: num_blocks * GAIN_BLOCK].view(num_blocks, GAIN_BLOCK)[::stride].reshape(-1)


def squared_error(codec: Codec, grad_N: Tensor, key: int) -> float:
    """|g - decode(encode(g))|^2, in float64."""
    payload = torch.empty(codec.payload_bytes(grad_N.numel()), dtype=torch.uint8, device=grad_N.device)
    decoded_N = torch.empty_like(grad_N)
    codec.encode(grad_N, payload, key)
    codec.decode(payload, decoded_N, add=False, key=key)
    return float((grad_N.double() - decoded_N).square().sum())


def kept_energy(codec: Codec, grad_N: Tensor, key: int) -> float:
    """|g|^2 less `squared_error`, in float64.

    For top-k this is |g_c|^2, the numerator of the compression gain (Flexible Communication, section 2-C3), as what
    it drops is orthogonal to what it keeps. For unbiased codecs |g_c|^2 would exceed |g|^2: the error says what is
    lost.
    """
    return float(grad_N.double().square().sum()) - squared_error(codec, grad_N, key)


class GainCurve:
    """Gain of top-k at every density, from one histogram of magnitudes (Flexible Communication, section 2-C3).

    The elements of a bin, which is at most 1/16 of its magnitudes wide, count as spread evenly over it. That is exact
    but for the bins' ends: within 0.2 % on gradients with light and heavy tails.
    """

    def __init__(self, grad_N: Tensor) -> None:
        """`grad_N`: the error-fed gradient or a sample of it, of any float type and device."""
        if grad_N.dtype == torch.float64:
            # The histogram's bins are those of float32.
            grad_N = grad_N.float()
        counts = sparse.magnitude_histogram(grad_N).cpu().double()
        # Largest first. Empty bins of NaN and Inf would be 0 * inf.
        energy = torch.where(counts > 0, counts * _bin_squares(), 0.0)
        self._numel = torch.cat((torch.zeros(1), counts.flip(0).cumsum(0)))
        self._energy = torch.cat((torch.zeros(1), energy.flip(0).cumsum(0)))

    def gain(self, densities: Sequence[float]) -> list[float]:
        """By density, the share of |g|^2 that so many of the largest hold; 1 of nothing, NaN if |g| is not finite.

        How many that are is rounded up, as top-k does.
        """
        total = float(self._energy[-1])
        if total == 0:
            return [1.0] * len(densities)
        kept_D = (torch.tensor(densities, dtype=torch.float64) * self._numel[-1]).ceil()
        # The first bin that reaches so far down.
        last_D = torch.searchsorted(self._numel, kept_D).clamp(1, len(self._numel) - 1)
        first_D = last_D - 1
        share_D = (kept_D - self._numel[first_D]) / (self._numel[last_D] - self._numel[first_D])
        gain_D: list[float] = (torch.lerp(self._energy[first_D], self._energy[last_D], share_D) / total).tolist()
        return gain_D


@cache
def _bin_squares() -> Tensor:
    """(NUM_BINS,) float64, mean square of magnitudes that are spread evenly over a bin."""
    edges = torch.arange(reference.NUM_BINS + 1, dtype=torch.int64) << reference.HISTOGRAM_SHIFT
    edges[-1] -= 1
    edge = edges.to(torch.int32).view(torch.float32).double()
    low, high = edge[:-1], edge[1:]
    squares = (low * low + low * high + high * high) / 3
    # Where zeros are counted, there are only denormals besides.
    squares[0] = 0
    return squares
