"""Plans: for every group of layers which codec, which scheme, flat or hierarchical, and which device."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from cgx_ray.codec_spec import CODEC_DEFAULTS, CodecSpec
from cgx_ray.errors import CGXError, ConfigError, PlanError

__all__ = [
    "CODECS_OF_SCHEME", "CODEC_DEFAULTS", "COMPRESSED_INSIDE", "DEFAULT_GROUP_BYTES", "MAX_INDEXED_NUMEL",
    "MAX_PAYLOAD_BYTES", "NONE", "PIECE_BYTES", "CodecSpec", "GroupPlan", "Intra", "Layer", "Plan", "Scheme",
    "check_intra", "check_pair", "make_plan", "preferred_scheme",
]  # fmt: skip

DEVICES = ("auto", "cpu")
SMALL_LAYER_NUMEL = 1024
FIRST_GROUP_BYTES = 1 << 20
DEFAULT_GROUP_BYTES = 4 << 20
# Encoded. Schemes cut longer chunks, so that coding and sending overlap; LOG.md has what other sizes do.
PIECE_BYTES = 1 << 20
# What fields in the header of a message hold.
MAX_GROUPS = 1 << 16
MAX_PAYLOAD_BYTES = 2**32 - 1
# Indices are int32.
MAX_INDEXED_NUMEL = 2**31 - 1


class Scheme(StrEnum):
    """Collective algorithm that moves one group."""

    DENSE = "dense"
    ALLREDUCE = "allreduce"
    ALLGATHER = "allgather"
    SRA = "sra"
    RING = "ring"
    TREE = "tree"
    BROADCAST = "broadcast"
    ARTOPK_RING = "artopk_ring"
    ARTOPK_RING_VAR = "artopk_ring_var"
    ARTOPK_RING_AUTO = "artopk_ring_auto"
    ARTOPK_TREE = "artopk_tree"
    ARTOPK_TREE_VAR = "artopk_tree_var"
    ARTOPK_TREE_AUTO = "artopk_tree_auto"

    @property
    def is_artopk(self) -> bool:
        """Shares one rank's indices and sums everyone's values at them."""
        return self.startswith("artopk_")

    @property
    def by_tree(self) -> bool:
        """Of AR-Topk: values are summed over a tree, not by the vendor's ring."""
        return self.startswith("artopk_tree")

    @property
    def choice(self) -> str:
        """Of AR-Topk: how the rank whose indices count is chosen, "star", "var" or "auto"."""
        return self.removeprefix("artopk_").partition("_")[2] or "star"


class Intra(StrEnum):
    """What happens inside a node: nothing of its own, or ranks sum there first and the scheme runs between nodes."""

    FLAT = "flat"
    DENSE = "dense"
    COMPRESSED = "compressed"


_REENCODED = frozenset({"none", "fp16", "bf16", "prefix", "qsgd", "terngrad", "ef_signsgd", "onebit"})
_SELECTED = frozenset({"topk", "lwtopk", "mstopk", "dgc", "sidco"})
# What a node may sum in its encoding: prefix would keep other elements there than between nodes.
COMPRESSED_INSIDE = _REENCODED - {"none", "prefix"}
# An all-reduce sums messages as they are, sra, ring, tree and broadcast encode sums again, AR-Topk shares one worker's
# indices: each works for these codecs and no others.
CODECS_OF_SCHEME: dict[Scheme, frozenset[str]] = {
    Scheme.DENSE: frozenset({"none"}),
    Scheme.ALLREDUCE: frozenset({"fp16", "bf16", "prefix", "randomk", "powersgd"}),
    Scheme.ALLGATHER: frozenset(CODEC_DEFAULTS),
    **dict.fromkeys((Scheme.SRA, Scheme.RING, Scheme.TREE, Scheme.BROADCAST), _REENCODED),
    **{scheme: _SELECTED for scheme in Scheme if scheme.is_artopk},
}


NONE = CodecSpec(name="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One named parameter as the planner sees it. `num_rows`: of the matrix it is, if it is one."""

    name: str
    numel: int
    ndim: int
    dtype: str = "float32"
    num_rows: int | None = None

    def __post_init__(self) -> None:
        if self.num_rows is not None and (self.num_rows < 1 or self.numel % self.num_rows):
            raise PlanError(f"layer {self.name!r} of {self.numel} elements cannot have {self.num_rows} rows")

    @property
    def dense_bytes(self) -> int:
        return self.numel * _ITEM_BYTES[self.dtype]

    @property
    def is_small(self) -> bool:
        """Too small to be worth compressing: biases, norms, anything under 1,024 elements."""
        return self.ndim <= 1 or self.numel < SMALL_LAYER_NUMEL


_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Layers that are encoded and sent together, and how.

    device  where codecs work: "auto", where the gradients are, or "cpu", on the host, whose processors then encode what
            a CUDA device has computed
    """

    layers: tuple[str, ...]
    codec: CodecSpec = NONE
    scheme: Scheme = Scheme.DENSE
    intra: Intra = Intra.FLAT
    device: str = "auto"

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("a group needs at least one layer")
        if self.device not in DEVICES:
            raise PlanError(f"device {self.device!r} is not allowed; known: {', '.join(DEVICES)}")
        check_pair(self.codec, self.scheme)
        check_intra(self.codec, self.intra)


def check_pair(codec: CodecSpec, scheme: Scheme) -> None:
    """Raise ConfigError if `scheme` cannot carry `codec`."""
    allowed = CODECS_OF_SCHEME[scheme]
    if codec.name not in allowed:
        fitting = [str(s) for s, names in CODECS_OF_SCHEME.items() if codec.name in names]
        raise ConfigError(
            f"scheme {scheme} cannot carry codec {codec.name}; it carries {', '.join(sorted(allowed))}; "
            f"{codec.name} goes with {', '.join(fitting)}"
        )
    if scheme.is_artopk and codec.value_bits != 32:
        raise ConfigError(f"scheme {scheme} sums values as they are, not with value_bits {codec.value_bits}; give 32")


def check_intra(codec: CodecSpec, intra: Intra) -> None:
    """Raise ConfigError if ranks of a node cannot sum as `intra` says."""
    if intra is Intra.COMPRESSED and codec.name not in COMPRESSED_INSIDE:
        raise ConfigError(
            f"codec {codec.name} cannot be summed inside a node; give intra='dense', or with 'compressed' one of "
            f"{', '.join(sorted(COMPRESSED_INSIDE))}"
        )


def preferred_scheme(codec: CodecSpec) -> Scheme:
    """What carries `codec` where nobody says otherwise: dense for none, sra where it can, else the first that can."""
    preferred = Scheme.DENSE if codec == NONE else Scheme.SRA
    candidates: tuple[Scheme, ...] = (preferred, *Scheme)
    return next(scheme for scheme in candidates if codec.name in CODECS_OF_SCHEME[scheme])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Frozen, numbered answer to how gradients cross the network. Later plans have higher versions."""

    version: int
    world_size: int
    groups: tuple[GroupPlan, ...]

    def __post_init__(self) -> None:
        if self.version < 0 or self.world_size < 1:
            raise PlanError(f"version {self.version} and world_size {self.world_size}: need >= 0 and >= 1")
        if len(self.groups) > MAX_GROUPS:
            raise PlanError(
                f"plan {self.version} has {len(self.groups)} groups; messages can tell {MAX_GROUPS} apart, so give "
                "larger groups (group_bytes)"
            )
        names = [name for group in self.groups for name in group.layers]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise PlanError(f"plan {self.version} has {twice[0]!r} in two groups; every layer belongs to one")

    def check(self, layers: Sequence[Layer], world_size: int) -> None:
        """Raise PlanError unless this plan covers exactly `layers`, each group of one dtype, for `world_size`."""
        if self.world_size != world_size:
            raise PlanError(
                f"plan {self.version} is for world size {self.world_size}, this run has {world_size}; make a new plan"
            )
        dtypes = {layer.name: layer.dtype for layer in layers}
        numels = {layer.name: layer.numel for layer in layers}
        planned = {name for group in self.groups for name in group.layers}
        if planned != dtypes.keys():
            odd = sorted(planned ^ dtypes.keys())
            raise PlanError(
                f"plan {self.version} covers {len(planned)} layers, the model has {len(dtypes)}; "
                f"they differ in {', '.join(odd[:3])}{' ...' if len(odd) > 3 else ''}; make a plan for this model"
            )
        for index, group in enumerate(self.groups):
            kinds = sorted({dtypes[name] for name in group.layers})
            if len(kinds) > 1:
                raise PlanError(f"plan {self.version}, group {index} mixes {', '.join(kinds)}; one dtype a group")
            numel = sum(numels[name] for name in group.layers)
            if group.codec.density is not None and numel > MAX_INDEXED_NUMEL:
                raise PlanError(
                    f"plan {self.version}, group {index} has {numel} elements; {group.codec.name} counts with 32 bits, "
                    f"so give it groups of at most {MAX_INDEXED_NUMEL}"
                )

    def describe(self) -> str:
        """`"qsgd:bits=4,bucket_size=128 over sra, dense inside nodes"`: what most of the groups that compress use.

        If others compress in other ways, it says how many ways: `"... over sra and 1 other"`.
        """
        every = [(group.codec, group.scheme, group.intra) for group in self.groups]
        compressed = [kind for kind in every if kind[0] != NONE]
        kinds = compressed or [kind for kind in every if kind[1] is not Scheme.DENSE] or every
        codec, scheme, intra = max(dict.fromkeys(kinds), key=kinds.count, default=(NONE, Scheme.DENSE, Intra.FLAT))
        text = "dense" if scheme is Scheme.DENSE else f"{codec} over {scheme}"
        text = text if intra is Intra.FLAT else f"{text}, {intra} inside nodes"
        others = len(set(compressed)) - 1
        return f"{text} and {others} other{'s' if others > 1 else ''}" if others > 0 else text

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote. Raises PlanError or ConfigError on anything else."""
        try:
            raw = json.loads(text)
            groups = tuple(
                GroupPlan(
                    layers=tuple(group["layers"]),
                    codec=CodecSpec(**group["codec"]),
                    scheme=Scheme(group["scheme"]),
                    intra=Intra(group.get("intra", Intra.FLAT)),
                    device=group["device"],
                )
                for group in raw["groups"]
            )
            return cls(version=raw["version"], world_size=raw["world_size"], groups=groups)
        except CGXError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"not a plan: {error}; write plans with Plan.to_json") from error


def make_plan(
    layers: Sequence[Layer],
    *,
    version: int,
    world_size: int,
    codec: CodecSpec | str = NONE,
    scheme: Scheme | str | None = None,
    intra: Intra | str = Intra.FLAT,
    group_bytes: int = DEFAULT_GROUP_BYTES,
    overrides: Mapping[str, tuple[CodecSpec | str, Scheme | str] | tuple[CodecSpec | str, Scheme | str, Intra | str]]
    | None = None,
    bits: Mapping[str, int] | None = None,
    uniform: bool = False,
    device: str = "auto",
) -> Plan:
    """One codec and scheme for the whole model but `overrides`; small layers go dense in extra groups at the end.

    With nothing to compress there are no extra groups: then a group's gradients lie side by side in DDP's buckets and
    are summed where they are.

    layers     in registration order; groups are filled in reverse, which is close to the order in which backward
               finishes them. The first group is small so that sending starts early, as in DDP.
    codec      or text for `CodecSpec.parse`
    scheme     left out, `preferred_scheme`
    intra      "dense" or "compressed": ranks of a node sum there first, see `collectives.hierarchical`. Small layers
               are not compressed inside nodes either
    overrides  codec, scheme and, if it is another, intra of the layers, small ones too, whose names match a pattern as
               in a shell (`"*embedding*"`), the first pattern that does. Only neighbours share a group, so each run of
               such layers ends the group before it.
    bits       by layer, instead of those of `codec`, such as `planner.bits` finds; where they change a group ends.
               Small layers and overrides take no notice
    uniform    for comparison: one group a dtype, small layers and all, whatever `group_bytes` says. QNCL compresses
               like that, one buffer of the whole model without a look at its layers (CGX, section 6); nothing is sent
               before backward is done, and norms and biases share buckets with their neighbours
    device     "auto" or "cpu", see `GroupPlan`

    Raises ConfigError if a scheme cannot carry a codec, PlanError for a pattern or bits without a layer.
    """
    codec = codec if isinstance(codec, CodecSpec) else CodecSpec.parse(codec)
    codec, scheme, intra = _choice((codec, scheme or preferred_scheme(codec), intra))
    if uniform:
        if overrides or bits:
            raise ConfigError("a uniform plan has one codec for all layers; leave out overrides and bits, or uniform")
        whole = sys.maxsize
        groups = _fill_groups([(layer, (codec, scheme, intra)) for layer in reversed(layers)], whole, first_bytes=whole)
        return _plan_of(groups, version, world_size, device)
    chosen_by_pattern = {pattern: _choice(choice, intra) for pattern, choice in (overrides or {}).items()}
    small_choice = (NONE, Scheme.DENSE, Intra.FLAT if intra is Intra.FLAT else Intra.DENSE)
    for pattern in chosen_by_pattern:
        if not any(fnmatchcase(layer.name, pattern) for layer in layers):
            raise PlanError(f"override {pattern!r} matches none of {len(layers)} layers; give a pattern of their names")

    unknown = sorted((bits or {}).keys() - {layer.name for layer in layers})
    if unknown:
        raise PlanError(f"bits are given for {unknown[0]!r}, which is none of {len(layers)} layers; give their names")

    def choose(layer: Layer) -> _Choice | None:
        """None: dense, at the end."""
        for pattern, choice in chosen_by_pattern.items():
            if fnmatchcase(layer.name, pattern):
                return choice
        if layer.is_small and scheme is not Scheme.DENSE:
            return None
        own = codec if not bits or layer.name not in bits else replace(codec, bits=bits[layer.name])
        return own, scheme, intra

    chosen = [(layer, choose(layer)) for layer in reversed(layers)]
    small = [(layer, small_choice) for layer, choice in chosen if choice is None]
    large = [(layer, choice) for layer, choice in chosen if choice is not None]
    groups = _fill_groups(large, group_bytes) + _fill_groups(small, group_bytes)
    return _plan_of(groups, version, world_size, device)


def _plan_of(groups: Sequence[GroupPlan], version: int, world_size: int, device: str) -> Plan:
    on_device = tuple(replace(group, device=device) for group in groups)
    return Plan(version=version, world_size=world_size, groups=on_device)


_Choice = tuple[CodecSpec, Scheme, Intra]


def _choice(choice: tuple[Any, ...], intra: Intra = Intra.FLAT) -> _Choice:
    """A codec, a scheme that can carry it and `intra`, unless `choice` says another; from objects or text."""
    if not isinstance(choice, tuple) or len(choice) not in (2, 3):
        raise ConfigError(
            f"{choice!r} is not a codec and a scheme; give a pair such as ('topk:density=0.01', 'allgather')"
        )
    codec, scheme, given = (*choice, intra)[:3]
    if scheme not in tuple(Scheme):
        raise ConfigError(f"unknown scheme {scheme!r}; known: {', '.join(Scheme)}")
    if given not in tuple(Intra):
        raise ConfigError(f"unknown intra {given!r}; known: {', '.join(Intra)}")
    codec = codec if isinstance(codec, CodecSpec) else CodecSpec.parse(codec)
    check_pair(codec, Scheme(scheme))
    check_intra(codec, Intra(given))
    return codec, Scheme(scheme), Intra(given)


def _fill_groups(
    chosen: Sequence[tuple[Layer, _Choice]], group_bytes: int, first_bytes: int = FIRST_GROUP_BYTES
) -> list[GroupPlan]:
    """Cut runs of one dtype and one choice, in the order of `chosen` within a dtype, into groups."""
    groups: list[GroupPlan] = []
    by_dtype = sorted(chosen, key=lambda pair: pair[0].dtype)
    for _, same_dtype in itertools.groupby(by_dtype, key=lambda pair: pair[0].dtype):
        cap = min(first_bytes, group_bytes)
        for (codec, scheme, intra), run in itertools.groupby(same_dtype, key=lambda pair: pair[1]):
            names: list[str] = []
            filled = 0
            for layer, _ in run:
                names.append(layer.name)
                filled += layer.dense_bytes
                if filled >= cap:
                    groups.append(GroupPlan(layers=tuple(names), codec=codec, scheme=scheme, intra=intra))
                    names, filled, cap = [], 0, group_bytes
            if names:
                groups.append(GroupPlan(layers=tuple(names), codec=codec, scheme=scheme, intra=intra))
                cap = group_bytes
    return groups
