"""Plans: for every group of layers which codec, which scheme and which device."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from cgx_ray.errors import CGXError, ConfigError, PlanError

SMALL_LAYER_NUMEL = 1024
FIRST_GROUP_BYTES = 1 << 20
DEFAULT_GROUP_BYTES = 4 << 20


class Scheme(StrEnum):
    """Collective algorithm that moves one group."""

    DENSE = "dense"
    ALLGATHER = "allgather"
    SRA = "sra"
    ARTOPK_RING = "artopk_ring"


# Which parameters each codec takes, and what they are when left out.
CODEC_DEFAULTS: dict[str, dict[str, int | float]] = {
    "none": {},
    "bf16": {},
    "qsgd": {"bits": 4, "bucket_size": 128},
    "topk": {"density": 0.01},
}

# A dense all-reduce sums raw numbers, sra re-encodes a sum, AR-Topk shares one worker's indices:
# each works for these codecs and no others.
CODECS_OF_SCHEME: dict[Scheme, frozenset[str]] = {
    Scheme.DENSE: frozenset({"none"}),
    Scheme.ALLGATHER: frozenset({"none", "bf16", "qsgd", "topk"}),
    Scheme.SRA: frozenset({"none", "bf16", "qsgd"}),
    Scheme.ARTOPK_RING: frozenset({"topk"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """A codec with its parameters. Those a codec does not take are None."""

    name: str
    bits: int | None = None
    bucket_size: int | None = None
    density: float | None = None

    def __post_init__(self) -> None:
        if self.name not in CODEC_DEFAULTS:
            raise ConfigError(f"unknown codec {self.name!r}; known: {', '.join(CODEC_DEFAULTS)}")
        defaults = CODEC_DEFAULTS[self.name]
        for key in ("bits", "bucket_size", "density"):
            given = getattr(self, key)
            if given is None and key in defaults:
                object.__setattr__(self, key, defaults[key])
            if given is not None and key not in defaults:
                takes = ", ".join(defaults) or "no parameters"
                raise ConfigError(f"codec {self.name} has no {key}; it takes {takes}")
        _check_int("bits", self.bits, low=1, high=8, multiple=1)
        _check_int("bucket_size", self.bucket_size, low=8, high=1 << 16, multiple=8)
        density = self.density
        if density is not None and not (isinstance(density, int | float) and 0 < density <= 1):
            raise ConfigError(f"density {density!r} is not in (0, 1]; 0.01 keeps the top 1 %")

    @classmethod
    def parse(cls, text: str) -> CodecSpec:
        """Read `"qsgd"`, `"qsgd:bits=4,bucket_size=128"` or `"topk:density=0.01"`."""
        name, _, rest = text.partition(":")
        parameters: dict[str, Any] = {}
        for item in filter(None, rest.split(",")):
            key, _, value = item.partition("=")
            if key.strip() not in ("bits", "bucket_size", "density"):
                raise ConfigError(f"codec {text!r}: unknown parameter {key!r}; known: bits, bucket_size, density")
            try:
                parameters[key.strip()] = float(value) if key.strip() == "density" else int(value)
            except ValueError:
                raise ConfigError(f"codec {text!r}: {key} needs a number, got {value!r}") from None
        return cls(name=name.strip(), **parameters)

    def num_kept(self, numel: int) -> int:
        """Elements that `topk` sends of `numel`: at least one of a non-empty group."""
        assert self.density is not None
        return min(numel, math.ceil(self.density * numel))

    def payload_bytes(self, numel: int, item_bytes: int = 4) -> int:
        """Wire bytes of `numel` encoded elements, header left out. `item_bytes` counts for codec none only."""
        if self.name == "qsgd":
            assert self.bits is not None
            assert self.bucket_size is not None
            return 4 * math.ceil(numel / self.bucket_size) + math.ceil(numel * self.bits / 8)
        if self.name == "topk":
            return 8 * self.num_kept(numel)
        return numel * (2 if self.name == "bf16" else item_bytes)

    def __str__(self) -> str:
        keys = CODEC_DEFAULTS[self.name]
        return self.name + (":" if keys else "") + ",".join(f"{k}={getattr(self, k)}" for k in keys)


def _check_int(name: str, value: int | None, *, low: int, high: int, multiple: int) -> None:
    if value is None:
        return
    if not isinstance(value, int) or not low <= value <= high or value % multiple:
        step = f", a multiple of {multiple}" if multiple > 1 else ""
        raise ConfigError(f"{name} {value!r} is not allowed; give a whole number from {low} to {high}{step}")


NONE = CodecSpec(name="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One named parameter as the planner sees it."""

    name: str
    numel: int
    ndim: int
    dtype: str = "float32"

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
    """Layers that are encoded and sent together, and how."""

    layers: tuple[str, ...]
    codec: CodecSpec = NONE
    scheme: Scheme = Scheme.DENSE
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("a group needs at least one layer")
        if self.device != "cpu":
            raise PlanError(f"device {self.device!r} is not allowed; this version encodes on 'cpu'")
        check_pair(self.codec, self.scheme)


def check_pair(codec: CodecSpec, scheme: Scheme) -> None:
    """Raise ConfigError if `scheme` cannot carry `codec`."""
    allowed = CODECS_OF_SCHEME[scheme]
    if codec.name not in allowed:
        fitting = [str(s) for s, names in CODECS_OF_SCHEME.items() if codec.name in names]
        raise ConfigError(
            f"scheme {scheme} cannot carry codec {codec.name}; it carries {', '.join(sorted(allowed))}; "
            f"{codec.name} goes with {', '.join(fitting)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Frozen, numbered answer to how gradients cross the network. Later plans have higher versions."""

    version: int
    world_size: int
    groups: tuple[GroupPlan, ...]

    def __post_init__(self) -> None:
        if self.version < 0 or self.world_size < 1:
            raise PlanError(f"version {self.version} and world_size {self.world_size}: need >= 0 and >= 1")
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

    def describe(self) -> str:
        """`"qsgd:bits=4,bucket_size=128 over sra"`: what most of the layers use."""
        kinds = [(group.codec, group.scheme) for group in self.groups if group.codec.name != "none"]
        if not kinds:
            return "dense"
        codec, scheme = max(set(kinds), key=kinds.count)
        return f"{codec} over {scheme}"

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
    codec: CodecSpec = NONE,
    scheme: Scheme = Scheme.DENSE,
    group_bytes: int = DEFAULT_GROUP_BYTES,
) -> Plan:
    """One codec and scheme for the whole model; small layers go dense in extra groups at the end.

    With nothing to compress there are no extra groups: then a group's gradients lie side by side in DDP's buckets and
    are summed where they are.

    layers  in registration order; groups are filled in reverse, which is close to the order in which backward
            finishes them. The first group is small so that sending starts early, as in DDP.
    """
    check_pair(codec, scheme)
    is_dense = scheme is Scheme.DENSE
    small = [layer for layer in layers if layer.is_small and not is_dense]
    large = [layer for layer in layers if is_dense or not layer.is_small]
    groups = [GroupPlan(layers=names, codec=codec, scheme=scheme) for names in _fill_groups(large, group_bytes)]
    groups += [GroupPlan(layers=names) for names in _fill_groups(small, group_bytes)]
    return Plan(version=version, world_size=world_size, groups=tuple(groups))


def _fill_groups(layers: Sequence[Layer], group_bytes: int) -> list[tuple[str, ...]]:
    groups: list[tuple[str, ...]] = []
    for _, run in itertools.groupby(
        sorted(reversed(layers), key=lambda layer: layer.dtype), key=lambda layer: layer.dtype
    ):
        names: list[str] = []
        filled, cap = 0, min(FIRST_GROUP_BYTES, group_bytes)
        for layer in run:
            names.append(layer.name)
            filled += layer.dense_bytes
            if filled >= cap:
                groups.append(tuple(names))
                names, filled, cap = [], 0, group_bytes
        if names:
            groups.append(tuple(names))
    return groups
