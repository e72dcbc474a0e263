"""Layout of a module that FSDP2 has sharded: the elements of each rank and layer, and the codec of each layer.

R ranks that share the parameters, T elements of a module's shard, S of them in one part
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.codec import HOST, RESIDUALS
from cgx_ray.errors import PlanError
from cgx_ray.plan import CODECS_OF_SCHEME, NONE, CodecSpec, Device, Intra, Layer, Option, Plan, Scheme

# Codecs that the layers of one unit may have. Unit i numbers the messages of its gradients from 16 i, and those of its
# parameters from 16 i + 8. A message has two bytes for the number.
MAX_CODECS = 8
MAX_UNITS = (1 << 16) // (2 * MAX_CODECS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedLayer:
    """A parameter that is cut along dimension `dim` into one shard per rank, all padded to `shard_shape`.

    is_trained  True if its gradient is reduced
    """

    layer: Layer
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    dim: int
    is_trained: bool = True

    @property
    def width(self) -> int:
        """Elements of a shard, including the padding."""
        return math.prod(self.shard_shape)

    def whole(self, rows_RS: Tensor) -> Tensor:
        """Return the whole parameter as one flat tensor, in its own order and without the padding."""
        shards = [row.view(self.shard_shape) for row in rows_RS.unbind()]
        return torch.cat(shards, self.dim).narrow(self.dim, 0, self.shape[self.dim]).flatten()

    def cut(self, whole_N: Tensor, rows_RS: Tensor) -> None:
        """Write the shards of `whole_N` to `rows_RS`: the inverse of `whole`. The padding gets zeros."""
        rows_RS.zero_()
        shards = whole_N.view(self.shape).split(self.shard_shape[self.dim], self.dim)
        # The last ranks may have no elements.
        for row, shard in zip(rows_RS, shards, strict=False):
            row.view(self.shard_shape).narrow(self.dim, 0, shard.shape[self.dim]).copy_(shard)

    def padding(self, num_ranks: int) -> list[tuple[int, int]]:
        """Return (rank, first padded element) for each rank whose shard ends in padding.

        FSDP2 pads along the first dimension only.
        """
        num_rows, row_numel = self.shard_shape[0], math.prod(self.shard_shape[1:])
        filled = [min(max(self.shape[0] - rank * num_rows, 0), num_rows) for rank in range(num_ranks)]
        return [(rank, n * row_numel) for rank, n in enumerate(filled) if n < num_rows] if self.dim == 0 else []


class Part:
    """Layers of one module that share a codec, and their residuals."""

    def __init__(
        self,
        index: int,
        spec: CodecSpec,
        layers: Sequence[ShardedLayer],
        offsets: Sequence[int],
        num_ranks: int,
        *,
        feeds_back: bool,
        device: torch.device = HOST,
        own_row: int | None = None,
    ) -> None:
        """
        index       distinguishes the messages of parts
        offsets     first element of each layer in the module's shard
        feeds_back  keep residuals, if the codec needs them
        device      of the rows
        own_row     of the only rank whose residuals are kept; None: those of all ranks, whose shards are all encoded
        """
        self.index = index
        self.codec = make_codec(spec, device=device)
        self.layers = layers
        self.num_ranks = num_ranks
        self.width = sum(layer.width for layer in layers)
        starts = [0, *itertools.accumulate(layer.width for layer in layers)]
        # (start in the module's shard, start in this part, width) of each layer.
        self._columns = [
            (there, here, layer.width) for there, here, layer in zip(offsets, starts, layers, strict=False)
        ]
        self._kept_rows = range(num_ranks) if own_row is None else range(own_row, own_row + 1)
        self.memory = self.codec.new_memory(len(self._kept_rows) * self.width, device) if feeds_back else None

    def room(self, rows_RT: Tensor) -> Tensor:
        """Return memory for `gather`, (R, S) float32: `rows_RT` itself if it has no other columns, else new memory."""
        if self.width == rows_RT.shape[1] and rows_RT.dtype == torch.float32:
            return rows_RT
        return torch.empty(rows_RT.shape[0], self.width, dtype=torch.float32, device=rows_RT.device)

    def gather(self, rows_RT: Tensor, rows_RS: Tensor) -> None:
        """Copy this part's columns of a module's rows to `rows_RS`."""
        if rows_RS.data_ptr() == rows_RT.data_ptr():
            return
        for there, here, width in self._columns:
            rows_RS[:, here : here + width] = rows_RT[:, there : there + width]

    def scatter(self, rows_RS: Tensor, rows_RT: Tensor) -> None:
        """Copy `rows_RS` to this part's columns of a module's rows: the inverse of `gather`."""
        if rows_RS.data_ptr() == rows_RT.data_ptr():
            return
        for there, here, width in self._columns:
            rows_RT[:, there : there + width] = rows_RS[:, here : here + width]

    def row(self, memory_N: Tensor, rank: int) -> Tensor:
        """Return the row of `rank` in one of the memory's buffers."""
        return memory_N.view(len(self._kept_rows), self.width)[self._kept_rows.index(rank)]

    def zero_padding_residual(self) -> None:
        """Set the residuals of the padding to zero, since no rank reads it."""
        if self.memory is None:
            return
        for layer, (_, here, width) in zip(self.layers, self._columns, strict=True):
            for rank, first in layer.padding(self.num_ranks):
                if rank in self._kept_rows:
                    self.row(self.memory.next_N, rank)[here + first : here + width] = 0

    def keep(self, names: Container[str]) -> None:
        """Copy the present residuals of these layers, so that they are unchanged after the next commit."""
        if self.memory is None:
            return
        now, after = self.memory.now[RESIDUALS], self.memory.next_N
        for layer, (_, here, width) in zip(self.layers, self._columns, strict=True):
            if layer.layer.name in names:
                columns = slice(here, here + width)
                after.view(-1, self.width)[:, columns] = now.view(-1, self.width)[:, columns]

    def residuals(self) -> dict[str, Tensor]:
        """Return the residuals by layer, on the host, laid out like whole gradients: they fit any number of ranks."""
        if self.memory is None:
            return {}
        kept = self.memory.now[RESIDUALS].view(-1, self.width).cpu()
        rows_RS = kept
        if len(self._kept_rows) < self.num_ranks:
            rows_RS = kept.new_zeros(self.num_ranks, self.width)
            rows_RS[self._kept_rows.start] = kept[0]
        return {
            layer.layer.name: layer.whole(rows_RS[:, here : here + width])
            for layer, (_, here, width) in zip(self.layers, self._columns, strict=True)
        }

    def set_residuals(self, residuals: Mapping[str, Tensor], summed: Callable[[Part, Tensor], Tensor]) -> None:
        """Set the residuals: the inverse of `residuals()`. Missing layers get zeros.

        summed  returns the sum of this rank's row over the ranks that share the parameters, which have loaded others'
                residuals of it
        """
        if self.memory is None:
            return
        rows_RS = torch.zeros(self.num_ranks, self.width, dtype=torch.float32, device=HOST)
        for layer, (_, here, width) in zip(self.layers, self._columns, strict=True):
            if layer.layer.name in residuals:
                layer.cut(residuals[layer.layer.name].to(HOST), rows_RS[:, here : here + width])
        kept = rows_RS if len(self._kept_rows) == self.num_ranks else summed(self, rows_RS)
        self.memory.now[RESIDUALS].copy_(kept.view(-1))


class Unit:
    """The parameters that FSDP2 reduces and gathers in one call: those of a module, except those of units inside it.

    gradients   parts of a reduce-scatter's rows, which hold the trained layers, by `choose`
    widths      elements of a shard of each trained layer
    parameters  parts of an all-gather's rows, which hold all layers; empty if FSDP2 gathers them itself
    """

    def __init__(
        self,
        index: int,
        name: str,
        layers: Sequence[ShardedLayer],
        num_ranks: int,
        parameter_codec: CodecSpec | None,
        device: torch.device = HOST,
        own_row: int | None = None,
    ) -> None:
        """`device`: where FSDP2 computes, and this rank encodes. `own_row`: as of a `Part`, for gradients."""
        self.device = device
        self.name = name
        self.gradients: list[Part] = []
        self.parameters: list[Part] = []
        self._index, self._num_ranks, self._own_row = 2 * index * MAX_CODECS, num_ranks, own_row
        self._trained = trained = [layer for layer in layers if layer.is_trained]
        self.layers = [layer.layer for layer in trained]
        if parameter_codec is not None:
            # Encoding does not change the shards themselves, so errors do not add up and need no residuals.
            codecs = [NONE if layer.layer.is_small else parameter_codec for layer in layers]
            self.parameters = _split(self._index + MAX_CODECS, layers, codecs, num_ranks, device)
        self.widths = [layer.width for layer in trained]
        self.gradient_width = sum(self.widths)
        self.parameter_width = sum(layer.width for layer in layers)
        self.dense_bytes = sum(layer.layer.dense_bytes for layer in trained)

    def choose(self, codecs: Mapping[str, CodecSpec]) -> None:
        """Encode each trained layer by its codec, by name, from now on.

        Parts that stay as they are keep their residuals. `check_plan` has refused codecs that would lose some.
        """
        chosen = [codecs[layer.name] for layer in self.layers]
        self.gradients = _split(
            self._index, self._trained, chosen, self._num_ranks, self.device, self._own_row, self.gradients
        )


def _split(
    index: int,
    layers: Sequence[ShardedLayer],
    codecs: Sequence[CodecSpec],
    num_ranks: int,
    device: torch.device,
    own_row: int | None = None,
    before: Sequence[Part] | None = None,
) -> list[Part]:
    """Return the parts of a unit, one per codec. `before`: of gradients, which feed back; equal ones stay."""
    offsets = [0, *itertools.accumulate(layer.width for layer in layers)][: len(layers)]
    parts = []
    for place, spec in enumerate(dict.fromkeys(codecs)):
        chosen = [n for n, codec in enumerate(codecs) if codec == spec]
        own_layers, own_offsets = [layers[n] for n in chosen], [offsets[n] for n in chosen]
        part = next((one for one in before or () if one.codec.spec == spec and one.layers == own_layers), None)
        if part is None:
            feeds_back = before is not None
            part = Part(
                index + place,
                spec,
                own_layers,
                own_offsets,
                num_ranks,
                feeds_back=feeds_back,
                device=device,
                own_row=own_row,
            )
        # One of before may have had another place.
        part.index = index + place
        parts.append(part)
    return parts


def check_plan(plan: Plan, units: Sequence[Unit]) -> None:
    """Raise PlanError if a sharded model cannot have `plan`, which covers its layers, after the plan in force."""
    if plan.lease is not None:
        check_plan(plan.lease.fallback, units)
    if plan.period > 1:
        raise PlanError(
            f"an FSDP2 model cannot use period {plan.period}: each rank has only a shard of the parameters; give "
            "period 1, or train a DistributedDataParallel"
        )
    for option in dict.fromkeys(group.option for group in plan.groups):
        _check_option(option)
    codecs = codecs_of(plan)
    for unit in units:
        used = {codecs[layer.name] for layer in unit.layers}
        if len(used) > MAX_CODECS:
            raise PlanError(
                f"module {unit.name!r} has {len(used)} codecs, with that of small layers; give at most {MAX_CODECS}"
            )
        for part in unit.gradients:
            for layer in part.layers:
                _check_change(layer.layer.name, part.codec.spec, codecs[layer.layer.name])


def _check_option(option: Option) -> None:
    if option.intra is not Intra.FLAT:
        raise PlanError(
            f"an FSDP2 model cannot use intra '{option.intra}'; shard within nodes and replicate between them"
        )
    if option.device == Device.CPU:
        raise PlanError("an FSDP2 model cannot use device 'cpu': its gradients are encoded where they are")
    if not option.codec.record.is_reencoded:
        raise PlanError(
            f"an FSDP2 model cannot use codec {option.codec}, which scheme sra does not carry; give one of "
            f"{', '.join(sorted(CODECS_OF_SCHEME[Scheme.SRA]))}"
        )
    if option.scheme not in (Scheme.SRA, Scheme.DENSE):
        raise PlanError(f"an FSDP2 model cannot use scheme {option.scheme}; give 'sra', or leave scheme out")


def _check_change(layer: str, before: CodecSpec, after: CodecSpec) -> None:
    if before != after and (before.record.feeds_back(before) or after.record.feeds_back(after)):
        raise PlanError(
            f"layer {layer!r} of an FSDP2 model cannot go from codec {before} to {after} during a run, as one of them "
            "has error feedback; change between codecs without it, or attach with the other codec"
        )


def codecs_of(plan: Plan) -> dict[str, CodecSpec]:
    """Return the codec of each layer."""
    return {name: group.option.codec for group in plan.groups for name in group.layers}
