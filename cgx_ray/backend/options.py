"""What the backend compresses, and how: from arguments, else from CGX's environment variables."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cgx_ray.errors import ConfigError
from cgx_ray.plan import NONE, SMALL_LAYER_NUMEL, CodecSpec, Scheme, check_pair

# A process group sees tensors, not layers: nothing to keep residuals by, so nothing that needs them.
CODECS = ("none", "fp16", "bf16", "qsgd", "terngrad", "prefix")
SCHEMES = (Scheme.SRA, Scheme.ALLGATHER)

# CGX's names.
BITS = "CGX_COMPRESSION_QUANTIZATION_BITS"
BUCKET_SIZE = "CGX_COMPRESSION_BUCKET_SIZE"
MINIMAL_SIZE = "CGX_COMPRESSION_MINIMAL_SIZE"
FAKE_RATIO = "CGX_COMPRESSION_FAKE_RATIO"
BITS_OFF = 32

T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """What one process group does. Raises ConfigError on a value that is not allowed.

    codec      for the tensors that are compressed; none: everything goes through Gloo
    scheme     how their messages travel
    min_numel  tensors, and layers of a registered model, with fewer elements are not compressed
    """

    codec: CodecSpec
    scheme: Scheme = Scheme.SRA
    min_numel: int = SMALL_LAYER_NUMEL

    def __post_init__(self) -> None:
        if self.codec.name not in CODECS or self.codec.rounding == "nearest":
            raise ConfigError(
                f"codec {self.codec} is not for backend cgx, which keeps no error feedback; give one of "
                f"{', '.join(CODECS)} (qsgd with rounding=stochastic), or use cgx_ray.attach, which has all codecs"
            )
        if self.scheme not in SCHEMES:
            raise ConfigError(f"scheme {self.scheme} is not for backend cgx; give one of {', '.join(SCHEMES)}")
        if isinstance(self.min_numel, bool) or not isinstance(self.min_numel, int) or self.min_numel < 0:
            raise ConfigError(
                f"min_numel {self.min_numel!r} is not allowed; give a whole number of elements, 0 or more"
            )
        if self.codec != NONE:
            check_pair(self.codec, self.scheme)

    def __str__(self) -> str:
        return f"{self.codec} over {self.scheme} from {self.min_numel} elements on"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """Arguments of `configure_backend`; None: not given."""

    codec: CodecSpec | None = None
    scheme: Scheme = Scheme.SRA
    min_numel: int | None = None


_given = _Given()


def configure_backend(*, codec: str | None = None, scheme: str = "sra", min_numel: int | None = None) -> None:
    """Set what backend "cgx" does in groups made from now on, whatever CGX's environment variables say.

    codec      as in `CodecSpec.parse`: none, fp16, bf16, qsgd, terngrad or prefix. Left out: what
               CGX_COMPRESSION_QUANTIZATION_BITS, _BUCKET_SIZE and _FAKE_RATIO say, else qsgd 4/128
    scheme     sra or allgather
    min_numel  tensors with fewer elements go through Gloo. Left out: CGX_COMPRESSION_MINIMAL_SIZE, else 1,024

    Call it on every rank, alike, before init_process_group. Raises ConfigError on a value that is not allowed.
    """
    global _given  # noqa: PLW0603 - torch makes the groups, and passes nothing of ours on
    if scheme not in tuple(Scheme):
        raise ConfigError(f"unknown scheme {scheme!r}; backend cgx has {', '.join(SCHEMES)}")
    given = _Given(
        codec=CodecSpec.parse(codec) if codec is not None else None, scheme=Scheme(scheme), min_numel=min_numel
    )
    # Checked here, where it was written, and not first when torch makes a group.
    BackendOptions(
        codec=given.codec or CodecSpec(name="qsgd"),
        scheme=given.scheme,
        min_numel=SMALL_LAYER_NUMEL if min_numel is None else min_numel,
    )
    _given = given


def current_options() -> BackendOptions:
    """What a group made now does. The only reader of the environment variables.

    Raises ConfigError if one of those that are needed has a value that is not allowed.
    """
    minimal = _given.min_numel
    if minimal is None:
        minimal = _read(MINIMAL_SIZE, int, SMALL_LAYER_NUMEL, lambda x: x >= 0, "a whole number of elements, 0 or more")
    return BackendOptions(codec=_given.codec or _codec_of_environment(), scheme=_given.scheme, min_numel=minimal)


def _codec_of_environment() -> CodecSpec:
    ratio = _read(FAKE_RATIO, float, 1.0, lambda x: 1 <= x < math.inf, "1 (off) or more; 4 sends the first quarter")
    if ratio > 1:
        return CodecSpec(name="prefix", ratio=ratio)
    bits = _read(BITS, int, 4, lambda x: 1 <= x <= 8 or x == BITS_OFF, f"1 to 8, or {BITS_OFF} for no compression")
    if bits == BITS_OFF:
        return NONE
    allowed = "a multiple of 8 from 8 to 65536"
    bucket_size = _read(BUCKET_SIZE, int, 128, lambda x: 8 <= x <= 1 << 16 and x % 8 == 0, allowed)
    return CodecSpec(name="qsgd", bits=bits, bucket_size=bucket_size)


def _read(name: str, kind: type[T], default: T, is_allowed: Callable[[T], bool], allowed: str) -> T:
    """The variable `name`; `default` if it is unset or empty."""
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = kind(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}; give {allowed}") from None
    if not is_allowed(value):
        raise ConfigError(f"{name} is {text!r}; give {allowed}")
    return value
