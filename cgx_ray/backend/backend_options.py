"""Options of backend "cgx": which tensors it compresses and how, from arguments or CGX's environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from cgx_ray.errors import ConfigError, names_arguments
from cgx_ray.plan import BUILT_IN, NONE, SMALL_LAYER_NUMEL, CodecSpec, Option, Scheme

# Codecs without residuals: a process group sees tensors, not layers, so it has no names to keep residuals by.
CODECS = tuple(
    name for name, record in BUILT_IN.items() if record.is_reencoded and not record.feeds_back(CodecSpec(name=name))
)
SCHEMES = (Scheme.SRA, Scheme.ALLGATHER)
DEFAULT_CODEC = CodecSpec(name="qsgd")

# CGX's names of its environment variables.
BITS = "CGX_COMPRESSION_QUANTIZATION_BITS"
BUCKET_SIZE = "CGX_COMPRESSION_BUCKET_SIZE"
MINIMAL_SIZE = "CGX_COMPRESSION_MINIMAL_SIZE"
FAKE_RATIO = "CGX_COMPRESSION_FAKE_RATIO"
BITS_OFF = 32

T = TypeVar("T", int, float)


def check_option(codec: CodecSpec, scheme: str) -> None:
    """Raise ConfigError if backend cgx cannot use `codec` or `scheme`."""
    if not codec.record.is_reencoded or codec.record.feeds_back(codec):
        raise ConfigError(
            f"codec {codec} is not for backend cgx, which keeps no error feedback; give one of "
            f"{', '.join(CODECS)} (qsgd with rounding=stochastic), or use cgx_ray.attach, which has all codecs"
        )
    if scheme not in SCHEMES:
        raise ConfigError(f"scheme '{scheme}' is not for backend cgx; give one of {', '.join(SCHEMES)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """The options of one process group. Raises ConfigError on a value that is not allowed.

    option     codec and scheme where no plan says another; with codec none Gloo reduces everything
    min_numel  tensors, and layers of a registered model, with fewer elements are not compressed
    """

    option: Option
    min_numel: int

    def __post_init__(self) -> None:
        if isinstance(self.min_numel, bool) or not isinstance(self.min_numel, int) or self.min_numel < 0:
            raise ConfigError(
                f"min_numel {self.min_numel!r} is not allowed; give a whole number of elements, 0 or more"
            )

    def __str__(self) -> str:
        return f"{self.option} from {self.min_numel} elements on"


# Arguments of `_make`, kept for the whole process: torch makes the groups and passes no arguments of ours.
_given: dict[str, Any] = {}


@names_arguments
def configure_backend(
    *, codec: CodecSpec | str | None = None, scheme: str | None = None, min_numel: int | None = None
) -> None:
    """Set the options of process groups made from now on, whatever CGX's environment variables say.

    codec      as in `CodecSpec.parse`: none, fp16, bf16, qsgd, terngrad or prefix. Left out: that of
               CGX_COMPRESSION_QUANTIZATION_BITS, _BUCKET_SIZE and _FAKE_RATIO, else qsgd 4/128
    scheme     sra or allgather. Left out: sra
    min_numel  tensors with fewer elements go through Gloo. Left out: CGX_COMPRESSION_MINIMAL_SIZE, else 1,024

    Call it on all ranks with the same arguments, before init_process_group. Raises ConfigError on a value that is not
    allowed.
    """
    given: dict[str, Any] = {}
    if codec is not None:
        given["codec"] = codec if isinstance(codec, CodecSpec) else CodecSpec.parse(codec)
    if scheme is not None:
        given["scheme"] = scheme
    if min_numel is not None:
        given["min_numel"] = min_numel
    # Check now, at the line with the mistake, and not when torch makes a group.
    _make(**given)
    _given.clear()
    _given.update(given)


def current_options() -> BackendOptions:
    """Return the options of a group made now. The only reader of CGX's environment variables.

    Raises ConfigError if a variable that counts has a value that is not allowed.
    """
    options = dict(_given)
    if "codec" not in options:
        options["codec"] = _codec_of_environment()
    if "min_numel" not in options:
        allowed = "a whole number of elements, 0 or more"
        options["min_numel"] = _read(MINIMAL_SIZE, int, SMALL_LAYER_NUMEL, lambda x: x >= 0, allowed)
    return _make(**options)


def _make(
    codec: CodecSpec = DEFAULT_CODEC, scheme: str = Scheme.SRA, min_numel: int = SMALL_LAYER_NUMEL
) -> BackendOptions:
    check_option(codec, scheme)
    return BackendOptions(option=Option(codec=codec, scheme=Scheme(scheme)), min_numel=min_numel)


def _codec_of_environment() -> CodecSpec:
    # CGX's code multiplies by it; its paper divides by the ratio.
    allowed = "the share of elements to send: 1 (all of them: off) or less, such as 0.25"
    share = _read(FAKE_RATIO, float, 1.0, lambda x: 0 < x <= 1, allowed)
    if share < 1:
        return CodecSpec(name="prefix", ratio=1 / share)
    bits = _read(BITS, int, 4, lambda x: 1 <= x <= 8 or x == BITS_OFF, f"1 to 8, or {BITS_OFF} for no compression")
    if bits == BITS_OFF:
        return NONE
    allowed = "a multiple of 8 from 8 to 65536"
    bucket_size = _read(BUCKET_SIZE, int, 128, lambda x: 8 <= x <= 1 << 16 and x % 8 == 0, allowed)
    return CodecSpec(name="qsgd", bits=bits, bucket_size=bucket_size)


def _read(name: str, kind: type[T], default: T, is_allowed: Callable[[T], bool], allowed: str) -> T:
    """Return the variable `name`, or `default` if it is unset or empty."""
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
