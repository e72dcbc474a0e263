"""The memory of codecs by layer name, above all the residuals of error feedback."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from cgx_ray.codecs.codec import KINDS, POWERSGD_Q, RESIDUALS, SCALED_KINDS, Codec, Memory
from cgx_ray.errors import StateError
from cgx_ray.plan import Layer


@dataclass(frozen=True, slots=True)
class _LayerSlice:
    """The elements [start, stop) of a group's memory of one kind, which belong to one layer."""

    memory: Memory
    kind: str
    start: int
    stop: int

    def now(self) -> Tensor:
        return self.memory.now[self.kind][self.start : self.stop]

    def keep(self) -> None:
        self.memory.next[self.kind][self.start : self.stop] = self.now()


class Memories:
    """Memory by kind and parameter name. It outlives buckets, groups and plans.

    scale  loss scale of all of it, see `Memory`
    """

    def __init__(self) -> None:
        self.scale = 1.0
        # A slice for layers whose group has memory of this kind; a tensor for layers that wait for such a group.
        self._entries: dict[str, dict[str, Tensor | _LayerSlice]] = {kind: {} for kind in KINDS}

    def of_group(self, codec: Codec) -> Memory | None:
        """Return the memory of the group that `codec` was made for, on its device, or None if the codec has none.

        It begins with the known memory of the layers. From now on it is the memory of these layers and follows the
        commits. Kinds that `codec` does not use are deleted, except residuals, which are kept until `forget`.

        Raises StateError if the known memory and the layer differ in size.
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
                    self._entries[kind][layer.name] = _LayerSlice(memory, kind, start, stop)
                    start = stop
                elif kind != RESIDUALS:
                    self._entries[kind].pop(layer.name, None)
        return memory

    def _start(self, codec: Codec, layer: Layer) -> dict[str, Tensor]:
        """Return the memory by kind that `codec` begins with for `layer`: the known one, else a fresh one."""
        part = codec.memory_of(layer.numel, layer)
        for kind, fresh in part.items():
            known = self._value(kind, layer.name)
            if known is not None and known.numel() == fresh.numel():
                part[kind] = known
            elif known is not None and kind != POWERSGD_Q:  # a Q for another rank of the approximation is useless
                raise StateError(
                    f"{kind} of {layer.name!r} has {known.numel()} elements, the layer has {layer.numel}; "
                    "the checkpoint is from another model"
                )
        return part

    @property
    def is_empty(self) -> bool:
        """True if no layer has any memory."""
        return not any(self._entries.values())

    def residual(self, name: str) -> Tensor | None:
        """Return the residual of a layer, for codecs that send all of it at once."""
        return self._value(RESIDUALS, name)

    def forget(self, name: str) -> None:
        """Delete the residual of a layer."""
        self._entries[RESIDUALS].pop(name, None)

    def keep(self, names: Iterable[str]) -> None:
        """Copy the present memory of these layers, so that it is unchanged after the next commit of their groups."""
        for entry in (entries.get(name) for name in names for entries in self._entries.values()):
            if isinstance(entry, _LayerSlice):
                entry.keep()

    def rescale(self, scale: float) -> None:
        """Convert all memory to the loss scale `scale`, in place. Costs nothing if `scale` has not changed."""
        if scale == self.scale:
            return
        for entry in (entry for kind in SCALED_KINDS for entry in self._entries[kind].values()):
            if isinstance(entry, _LayerSlice):
                entry.memory.rescale(scale)
            else:
                entry.mul_(scale / self.scale)
        self.scale = scale

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return copies on the host, by kind and name, for a checkpoint."""
        return {
            kind: {
                name: value.to("cpu", copy=True) for name in entries if (value := self._value(kind, name)) is not None
            }
            for kind, entries in self._entries.items()
        }

    def load(self, state: Mapping[str, Mapping[str, Tensor]], scale: float = 1.0) -> None:
        """Replace all memory by copies of `state`, whose loss scale is `scale`. Groups take it up in `of_group`."""
        self.scale = scale
        self._entries = {kind: {name: value.clone() for name, value in state[kind].items()} for kind in KINDS}

    def _value(self, kind: str, name: str) -> Tensor | None:
        entry = self._entries[kind].get(name)
        return entry.now() if isinstance(entry, _LayerSlice) else entry
