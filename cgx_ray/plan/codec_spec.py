"""Codec names and parameters, checked; and the bytes of an encoded gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cgx_ray.errors import ConfigError

VALUE_BUCKET_SIZE = 128  # elements that share a grid when top-k values are quantized
COUNT_BYTES = 4  # a sparse message begins with its number of elements
# Lin et al. 2018, section 3.3: the densities of the four parts of the warm-up.
WARMUP_DENSITIES = (0.25, 0.0625, 0.015625, 0.00390625)

_SPARSE: dict[str, Any] = {"density": 0.01, "value_bits": 32}

# Parameters of each codec with their defaults.
CODEC_DEFAULTS: dict[str, dict[str, Any]] = {
    "none": {},
    "fp16": {},
    "bf16": {},
    "prefix": {"ratio": 4.0},
    "qsgd": {"bits": 4, "bucket_size": 128, "grid": "max_min", "rounding": "stochastic"},
    "terngrad": {"bucket_size": 128},
    "topk": _SPARSE,
    "lwtopk": _SPARSE,
    "mstopk": _SPARSE,
    "dgc": {**_SPARSE, "momentum": 0.9, "clip": 0.0, "warmup_steps": 0},
    "sidco": _SPARSE,
    "randomk": {"density": 0.01},
    "ef_signsgd": {"bucket_size": 1024},
    "onebit": {"bucket_size": 1024},
    "powersgd": {"rank": 4},
}

# Always part of a codec's text; other parameters only if they differ from the default.
_PRINCIPAL = ("bits", "bucket_size", "density", "rank", "ratio")


class _Parameter(NamedTuple):
    """Type of a parameter, its check, and the allowed values in words."""

    kind: type
    is_allowed: Callable[[Any], bool]
    allowed: str


def _whole(low: int, high: int, multiple: int = 1) -> _Parameter:
    words = f"a whole number from {low} to {high}" + (f", a multiple of {multiple}" if multiple > 1 else "")
    return _Parameter(int, lambda x: low <= x <= high and x % multiple == 0, words)


def _one_of(*choices: Any) -> _Parameter:
    return _Parameter(type(choices[0]), lambda x: x in choices, ", ".join(map(str, choices)))


_PARAMETERS: dict[str, _Parameter] = {
    "bits": _whole(1, 8),
    "bucket_size": _whole(8, 1 << 16, multiple=8),
    "density": _Parameter(float, lambda x: 0 < x <= 1, "a share in (0, 1]; 0.01 keeps 1 %"),
    "rank": _whole(1, 1 << 10),
    "ratio": _Parameter(float, lambda x: 1 <= x < math.inf, "a number, 1 or more"),
    "grid": _one_of("max_min", "l2", "linf"),
    "rounding": _one_of("stochastic", "nearest"),
    "value_bits": _one_of(32, 16, 8, 4),
    "momentum": _Parameter(float, lambda x: 0 <= x < 1, "a number in [0, 1); 0 is none"),
    "clip": _Parameter(float, lambda x: 0 <= x < math.inf, "a norm, 0 or more; 0 is off"),
    "warmup_steps": _whole(0, (1 << 31) - 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """Codec with its parameters. Parameters that the codec does not take are None."""

    name: str
    bits: int | None = None
    bucket_size: int | None = None
    density: float | None = None
    rank: int | None = None
    ratio: float | None = None
    grid: str | None = None
    rounding: str | None = None
    value_bits: int | None = None
    momentum: float | None = None
    clip: float | None = None
    warmup_steps: int | None = None

    def __post_init__(self) -> None:
        if self.name not in CODEC_DEFAULTS:
            raise ConfigError(f"unknown codec {self.name!r}; known: {', '.join(CODEC_DEFAULTS)}")
        defaults = CODEC_DEFAULTS[self.name]
        for key, parameter in _PARAMETERS.items():
            given = getattr(self, key)
            if key in defaults:
                object.__setattr__(self, key, _checked(key, defaults[key] if given is None else given, parameter))
            elif given is not None:
                takes = ", ".join(defaults) or "no parameters"
                raise ConfigError(f"codec {self.name} has no {key}; it takes {takes}")
        if self.bits == 1 and self.grid != "max_min":
            raise ConfigError(f"bits 1 is not allowed with grid {self.grid}, whose middle level is zero; give 2 to 8")

    @classmethod
    def parse(cls, text: str) -> CodecSpec:
        """Read `"qsgd"`, `"qsgd:bits=4,bucket_size=128"` or `"topk:density=0.01,value_bits=16"`."""
        if not isinstance(text, str):
            raise ConfigError(f"codec {text!r} is not allowed; give text such as 'qsgd:bits=4' or a CodecSpec")
        name, _, rest = text.partition(":")
        name = name.strip()
        parameters: dict[str, Any] = {}
        for item in filter(None, rest.split(",")):
            key, _, value = (part.strip() for part in item.partition("="))
            if key not in _PARAMETERS:
                known = ", ".join(CODEC_DEFAULTS.get(name, _PARAMETERS)) or "none"
                raise ConfigError(f"codec {text!r}: unknown parameter {key!r}; known: {known}")
            if key in parameters:
                raise ConfigError(f"codec {text!r}: {key} is given twice; give it once")
            try:
                parameters[key] = _PARAMETERS[key].kind(value)
            except ValueError:
                allowed = _PARAMETERS[key].allowed
                raise ConfigError(f"codec {text!r}: {key} {value!r} is not allowed; give {allowed}") from None
        return cls(name=name, **parameters)

    def at_step(self, step: int) -> CodecSpec:
        """Return the spec in force at `step`: dgc keeps more during the four equal parts of `warmup_steps`."""
        if not self.warmup_steps or step >= self.warmup_steps:
            return self
        assert self.density is not None
        density = max(self.density, WARMUP_DENSITIES[step * len(WARMUP_DENSITIES) // self.warmup_steps])
        return replace(self, density=density, warmup_steps=0)

    def num_kept(self, numel: int) -> int:
        """Return the most elements that a sparse codec sends of `numel`: at least one of a non-empty group."""
        assert self.density is not None
        return min(numel, math.ceil(self.density * numel))

    def index_bytes(self, numel: int) -> int:
        """Return the part of `payload_bytes` that says which elements are sent; AR-Topk broadcasts it."""
        if self.value_bits is None:
            return 0
        return COUNT_BYTES + packed_index_bytes(numel, self.num_kept(numel))

    def payload_bytes(self, numel: int, item_bytes: int = 4) -> int:
        """Return the wire bytes of `numel` encoded elements without header. Only codec none uses `item_bytes`.

        powersgd and lwtopk count them as one layer; `Codec.payload_bytes` knows the layers.
        """
        match self.name:
            case "none":
                return numel * item_bytes
            case "fp16" | "bf16":
                return numel * 2
            case "prefix":
                return 4 * self.num_prefix(numel)
            case "qsgd" | "terngrad":
                assert self.bucket_size is not None
                grid_bytes = 4 if self.grid == "max_min" else 2
                return grid_bytes * -(-numel // self.bucket_size) + -(-numel * (self.bits or 2) // 8)
            case "ef_signsgd" | "onebit":
                assert self.bucket_size is not None
                mean_bytes = 4 if self.name == "ef_signsgd" else 8
                return mean_bytes * -(-numel // self.bucket_size) + -(-numel // 8)
            case "randomk":
                return 4 * self.num_kept(numel)
            case "powersgd":
                assert self.rank is not None
                rows, columns = near_square(numel)
                return 4 * min(self.rank, rows, columns) * (rows + columns)
            case _:
                assert self.value_bits is not None
                return self.index_bytes(numel) + value_bytes(self.num_kept(numel), self.value_bits)

    def num_prefix(self, numel: int) -> int:
        """Return the elements that codec prefix sends."""
        assert self.ratio is not None
        return math.ceil(numel / self.ratio)

    def __str__(self) -> str:
        defaults = CODEC_DEFAULTS[self.name]
        shown = [key for key in defaults if key in _PRINCIPAL or getattr(self, key) != defaults[key]]
        return self.name + (":" if shown else "") + ",".join(f"{key}={getattr(self, key)}" for key in shown)


def value_bytes(num_kept: int, value_bits: int) -> int:
    """Return the bytes of `num_kept` values: as they are, as float16, or on qsgd's max-min grid."""
    if value_bits >= 16:
        return num_kept * value_bits // 8
    return 4 * -(-num_kept // VALUE_BUCKET_SIZE) + -(-num_kept * value_bits // 8)


def packed_index_bytes(numel: int, num_kept: int) -> int:
    """Return the bytes of `num_kept` ascending indices below `numel`: the smallest of offsets, bitmap and raw.

    It repeats `runtime_ext.reference.index_layout`, which a plan may not import.
    """
    if num_kept == 0:
        return 0
    low_bits = max((numel // num_kept).bit_length() - 1, 0)
    num_high = num_kept + (numel - 1 >> low_bits) + 1
    words = (-(-num_kept * low_bits // 32) + -(-num_high // 32), -(-numel // 32), num_kept)
    return 4 * min(words)


def near_square(numel: int) -> tuple[int, int]:
    """Return the rows and columns of the smallest near-square matrix with room for `numel` elements."""
    if numel == 0:
        return 0, 0
    rows = math.isqrt(numel - 1) + 1
    return rows, -(-numel // rows)


def _checked(key: str, given: Any, parameter: _Parameter) -> Any:
    kinds = (int, float) if parameter.kind is float else parameter.kind
    if isinstance(given, bool) or not isinstance(given, kinds) or not parameter.is_allowed(given):
        raise ConfigError(f"{key} {given!r} is not allowed; give {parameter.allowed}")
    return parameter.kind(given)
