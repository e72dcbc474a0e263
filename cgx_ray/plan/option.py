"""Options: a codec, the scheme that carries it, the work inside nodes, and the device; and which fit together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeGuard, TypeVar

from cgx_ray.errors import ConfigError, names_arguments, unknown
from cgx_ray.plan.built_in import BUILT_IN
from cgx_ray.plan.codec_record import CodecRecord
from cgx_ray.plan.codec_spec import CodecSpec


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
        """True if all ranks send the elements that one rank has selected (AR-Topk)."""
        return self.startswith("artopk_")

    @property
    def sums_messages(self) -> bool:
        """True if messages, or values at the same indices, are added as they are, by an all-reduce."""
        return self is Scheme.ALLREDUCE or self.is_artopk

    @property
    def by_tree(self) -> bool:
        """True if AR-Topk sums the values over a tree, False if over a ring."""
        return self.startswith("artopk_tree")

    @property
    def choice(self) -> str:
        """Rule by which AR-Topk chooses the rank that selects: "star", "var" or "auto"."""
        return self.removeprefix("artopk_").partition("_")[2] or "star"


class Intra(StrEnum):
    """Work inside a node: none, or its ranks sum first (dense or compressed) and the scheme runs between nodes."""

    FLAT = "flat"
    DENSE = "dense"
    COMPRESSED = "compressed"


class Device(StrEnum):
    """Where codecs work: the device that holds the gradients, or the host, which encodes what a GPU has computed."""

    AUTO = "auto"
    CPU = "cpu"


def carries(scheme: Scheme, record: CodecRecord) -> bool:
    """Return True if `scheme` can carry the codec.

    An all-reduce sums messages as they are. sra, ring, tree and broadcast encode sums again. AR-Topk uses the indices
    of one rank for all.
    """
    match scheme:
        case Scheme.DENSE:
            return record.name == "none"
        case Scheme.ALLREDUCE:
            return record.is_summed_encoded
        case Scheme.ALLGATHER:
            return True
        case Scheme.SRA | Scheme.RING | Scheme.TREE | Scheme.BROADCAST:
            return record.is_reencoded
        case _:
            return record.selects


# Of the codecs that come with cgx_ray.
CODECS_OF_SCHEME: dict[Scheme, frozenset[str]] = {
    scheme: frozenset(name for name, record in BUILT_IN.items() if carries(scheme, record)) for scheme in Scheme
}

NONE = CodecSpec(name="none")
_ON_HOST = " on cpu"
_Word = TypeVar("_Word", bound=StrEnum)


@names_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Codec, the scheme that carries it, the work inside nodes, and the device of the codec.

    Device "cpu" is offload. Where the host holds the gradients it changes nothing. Plain dense has no codec, and ranks
    of a node always sum on the host, so neither is offloaded. Raises ConfigError if the parts do not fit.
    """

    codec: CodecSpec
    scheme: Scheme
    intra: Intra = Intra.FLAT
    device: Device = Device.AUTO

    def __post_init__(self) -> None:
        problem = _problem(self.codec, self.scheme, self.intra)
        if problem is not None:
            raise ConfigError(problem)
        if _member(Device, self.device, str(self)) is Device.CPU and not self.has_choice_of_device:
            raise ConfigError(f"device 'cpu' has no effect with scheme {self.scheme}, intra {self.intra}; leave it out")

    @property
    def has_choice_of_device(self) -> bool:
        """True unless it is plain dense or hierarchical."""
        return self.scheme is not Scheme.DENSE and self.intra is Intra.FLAT

    @property
    def is_on_host(self) -> bool:
        """True if the host encodes, sums and decodes, wherever the gradients are; but see `needs_host`."""
        return self.device == Device.CPU or self.intra is not Intra.FLAT

    def needs_host(self, *, device_sums: bool) -> bool:
        """Return False if no host is needed: `device_sums` says whether the GPUs of a node sum without one.

        They make uncompressed sums only, and all-reduces among some ranks go by the host.
        """
        is_left_to_gpus = device_sums and self.intra is Intra.DENSE and not self.scheme.sums_messages
        return self.is_on_host and not is_left_to_gpus

    def flat(self) -> Option:
        """Return the same codec over the same scheme, without work inside nodes, and not offloaded."""
        return replace(self, intra=Intra.FLAT, device=Device.AUTO)

    def on(self, device: Device | str) -> Option:
        """Return the same option with its codec on `device`; plain dense and hierarchical options as they are."""
        device = _member(Device, device, str(self))
        return replace(self, device=device) if self.has_choice_of_device else self

    @staticmethod
    def is_text(given: object) -> TypeGuard[str]:
        """Return whether `given` is text with a scheme, for `parse`; text of a codec alone is not."""
        return isinstance(given, str) and (" over " in given or given.startswith(Scheme.DENSE))

    @classmethod
    def parse(cls, text: str) -> Option:
        """Read the text of an option, such as `"qsgd:bits=4 over sra, dense inside nodes"`."""
        if text.endswith(_ON_HOST):
            return replace(cls.parse(text.removesuffix(_ON_HOST)), device=Device.CPU)
        flat, inside, intra = text.removesuffix(" inside nodes"), text.endswith(" inside nodes"), Intra.FLAT
        if inside:
            flat, _, word = flat.rpartition(", ")
            intra = _member(Intra, word, text)
        if flat == Scheme.DENSE:
            return cls(codec=NONE, scheme=Scheme.DENSE, intra=intra)
        codec, _, scheme = flat.rpartition(" over ")
        return cls(codec=CodecSpec.parse(codec), scheme=_member(Scheme, scheme, text), intra=intra)

    def __str__(self) -> str:
        """Return `"dense"` or `"qsgd:bits=4,bucket_size=128 over sra"`.

        Followed by `" on cpu"` if offloaded, by `", dense inside nodes"` if not flat.
        """
        return self._text(str(self.codec))

    def describe(self) -> str:
        """Return the same as people say it: `"qsgd 4-bit over sra"`; uncompressed `"dense"` or `"dense over sra"`."""
        return self._text(self.codec.describe())

    def _text(self, codec: str) -> str:
        text = "dense" if self.scheme is Scheme.DENSE else f"{codec} over {self.scheme}"
        if self.device == Device.CPU:
            return text + _ON_HOST
        return text if self.intra is Intra.FLAT else f"{text}, {self.intra} inside nodes"


def spoken(text: str) -> str:
    """Return the text of a codec or an option, as `str` makes it, as people say it; any other text as it is."""
    name, on_host = text.removesuffix(_ON_HOST), text.endswith(_ON_HOST)
    try:
        is_option = name == Scheme.DENSE or " over " in name
        said = Option.parse(name).describe() if is_option else CodecSpec.parse(name).describe()
    except ConfigError:
        return text
    return said + _ON_HOST * on_host


def _member(words: type[_Word], word: str, text: str) -> _Word:
    """Return the member of an enumeration that `word` names. `text` is the option that it is part of."""
    if word not in tuple(words):
        raise ConfigError(f"option {text!r}: {words.__name__.lower()} {word!r} is unknown; known: {', '.join(words)}")
    return words(word)


def _problem(codec: CodecSpec, scheme: Scheme, intra: Intra) -> str | None:
    """Return why they do not fit together, or None if they do."""
    if not carries(scheme, codec.record):
        fitting = [str(one) for one in Scheme if carries(one, codec.record)]
        return (
            f"scheme {scheme} cannot carry codec {codec.name}; it carries "
            f"{', '.join(sorted(CODECS_OF_SCHEME[scheme]))}; {codec.name} goes with {', '.join(fitting)}"
        )
    if scheme.is_artopk and codec.value_bits != 32:
        return f"scheme {scheme} sums values as they are, not with value_bits {codec.value_bits}; give 32"
    if intra is Intra.COMPRESSED and not codec.record.is_summed_inside:
        allowed = sorted(name for name, record in BUILT_IN.items() if record.is_summed_inside)
        return (
            f"codec {codec.name} cannot be summed inside a node; give intra='dense', or with 'compressed' one of "
            f"{', '.join(allowed)}"
        )
    return None


DENSE = Option(codec=NONE, scheme=Scheme.DENSE)


def options_of(codec: CodecSpec) -> tuple[Option, ...]:
    """Return `codec` over every scheme that can carry it, flat and hierarchical."""
    return tuple(
        Option(codec=codec, scheme=scheme, intra=intra)
        for scheme in Scheme
        for intra in Intra
        if _problem(codec, scheme, intra) is None
    )


def preferred_scheme(codec: CodecSpec) -> Scheme:
    """Return the default scheme for `codec`: dense for none, sra where it can carry it, else the first that can."""
    preferred = Scheme.DENSE if codec == NONE else Scheme.SRA
    candidates: tuple[Scheme, ...] = (preferred, *Scheme)
    return next(scheme for scheme in candidates if carries(scheme, codec.record))


# A codec; or a codec, a scheme and, if it is not make_plan's, intra.
Given = (
    Option | CodecSpec | str | tuple[CodecSpec | str, Scheme | str] | tuple[CodecSpec | str, Scheme | str, Intra | str]
)


def as_option(given: Given, intra: Intra | str = Intra.FLAT) -> Option:
    """Return an Option from objects or text. `intra`: the default of its third part. A codec gets its usual scheme."""
    if isinstance(given, Option):
        return given
    if Option.is_text(given):
        return Option.parse(given)
    if isinstance(given, str | CodecSpec):
        codec = given if isinstance(given, CodecSpec) else CodecSpec.parse(given)
        return Option(codec=codec, scheme=preferred_scheme(codec))
    if not isinstance(given, tuple) or len(given) not in (2, 3):
        raise ConfigError(
            f"{given!r} is not a codec and a scheme; give a codec such as 'qsgd:bits=8', or a pair such as "
            "('topk:density=0.01', 'allgather')"
        )
    codec, scheme, inside = (*given, intra)[:3]
    if scheme not in tuple(Scheme):
        raise ConfigError(unknown("scheme", scheme, tuple(Scheme)))
    if inside not in tuple(Intra):
        raise ConfigError(unknown("intra", inside, tuple(Intra)))
    codec = codec if isinstance(codec, CodecSpec) else CodecSpec.parse(codec)
    return Option(codec=codec, scheme=Scheme(scheme), intra=Intra(inside))
