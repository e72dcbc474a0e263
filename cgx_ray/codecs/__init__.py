"""Codecs encode a gradient to bytes and decode it. `make_codec` makes one from a CodecSpec."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from cgx_ray.codecs.codec import HOST, KINDS, Codec, Memory, PayloadRow
from cgx_ray.codecs.sparse import Sparse
from cgx_ray.errors import ConfigError
from cgx_ray.plan import BUILT_IN, CodecRecord, CodecSpec, Layer

# After a payload, where encoding must not write.
_GUARD_BYTES = 256


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
    """Compile, load and try the kernels of these codecs, so that no step has to. On a CPU nothing happens.

    Raises RuntimeError if one does not compile, OSError if it cannot be written anywhere, ConfigError as `make_codec`
    and if one computes other bits than the CPU.
    """
    if device.type == "cuda":
        for spec in dict.fromkeys(specs):
            codec = make_codec(spec, device=device)
            codec.build_kernels()
            # Our codecs that have kernels promise the same bits. Codecs of others promise nothing.
            if spec.name in BUILT_IN and type(codec).build_kernels is not Codec.build_kernels:
                _try_kernels(spec, device)


@cache
def _try_kernels(spec: CodecSpec, device: torch.device) -> None:
    """Raise ConfigError unless `device` codes a gradient as a CPU does and writes nowhere else.

    The compiler comes with torch in many versions, for many devices, and a wrong bit would show in no loss for long.
    """
    if not all(map(torch.equal, _coded(spec, HOST), _coded(spec, device))):
        raise ConfigError(
            f"codec {spec} computes other bits on {device} than on a CPU. A mistake of the compiler, NVRTC, is likely: "
            'use another version of torch, leave the codec out, or let the host encode (device="cpu" of a plan)'
        )


def _coded(spec: CodecSpec, device: torch.device) -> list[Tensor]:
    """Return what a codec writes on `device`, on the host: payloads with the bytes after them, gradient, memory."""
    codec = make_codec(spec, device=device)
    # Of many blocks. Neither the last quantization bucket nor its last row is full.
    numel = 3 * codec.granule + (1 << 17) + 9
    generator = torch.Generator(HOST).manual_seed(0)
    grad_N = torch.randn(numel, generator=generator, dtype=torch.float32, device=HOST).to(device)
    num_bytes = codec.payload_bytes(numel)
    room, sum_room = (torch.zeros(num_bytes + _GUARD_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    memory, out_N = codec.new_memory(numel, device), torch.zeros_like(grad_N)
    codec.encode(grad_N, room[:num_bytes], 1, memory)
    for add in (False, True):
        codec.decode(room[:num_bytes], out_N, add=add, key=1)
    if memory is not None:
        memory.commit()  # the sum reads the residual
    if codec.record.is_reencoded:
        codec.sum_rows(PayloadRow(grad_N, sum_room[:num_bytes], 2, memory), [room[:num_bytes]], 2)
    memories = [*memory.now.values(), *memory.next.values()] if memory is not None else []
    return [one.cpu() for one in (room, sum_room, out_N, *memories)]


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
