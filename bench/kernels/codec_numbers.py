"""Times of a codec at one size, and its error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cgx_ray.codecs import make_codec
from cgx_ray.plan import CodecSpec
from cgx_ray.session.calibrate import Call, best_seconds

QUALITY_NUMEL = 1 << 20
DISTRIBUTIONS = ("gaussian", "laplace", "student_t3")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecTiming:
    """Seconds of one codec at its defaults, and of `copy_`, for one size of gradient."""

    codec: str
    message_bytes: int
    encode_s: float
    decode_add_s: float
    copy_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Size and error of one codec at its defaults.

    bits    per element, on the wire
    errors  |x - decode(encode(x))| / |x| for x of each of DISTRIBUTIONS
    """

    spec: CodecSpec
    bits: float
    errors: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecCalls:
    """Calls that encode a gradient, and decode and add it. All buffers exist, so only the codec allocates memory."""

    encode: Call
    decode_add: Call
    payload_bytes: int


def codec_calls(name: str, grad_N: Tensor, out_N: Tensor, key: int, *, with_feedback: bool = True) -> CodecCalls:
    """Return the calls of a codec at its defaults; with feedback, if it needs that, as in a training step."""
    codec = make_codec(CodecSpec(name=name))
    payload = torch.empty(codec.payload_bytes(grad_N.numel()), dtype=torch.uint8, device=grad_N.device)
    # The memory is never committed, so every call reads the same residual.
    memory = codec.new_memory(grad_N.numel(), grad_N.device) if with_feedback else None
    encode = partial(codec.encode, grad_N, payload, key, memory)
    encode()  # fills the payload for decode
    return CodecCalls(
        encode=encode,
        decode_add=partial(codec.decode, payload, out_N, add=True, key=key),
        payload_bytes=payload.numel(),
    )


def measure_size(
    names: Sequence[str], grad_N: Tensor, out_N: Tensor, key: int, *, num_rounds: int
) -> list[CodecTiming]:
    """Time encode (with feedback where the codec needs it), decode-add and `copy_`, in turns."""
    calls: list[Call] = [partial(out_N.copy_, grad_N)]
    for name in names:
        codec = codec_calls(name, grad_N, out_N, key)
        calls += [codec.encode, codec.decode_add]
    copy_s, *seconds = best_seconds(calls, grad_N.device, num_rounds=num_rounds)
    return [
        CodecTiming(
            codec=name,
            message_bytes=4 * grad_N.numel(),
            encode_s=seconds[2 * index],
            decode_add_s=seconds[2 * index + 1],
            copy_s=copy_s,
        )
        for index, name in enumerate(names)
    ]


def measure_quality(name: str, samples: dict[str, Tensor], key: int) -> Quality:
    """Return size and error of a codec for `samples`, each encoded as the first message of a run."""
    codec = make_codec(CodecSpec(name=name))
    errors: dict[str, float] = {}
    for distribution, grad_N in samples.items():
        payload = torch.empty(codec.payload_bytes(grad_N.numel()), dtype=torch.uint8, device=grad_N.device)
        decoded_N = torch.empty_like(grad_N)
        codec.encode(grad_N, payload, key)
        codec.decode(payload, decoded_N, add=False, key=key)
        errors[distribution] = float((grad_N.double() - decoded_N).norm() / grad_N.double().norm())
    numel = next(iter(samples.values())).numel()
    return Quality(spec=codec.spec, bits=8 * codec.payload_bytes(numel) / numel, errors=errors)


def draw_samples(numel: int, seed: int, device: torch.device) -> dict[str, Tensor]:
    """Return (N,) float32 of each of DISTRIBUTIONS, the same on every device.

    Gradients lie between the first two, with light tails, and the third. Student's t with 3 degrees of freedom has
    tails of x^-4, the heaviest of a whole number of degrees with a finite variance.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    exponential_2N = torch.empty(2, numel).exponential_(generator=generator)
    samples = {
        "gaussian": normal(numel),
        "laplace": exponential_2N[0] - exponential_2N[1],
        "student_t3": normal(numel) / (normal(3, numel).square().sum(0) / 3).sqrt(),
    }
    assert tuple(samples) == DISTRIBUTIONS
    return {name: sample_N.to(device) for name, sample_N in samples.items()}
