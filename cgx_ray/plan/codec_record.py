"""The record of a codec: all that anyone but its own encode and decode needs to know of it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from cgx_ray.errors import ConfigError, names_arguments

if TYPE_CHECKING:
    from cgx_ray.plan.codec_spec import CodecSpec

# Numbers of codecs in messages. Built-in codecs have theirs for ever; the others' follow from their names.
_FIRST_OTHER_ID = 128
_TIMES = ("encode_a_s", "encode_b_s_per_element", "decode_a_s", "decode_b_s_per_element")


@names_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a codec. Its values are of the type of its default.

    allowed  the values that `is_allowed`, in words
    """

    default: Any
    is_allowed: Callable[[Any], bool]
    allowed: str

    def read(self, text: str) -> Any:
        """Return the value that `text` says. Raises ValueError if it is of another type."""
        return type(self.default)(text)

    def checked(self, name: str, given: Any) -> Any:
        """Return `given` as this parameter's type. Raises ConfigError if it is not allowed."""
        kind = type(self.default)
        kinds = (int, float) if kind is float else kind
        if isinstance(given, bool) or not isinstance(given, kinds) or not self.is_allowed(given):
            raise ConfigError(f"{name} {given!r} is not allowed; give {self.allowed}")
        return kind(given)


def whole(default: int, low: int, high: int, multiple: int = 1) -> Parameter:
    """Return a parameter whose values are the multiples of `multiple` from `low` to `high`."""
    words = f"a whole number from {low} to {high}" + (f", a multiple of {multiple}" if multiple > 1 else "")
    return Parameter(default=default, is_allowed=lambda x: low <= x <= high and x % multiple == 0, allowed=words)


def one_of(*choices: Any) -> Parameter:
    """Return a parameter with these values; the first one is the default."""
    return Parameter(default=choices[0], is_allowed=lambda x: x in choices, allowed=", ".join(map(str, choices)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCost:
    """Validation loss over dense's after equal steps, mean over seeds, by workload of `python -m bench accuracy`.

    relative_error  largest of the codec's messages in these runs, |g - decode(encode(g))|^2 / |g|^2; None for codecs
                    with error feedback, which send later what they left out
    """

    gpt_adamw: float
    gpt_sgd: float
    digits: float
    relative_error: float | None = None

    @property
    def worst(self) -> float:
        return max(self.gpt_adamw, self.gpt_sgd, self.digits)


def _no_problem(spec: CodecSpec) -> str | None:
    return None


@names_arguments
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodecRecord:
    """A codec: its parameters, wire bytes, what it may ride on, and what the planner assumes of it.

    name                text before the colon, as in "qsgd:bits=4"
    codec               subclass of `cgx_ray.codecs.Codec` that encodes and decodes, or "module:Class". Text is imported
                        on first use, so that a process that only plans imports no torch
    payload_bytes       exact bytes of a number of encoded elements, without header. `density`, `bits` and others of the
                        spec are its attributes, all of them are in `spec.parameters`
    parameters          by name. `density` and `value_bits` mean what they mean for topk, `bucket_size` the elements
                        that must stay together where a gradient is cut
    problem             why parameters do not go together, or None
    is_reencoded        parts of a gradient, and sums of decoded ones, may be encoded by themselves: sra, ring, tree,
                        broadcast. Every codec goes over allgather
    is_summed_encoded   payloads may be added as numbers of the class's `wire_dtype`: allreduce
    is_summed_inside    ranks of a node may exchange it for their sum: intra "compressed"
    selects             it sends elements with their indices, by `cgx_ray.codecs.sparse.Sparse`: AR-Topk
    is_by_element       it treats each element by itself, so that small layers may share a group with others
    takes_16_bit        it encodes 16-bit gradients on the host, and decodes to them, if it needs no feedback
    needs_feedback      training converges only when its error is added to the next step's gradient; may depend on
                        the parameters
    shares_key          all ranks must encode with the same key
    loses_elements      elements are neither sent nor kept, so NaN and Inf among them leave no trace of their place
    for_parameters      FSDP2 may gather parameters with it
    is_foreseen         its gain is known before it is used, so `fidelity` may choose it by `losses`
    typical_gains       share of a gradient that it keeps, by codec text: what `cgx-ray plan` assumes of our own codecs
    typical_times       its times where nothing was measured, as `planner.candidates.CodecCost`
    losses              measured cost in loss, by codec text
    wire_id             number in messages; that of a codec from outside follows from its name
    """

    name: str
    codec: type | str
    payload_bytes: Callable[[CodecSpec, int], int]
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    problem: Callable[[CodecSpec], str | None] = _no_problem
    is_reencoded: bool = False
    is_summed_encoded: bool = False
    is_summed_inside: bool = False
    selects: bool = False
    is_by_element: bool = False
    takes_16_bit: bool = False
    needs_feedback: bool | Callable[[CodecSpec], bool] = False
    shares_key: bool = False
    loses_elements: bool = False
    for_parameters: bool = False
    is_foreseen: bool = False
    typical_gains: Mapping[str, float] = field(default_factory=dict)
    typical_times: Mapping[str, float] | None = None
    losses: Mapping[str, LossCost] = field(default_factory=dict)
    wire_id: int = -1

    def __post_init__(self) -> None:
        problem = self._wrong()
        if problem:
            raise ConfigError(f"codec record {self.name!r}: {problem}")
        if self.wire_id < 0:
            number = _FIRST_OTHER_ID + zlib.crc32(self.name.encode()) % (256 - _FIRST_OTHER_ID)
            object.__setattr__(self, "wire_id", number)

    def _wrong(self) -> str | None:
        """Return what is wrong with the record, and what to give instead; None if it is right."""
        if not isinstance(self.name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", self.name):
            return "the name is not allowed; give small letters, digits and _, such as 'int8'"
        if not (isinstance(self.codec, type) or (isinstance(self.codec, str) and self.codec.count(":") == 1)):
            return f"codec {self.codec!r} is not allowed; give a subclass of cgx_ray.codecs.Codec, or 'module:Class'"
        if not callable(self.payload_bytes):
            return f"payload_bytes {self.payload_bytes!r} is not allowed; give a function of a CodecSpec and of a numel"
        if not isinstance(self.wire_id, int) or self.wire_id > 255 or not isinstance(self.parameters, Mapping):
            return "wire_id or parameters are not allowed; leave wire_id out, and give a dict of Parameter by name"
        for name, parameter in self.parameters.items():
            if not isinstance(parameter, Parameter) or not name.isidentifier() or name in ("name", "parameters"):
                return f"parameter {name!r}: {parameter!r} is not allowed; give names with a Parameter, such as whole()"
            parameter.checked(name, parameter.default)
        for one in fields(self):
            given = getattr(self, one.name)
            is_bool = isinstance(given, bool) or (one.name == "needs_feedback" and callable(given))
            if isinstance(one.default, bool) and not is_bool:
                return f"{one.name} {given!r} is not allowed; give True or False"
        if self.typical_times is not None and sorted(self.typical_times) != sorted(_TIMES):
            return f"typical_times {self.typical_times!r} are not allowed; give {', '.join(_TIMES)}"
        return None

    def feeds_back(self, spec: CodecSpec) -> bool:
        """Return True if the codec with these parameters needs error feedback."""
        return self.needs_feedback(spec) if callable(self.needs_feedback) else self.needs_feedback
