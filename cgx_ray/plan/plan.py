"""Plans: which layers share a group, and the option of each group."""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

from cgx_ray.errors import CGXError, ConfigError, PlanError, names_arguments
from cgx_ray.plan.codec_spec import CodecSpec
from cgx_ray.plan.option import DENSE, NONE, Device, Given, Intra, Option, Scheme, as_option, preferred_scheme

# Elements: compressing a smaller layer saves less than 4 KB.
SMALL_LAYER_NUMEL = 1024
FIRST_GROUP_BYTES = 1 << 20
# As DDP's buckets. ResNet50 on 4 ranks with 2 cores took 395 ms per step over qsgd in groups of 4 MiB, 342 ms in these.
DEFAULT_GROUP_BYTES = 25 << 20
# Compressed groups of a smaller gradient than so many of that size: while one is encoded or summed, others travel.
NUM_GROUPS = 4
# They have at least so many bytes, or their messages cost more than that saves.
LEAST_GROUP_BYTES = 1 << 18
# Encoded bytes. Schemes cut longer chunks, so that coding and sending overlap; docs/log/2026-11-22.md has other sizes.
PIECE_BYTES = 1 << 20
# The same where a device encodes: 3 ms at 10 Gbit/s. A piece costs the host 2 ms there, and the device microseconds.
DEVICE_PIECE_BYTES = 4 << 20
# Limits of the fields of a message's header.
MAX_GROUPS = 1 << 16
MAX_PAYLOAD_BYTES = 2**32 - 1
# Steps. No published training goes longer without an exchange than 1,000 (`docs/period.md`).
MAX_PERIOD = 1024
# Share of the elements from which an option counts among those that describe a plan.
LEAST_SHARE = 0.01
# Steps at the start of a training in which ranks average gradients, whatever the period: they change fast, and ranks
# that drift apart then never make it up (docs/period.md).
STEPS_TOGETHER = 40
# Indices are int32.
MAX_INDEXED_NUMEL = 2**31 - 1

T = TypeVar("T")


@names_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One named parameter as the planner sees it. `num_rows`: number of rows if the parameter is a matrix."""

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
        """True if compressing is not worth it: a bias, a norm, or fewer than 1,024 elements."""
        return self.ndim <= 1 or self.numel < SMALL_LAYER_NUMEL


_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}


@names_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Layers that are encoded and sent together, and how.

    is_fixed  a layer rule has chosen the option (`overrides` of `make_plan`), so later plans keep the group
    numel     elements of the layers, by which `Plan.describe` weighs options; 0 if unknown
    """

    layers: tuple[str, ...]
    option: Option = DENSE
    is_fixed: bool = False
    numel: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("a group needs at least one layer")


@names_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """End of a plan on trial: after step `last_step` all ranks return to `fallback` by themselves.

    So a trial ends even if the controller that began it has died.
    """

    last_step: int
    fallback: Plan


@names_arguments
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """All groups of one model and their options. A later plan has a higher version.

    lease   of a plan on trial. The next plan needs a higher version than the fallback
    period  steps between two exchanges. With 1, ranks average the gradients of every step; with more, each trains alone
            for so many steps, and then they average what these have changed (`engine.period`)
    """

    version: int
    world_size: int
    groups: tuple[GroupPlan, ...]
    lease: Lease | None = None
    period: int = 1

    def __post_init__(self) -> None:
        if self.lease is not None:
            fallback = self.lease.fallback
            if fallback.version <= self.version or fallback.lease is not None or fallback.world_size != self.world_size:
                raise PlanError(
                    f"plan {self.version} for world size {self.world_size} has a lease with fallback "
                    f"{fallback.version} for world size {fallback.world_size}; give a later version, the same world "
                    "size, and no lease"
                )
        if self.version < 0 or self.world_size < 1:
            raise PlanError(f"version {self.version} and world_size {self.world_size}: need >= 0 and >= 1")
        check_period(self.period)
        if len(self.groups) > MAX_GROUPS:
            raise PlanError(
                f"plan {self.version} has {len(self.groups)} groups; at most {MAX_GROUPS} are allowed, so give "
                "larger groups (group_bytes)"
            )
        names = [name for group in self.groups for name in group.layers]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise PlanError(f"plan {self.version} has {twice[0]!r} in two groups; every layer belongs to one")

    @property
    def last_version(self) -> int:
        """Version of the fallback if there is a lease, else of this plan."""
        return self.lease.fallback.version if self.lease is not None else self.version

    def check(self, layers: Sequence[Layer], world_size: int) -> None:
        """Raise PlanError unless this plan is for `world_size`, covers exactly `layers` and no group mixes dtypes.

        The fallback of a lease is checked too.
        """
        if self.lease is not None:
            self.lease.fallback.check(layers, world_size)
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
                raise PlanError(f"plan {self.version}, group {index} mixes {', '.join(kinds)}; one dtype per group")
            numel = sum(numels[name] for name in group.layers)
            codec = group.option.codec
            if codec.density is not None and numel > MAX_INDEXED_NUMEL:
                raise PlanError(
                    f"plan {self.version}, group {index} has {numel} elements; {codec.name} counts with 32 bits, "
                    f"so give it groups of at most {MAX_INDEXED_NUMEL}"
                )

    @property
    def has_inside(self) -> bool:
        """True if ranks of a node sum among themselves first. In rounds they do it in each step (`engine.period`)."""
        return any(group.option.intra is not Intra.FLAT for group in self.groups)

    def on_one_node(self) -> Plan:
        """Return what the plan comes to if all ranks share a node: sums inside it are all, and use no codec."""
        inside = replace(DENSE, intra=Intra.DENSE)
        groups = (
            replace(group, option=inside) if group.option.intra is Intra.DENSE else group for group in self.groups
        )
        return replace(self, groups=tuple(groups))

    def describe(self) -> str:
        """Return the option of most elements, else of most compressed groups, such as `"qsgd 4-bit over sra"`.

        The number of others with LEAST_SHARE or more follows: `"... over sra and 1 other"`. A period of more than 1
        comes last: `"..., every 8 steps"`. Fixed groups count only if all are: they are the user's rules.
        """
        free = [group for group in self.groups if not group.is_fixed] or list(self.groups)
        weights = Counter[Option]()
        for group in free:
            weights[group.option] += group.numel
        if not all(group.numel for group in free):
            compressed = [group.option for group in free if group.option.codec != NONE]
            sent = compressed or [group.option for group in free if group.option.scheme is not Scheme.DENSE]
            weights = Counter(sent or [group.option for group in free])
        text = max(weights, key=weights.__getitem__, default=DENSE).describe()
        others = sum(weight >= LEAST_SHARE * weights.total() for weight in weights.values()) - 1
        if others > 0:
            text += f" and {others} other{'s' if others > 1 else ''}"
        return text if self.period == 1 else f"{text}, every {self.period} steps"

    def __repr__(self) -> str:
        num_layers = sum(len(group.layers) for group in self.groups)
        return (
            f"<Plan {self.version}: {self.describe()}; {num_layers} layers in {len(self.groups)} groups, "
            f"{self.world_size} ranks>"
        )

    def to_json(self) -> str:
        return json.dumps(self._fields())

    def _fields(self) -> dict[str, Any]:
        groups = [
            {
                "layers": group.layers,
                "codec": {"name": group.option.codec.name, **group.option.codec.parameters},
                "scheme": group.option.scheme,
                "intra": group.option.intra,
                "device": group.option.device,
                "is_fixed": group.is_fixed,
                "numel": group.numel,
            }
            for group in self.groups
        ]
        fields: dict[str, Any] = {"version": self.version, "world_size": self.world_size, "groups": groups}
        if self.period > 1:
            fields["period"] = self.period
        if self.lease is not None:
            fields["lease"] = {"last_step": self.lease.last_step, "fallback": self.lease.fallback._fields()}
        return fields

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read the output of `to_json`. Raises PlanError or ConfigError on anything else."""
        try:
            return cls._from_fields(json.loads(text))
        except CGXError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"not a plan: {error}; write plans with Plan.to_json") from error

    @classmethod
    def _from_fields(cls, raw: Mapping[str, Any]) -> Plan:
        groups = tuple(
            GroupPlan(
                layers=tuple(group["layers"]),
                option=Option(
                    codec=CodecSpec(**group["codec"]),
                    scheme=Scheme(group["scheme"]),
                    intra=Intra(group.get("intra", Intra.FLAT)),
                ).on(group.get("device", Device.AUTO)),
                is_fixed=group.get("is_fixed", False),
                numel=group.get("numel", 0),
            )
            for group in raw["groups"]
        )
        lease = raw.get("lease")
        return cls(
            version=raw["version"],
            world_size=raw["world_size"],
            groups=groups,
            period=raw.get("period", 1),
            lease=Lease(last_step=lease["last_step"], fallback=cls._from_fields(lease["fallback"])) if lease else None,
        )


def as_plan(given: object) -> Plan:
    """Return `given` if it is a plan; else raise PlanError."""
    if not isinstance(given, Plan):
        raise PlanError(f"plan {given!r} is no Plan; give one that make_plan or Plan.from_json has made")
    return given


def check_period(period: object) -> None:
    """Raise ConfigError unless `period` is a number of steps that ranks may train alone."""
    if not isinstance(period, int) or isinstance(period, bool) or not 1 <= period <= MAX_PERIOD:
        raise ConfigError(f"period {period!r} is not allowed; give whole steps, from 1 to {MAX_PERIOD}")


@names_arguments
def make_plan(
    layers: Sequence[Layer],
    *,
    version: int,
    world_size: int,
    codec: CodecSpec | str = NONE,
    scheme: Scheme | str | None = None,
    intra: Intra | str = Intra.FLAT,
    group_bytes: int | None = None,
    first_bytes: int = FIRST_GROUP_BYTES,
    overrides: Mapping[str, Given] | None = None,
    bits: Mapping[str, int] | None = None,
    uniform: bool = False,
    device: Device | str = Device.AUTO,
    period: int = 1,
) -> Plan:
    """Make a plan with one codec and scheme for all layers except small ones, which go uncompressed.

    With codecs none, fp16 and bf16, small layers stay in their place: then the gradients of a group lie side by side in
    DDP's buckets and are averaged there. With the others, small layers go in groups of their own, over sra, before the
    last large group.

    layers     in registration order. Groups of `group_bytes` (default: `usual_group_bytes`) are filled in reverse,
               close to the order in which backward finishes layers. The first has only `first_bytes` so that sending
               starts early, as in DDP.
    codec      a CodecSpec, or text for `CodecSpec.parse`
    scheme     default: `preferred_scheme`
    intra      "dense" or "compressed": ranks of a node sum first (`collectives.hierarchical`), small layers densely
    overrides  layer rules, which all plans of a policy keep: codecs, options, or tuples of codec, scheme and optionally
               intra, by pattern of layer names as in a shell (`"*embedding*"`). The first pattern that matches counts,
               for small layers too. Only neighbours share a group, so each run of such layers ends the group before it.
               Small layers that shall be dense go with the other small layers.
    bits       by layer name, replacing those of `codec`; `planner.bits` finds them. A change of bits ends a group
    uniform    for comparison: one group per dtype, also of small layers, as QNCL compresses a model (CGX, section 6).
               Nothing is sent before backward ends, and norms and biases share quantization buckets with others
    period     see `Plan`; `device`: see `Option`

    Raises ConfigError if a scheme cannot carry a codec, PlanError if a pattern or `bits` names no layer.
    """
    codec = codec if isinstance(codec, CodecSpec) else CodecSpec.parse(codec)
    usual = as_option((codec, scheme or preferred_scheme(codec), intra))
    group_bytes = group_bytes or usual_group_bytes(layers, usual.scheme)
    if uniform:
        if overrides or bits:
            raise ConfigError("a uniform plan has one codec for all layers; leave out overrides and bits, or uniform")
        groups = _fill_groups([(layer, _Choice(usual)) for layer in reversed(layers)], sys.maxsize, sys.maxsize)
    else:
        by_pattern = {pattern: as_option(given, intra) for pattern, given in (overrides or {}).items()}
        _check_names(layers, by_pattern, bits or {})
        chosen = [(layer, _choose(layer, usual, by_pattern, bits or {})) for layer in reversed(layers)]
        for_small = _for_small(usual)
        small = [(layer, choice._replace(option=for_small)) for layer, choice in chosen if choice.goes_with_small]
        # Rules last, so that they do not cut the others into several groups: all are ready when backward ends.
        small.sort(key=lambda pair: pair[1].is_fixed)
        large = [(layer, choice) for layer, choice in chosen if not choice.goes_with_small]
        groups = _fill_groups(large, group_bytes, first_bytes)
        # The last groups of both are ready when backward ends. The short messages must not queue behind the long ones.
        groups[-1:-1] = _fill_groups(small, group_bytes, first_bytes)
    groups = groups if device == Device.AUTO else [replace(one, option=one.option.on(device)) for one in groups]
    return Plan(version=version, world_size=world_size, groups=tuple(groups), period=period)


def usual_group_bytes(layers: Sequence[Layer], scheme: Scheme) -> int:
    """Return the dense bytes of a group: DEFAULT_GROUP_BYTES, or less so that compressed gradients have NUM_GROUPS."""
    if scheme is Scheme.DENSE:
        return DEFAULT_GROUP_BYTES
    num_bytes = sum(layer.dense_bytes for layer in layers)
    return min(DEFAULT_GROUP_BYTES, max(LEAST_GROUP_BYTES, num_bytes // NUM_GROUPS))


class _Choice(NamedTuple):
    """Option of a layer, and whether a rule has chosen it. `goes_with_small`: it is sent with the small layers."""

    option: Option
    is_fixed: bool = False
    goes_with_small: bool = False


def _for_small(usual: Option) -> Option:
    """Return the option of small layers beside `usual`: two hops.

    The vendor's ring takes 2(N-1), which for short messages is nearly all of their time.
    """
    return Option(codec=NONE, scheme=Scheme.SRA, intra=Intra.FLAT if usual.intra is Intra.FLAT else Intra.DENSE)


def _check_names(layers: Sequence[Layer], by_pattern: Mapping[str, Option], bits: Mapping[str, int]) -> None:
    for pattern in by_pattern:
        if not any(fnmatchcase(layer.name, pattern) for layer in layers):
            raise PlanError(
                f"pattern {pattern!r} of exclude or overrides matches none of {len(layers)} layers; give a pattern of "
                f"their names, such as {layers[0].name!r} (frozen parameters are no layers, a tied one has its first "
                "name)"
            )
    unknown = sorted(bits.keys() - {layer.name for layer in layers})
    if unknown:
        raise PlanError(f"bits are given for {unknown[0]!r}, which is none of {len(layers)} layers; give their names")


def _choose(layer: Layer, usual: Option, by_pattern: Mapping[str, Option], bits: Mapping[str, int]) -> _Choice:
    for pattern, option in by_pattern.items():
        if fnmatchcase(layer.name, pattern):
            return _Choice(option, is_fixed=True, goes_with_small=layer.is_small and option == DENSE)
    if layer.is_small and not usual.codec.record.is_by_element:
        return _Choice(usual, goes_with_small=True)
    return _Choice(
        usual if layer.name not in bits else replace(usual, codec=usual.codec.replace(bits=bits[layer.name]))
    )


def _fill_groups(chosen: Sequence[tuple[Layer, _Choice]], group_bytes: int, first_bytes: int) -> list[GroupPlan]:
    """Cut runs of one dtype and one choice, in the order of `chosen` within a dtype, into groups."""
    groups: list[GroupPlan] = []
    by_dtype = sorted(chosen, key=lambda pair: pair[0].dtype)
    for _, same_dtype in itertools.groupby(by_dtype, key=lambda pair: pair[0].dtype):
        cap = min(first_bytes, group_bytes)
        for choice, run in itertools.groupby(same_dtype, key=lambda pair: pair[1]):
            taken: list[Layer] = []
            filled = 0
            for layer, _ in run:
                taken.append(layer)
                filled += layer.dense_bytes
                if filled >= cap:
                    groups.append(_group_of(taken, choice))
                    taken, filled, cap = [], 0, group_bytes
            if taken:
                groups.append(_group_of(taken, choice))
                cap = group_bytes
    return groups


def _group_of(layers: Sequence[Layer], choice: _Choice) -> GroupPlan:
    return GroupPlan(
        layers=tuple(layer.name for layer in layers),
        option=choice.option,
        is_fixed=choice.is_fixed,
        numel=sum(layer.numel for layer in layers),
    )


def plan_under(version: int, known: Mapping[int, T]) -> T | None:
    """Return the plan that ranks have under `version`, of those in a journal by version; None if it has none so old.

    The fallback of a lease, and the permanent plan after a trial, have no decision: they are one and two versions after
    the plan on trial.
    """
    versions = [one for one in sorted(known) if one <= version]
    is_fallback = len(versions) > 1 and version == versions[-1] + 1
    return known[versions[-2 if is_fallback else -1]] if versions else None
