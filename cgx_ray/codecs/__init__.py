"""Codecs encode a gradient to bytes and decode it. `make_codec` makes one from a CodecSpec."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module

import torch

from cgx_ray.codecs.codec import HOST, KINDS, Codec, Memory
from cgx_ray.codecs.sparse import Sparse
from cgx_ray.errors import ConfigError
from cgx_ray.plan import CodecRecord, CodecSpec, Layer


def make_codec(
    spec: CodecSpec, layers: Sequence[Layer] = (), world_size: int = 1, device: torch.device = HOST
) -> Codec:
    """Return the codec that `spec` names.

    layers  of the group; without them the codec treats the group as one layer
    device  of the gradients

    Raises ConfigError if its record names no class, or one that cannot do what the record says.
    """
    codec = _class_of(spec.record)(spec, layers, world_size)
    codec.device = device
    return codec


def build_kernels(specs: Iterable[CodecSpec], device: torch.device) -> None:
    """Compile and load the kernels of these codecs, so that no step has to. On a CPU nothing happens.

    Raises RuntimeError if one does not compile, OSError if it cannot be written anywhere, ConfigError as `make_codec`.
    """
    if device.type == "cuda":
        for spec in dict.fromkeys(specs):
            make_codec(spec, device=device).build_kernels()


@cache
def _class_of(record: CodecRecord) -> type[Codec]:
    name, found = record.name, record.codec
    if isinstance(found, str):
        module, _, attribute = found.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"codec {name} cannot be used: importing {record.codec} raised {error!r}") from error
    if not (isinstance(found, type) and issubclass(found, Codec)):
        raise ConfigError(f"codec {name}: {found!r} is not a subclass of cgx_ray.codecs.Codec")
    if record.selects and not issubclass(found, Sparse):
        raise ConfigError(f"codec {name} `selects`, so its class must be a cgx_ray.codecs.sparse.Sparse")
    if kinds := set(found(CodecSpec(name=name)).memory_of(1)) - set(KINDS):
        raise ConfigError(f"codec {name} has memory of kind {sorted(kinds)[0]!r}; known: {', '.join(KINDS)}")
    return found


__all__ = ["Codec", "Memory", "build_kernels", "make_codec"]
