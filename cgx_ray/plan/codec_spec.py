"""A codec with its parameters, as text and in numbers of bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from cgx_ray.errors import ConfigError, names_arguments, nearest
from cgx_ray.plan.built_in import COUNT_BYTES, packed_index_bytes
from cgx_ray.plan.codec_record import CodecRecord, Parameter
from cgx_ray.plan.codec_registry import record_of

# Lin et al. 2018, section 3.3: the densities of the four parts of the warm-up.
WARMUP_DENSITIES = (0.25, 0.0625, 0.015625, 0.00390625)

# Always part of a codec's text; other parameters only if they differ from the default.
_PRINCIPAL = ("bits", "bucket_size", "density", "rank", "ratio")
# How people say these values, see `CodecSpec.describe`.
_SPOKEN = {
    "bits": "{}-bit".format,
    "density": lambda share: f"{100 * share:.3g} %",
    "rank": "rank {}".format,
    "ratio": "1 of {:g}".format,
}
_NOTHING: Mapping[str, Any] = {}
_T = TypeVar("_T")


class _Value(Generic[_T]):
    """A parameter as an attribute of a spec; None if the codec does not take it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, spec: CodecSpec, owner: type) -> _T | None:
        value: _T | None = spec.parameters.get(self._name)
        return value


@names_arguments
@dataclass(frozen=True, slots=True, init=False)
class CodecSpec:
    """Codec with its parameters: `CodecSpec(name="qsgd", bits=4)`. Parameters that it does not take are None.

    parameters  all that the codec takes, by name, with their defaults
    """

    name: str
    parameters: Mapping[str, Any]

    bits: ClassVar[_Value[int]] = _Value()
    bucket_size: ClassVar[_Value[int]] = _Value()
    density: ClassVar[_Value[float]] = _Value()
    rank: ClassVar[_Value[int]] = _Value()
    ratio: ClassVar[_Value[float]] = _Value()
    grid: ClassVar[_Value[str]] = _Value()
    rounding: ClassVar[_Value[str]] = _Value()
    value_bits: ClassVar[_Value[int]] = _Value()
    momentum: ClassVar[_Value[float]] = _Value()
    clip: ClassVar[_Value[float]] = _Value()
    warmup_steps: ClassVar[_Value[int]] = _Value()

    def __init__(self, *, name: str, parameters: Mapping[str, Any] = _NOTHING, **given: Any) -> None:
        """Take the parameters that are `given` by name, then those of `parameters`, then defaults. None is a default.

        Raises ConfigError if the codec is unknown, or does not take a parameter or its value.
        """
        record = record_of(name)
        values = {key: value for key, value in {**parameters, **given}.items() if value is not None}
        for key in values.keys() - record.parameters.keys():
            raise ConfigError(f"codec {name} has no {key}; {_hint(key, str(values[key]), record.parameters)}")
        checked = {key: one.checked(key, values.get(key, one.default)) for key, one in record.parameters.items()}
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "parameters", checked)
        if problem := record.problem(self):
            raise ConfigError(problem)

    def __hash__(self) -> int:
        return hash((self.name, *self.parameters.values()))

    @property
    def record(self) -> CodecRecord:
        return record_of(self.name)

    @classmethod
    def parse(cls, text: str) -> CodecSpec:
        """Read `"qsgd"`, `"qsgd:bits=4,bucket_size=128"` or `"topk:density=0.01,value_bits=16"`."""
        if not isinstance(text, str):
            raise ConfigError(f"codec {text!r} is not allowed; give text such as 'qsgd:bits=4' or a CodecSpec")
        alone, over, scheme = text.partition(" over ")
        if over:
            raise ConfigError(f"codec {text!r} has a scheme, too; give them apart: codec={alone!r}, scheme={scheme!r}")
        name, _, rest = text.partition(":")
        name = name.strip()
        known = record_of(name).parameters
        values: dict[str, Any] = {}
        for item in filter(None, rest.split(",")):
            key, _, value = (part.strip() for part in item.partition("="))
            if key not in known:
                raise ConfigError(f"codec {text!r}: codec {name} has no {key}; {_hint(key, value, known)}")
            if key in values:
                raise ConfigError(f"codec {text!r}: {key} is given twice; give it once")
            try:
                values[key] = known[key].read(value)
            except ValueError:
                raise ConfigError(
                    f"codec {text!r}: {key} {value!r} is not allowed; give {known[key].allowed}"
                ) from None
        return cls(name=name, parameters=values)

    def replace(self, **changes: Any) -> CodecSpec:
        """Return the same codec with other values of these parameters."""
        return CodecSpec(name=self.name, parameters=self.parameters, **changes)

    def at_step(self, step: int) -> CodecSpec:
        """Return the spec in force at `step`: dgc keeps more during the four equal parts of `warmup_steps`."""
        if not self.warmup_steps or step >= self.warmup_steps:
            return self
        assert self.density is not None
        density = max(self.density, WARMUP_DENSITIES[step * len(WARMUP_DENSITIES) // self.warmup_steps])
        return self.replace(density=density, warmup_steps=0)

    def num_kept(self, numel: int) -> int:
        """Return the most elements that a sparse codec sends of `numel`: at least one of a non-empty group."""
        assert self.density is not None
        return min(numel, math.ceil(self.density * numel))

    def index_bytes(self, numel: int) -> int:
        """Return the part of `payload_bytes` that says which elements are sent; AR-Topk broadcasts it."""
        return COUNT_BYTES + packed_index_bytes(numel, self.num_kept(numel)) if self.record.selects else 0

    def payload_bytes(self, numel: int, item_bytes: float = 4) -> int:
        """Return the wire bytes of `numel` encoded elements without header. Only codec none uses `item_bytes`.

        powersgd and lwtopk count them as one layer; `Codec.payload_bytes` knows the layers.
        """
        return int(numel * item_bytes) if self.name == "none" else self.record.payload_bytes(self, numel)

    def num_prefix(self, numel: int) -> int:
        """Return the elements that codec prefix sends."""
        assert self.ratio is not None
        return math.ceil(numel / self.ratio)

    def describe(self) -> str:
        """Return the codec as people say it, without defaults: "qsgd 4-bit", "topk 1 %"; "dense" for none.

        The only source of this name. `str` has the text that `parse` reads.
        """
        if self.name == "none":
            return "dense"
        known = self.record.parameters
        words = [_SPOKEN[key](value) for key, value in self.parameters.items() if key in _SPOKEN]
        words += [
            f"{key}={value}"
            for key, value in self.parameters.items()
            if key not in _SPOKEN and value != known[key].default
        ]
        return " ".join([self.name, *words])

    def __str__(self) -> str:
        known = self.record.parameters
        shown = [key for key, value in self.parameters.items() if key in _PRINCIPAL or value != known[key].default]
        return self.name + (":" if shown else "") + ",".join(f"{key}={self.parameters[key]}" for key in shown)


def _hint(key: str, value: str, known: Mapping[str, Parameter]) -> str:
    """Return what a codec takes in place of `key`: a parameter of a similar name, or the first one, given `key`."""
    if not value and ":" in key:
        key, _, value = key.partition(":")
    near = nearest(key, known) if value else next(iter(known), "")
    meant = f"did you mean '{near}={value or key}'? " if near else ""
    return f"{meant}it takes {', '.join(known) or 'no parameters'}"
