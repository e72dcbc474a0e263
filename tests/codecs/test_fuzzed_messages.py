"""Messages that nobody would send: every decoder gives values or one clean error, and keeps to its memory.

`make test-sanitize` runs this file under AddressSanitizer, which sees each access outside of a tensor, and with more
messages: FUZZ_ROUNDS in the environment says how many times as many. The same seeds give the same messages.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator

import pytest
import torch
from support.codec_cases import KEY, SPECS, encoded, noise
from torch import Tensor

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.codec import is_finite
from cgx_ray.errors import WireError
from cgx_ray.plan import CodecSpec
from cgx_ray.runtime_ext.checks import native

ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "1"))
# Around the ends of bytes, words, vectors and quantization buckets. LARGE is worth a second thread of our kernels.
SIZES = (0, 1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 4099)
LARGE = 70_001
# Also the layouts of indices that SPECS lack: a bitmap, and raw.
ALL_SPECS = [*SPECS, *(CodecSpec.parse(f"topk:density={density}") for density in (0.002, 0.3, 0.9))]
INSTRUCTION_SETS: list[str] = native.instruction_sets()
BY_TORCH = ("none", "fp16", "bf16", "prefix", "powersgd")
CASES = [
    pytest.param(spec, name, id=f"{spec}-{name}")
    for spec in ALL_SPECS
    for name in (INSTRUCTION_SETS[-1:] if spec.name in BY_TORCH else INSTRUCTION_SETS)
]


@pytest.fixture(autouse=True)
def _widest_instructions_afterwards() -> Iterator[None]:
    yield
    native.use_instruction_set(INSTRUCTION_SETS[-1])


def sizes_of(spec: CodecSpec) -> tuple[int, ...]:
    return SIZES if spec.name in BY_TORCH else (*SIZES, LARGE)


def broken(payload: Tensor, chance: random.Random) -> Tensor:
    """Return a changed copy in memory that ends where it ends, and begins as a payload after a header may."""
    data = bytearray(payload.numpy().tobytes())
    if data:
        first, second = sorted(chance.choices(range(len(data) + 1), k=2))
        kind = chance.randrange(4)
        if kind == 0:
            for _ in range(chance.randint(1, 8)):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[first:second] = chance.randbytes(second - first)
        elif kind == 2:
            data[first:second] = bytes([chance.choice([0, 0x7F, 0x80, 0xFF])]) * (second - first)
        else:
            start = chance.randrange(len(data) - (second - first) + 1)
            data[first:second] = data[start : start + second - first]
    offset = chance.choice([0, 4, 32])
    memory = torch.empty(offset + len(data), dtype=torch.uint8)
    if data:
        memory[offset:] = torch.frombuffer(data, dtype=torch.uint8)
    return memory[offset:]


@pytest.mark.fault("random bytes in messages of all codecs", "values, or one clean error")
@pytest.mark.parametrize(("spec", "instruction_set"), CASES)
def test_a_broken_message_gives_values_or_one_clean_error(spec: CodecSpec, instruction_set: str) -> None:
    native.use_instruction_set(instruction_set)
    chance, codec = random.Random(f"{spec} {instruction_set}"), make_codec(spec)
    dtypes = (torch.float32, torch.bfloat16) if codec.takes_16_bit else (torch.float32,)
    for numel in sizes_of(spec):
        payload = encoded(codec, noise(numel))
        for _ in range(ROUNDS * (4 if numel < 1000 else 1)):
            message = broken(payload, chance)
            before = message.clone()
            for dtype, add in ((torch.float32, True), *((dtype, False) for dtype in dtypes)):
                out_N = torch.full((numel,), 3.0, dtype=dtype)
                try:
                    codec.decode(message, out_N, add=add, key=KEY)
                except WireError:
                    assert spec.value_bits is not None, "only a sparse codec's messages can be known to be broken"
                    assert bool((out_N == 3).all()), "an error must leave the gradient as it was"
            assert torch.equal(message, before)


@pytest.mark.parametrize("spec", ALL_SPECS, ids=str)
def test_a_message_of_another_length_is_refused(spec: CodecSpec) -> None:
    codec = make_codec(spec)
    for numel in SIZES:
        right = codec.payload_bytes(numel)
        longer = encoded(codec, noise(numel)).repeat(2)
        longer = torch.cat([longer, torch.zeros(64, dtype=torch.uint8)])
        for length in {0, 1, 2, 4, 8, right - 4, right - 1, right + 1, right + 4, right + 64, 2 * right} - {right}:
            if length < 0:
                continue
            for add in (False, True):
                out_N = torch.full((numel,), 3.0)
                with pytest.raises((ValueError, WireError), match="payload"):
                    codec.decode(longer[:length].clone(), out_N, add=add, key=KEY)
                assert bool((out_N == 3).all())


def any_bits(numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(numel)
    return torch.randint(-(1 << 31), 1 << 31, (numel,), generator=generator).int().view(torch.float32)


GRADIENTS = {
    "noise": noise,
    "zeros": torch.zeros,
    "huge": lambda numel: noise(numel) * 1e38,
    "denormal": lambda numel: noise(numel) * 1e-40,
    "nan": lambda numel: torch.full((numel,), math.nan),
    "any bits": any_bits,
}


@pytest.mark.parametrize(("spec", "instruction_set"), CASES)
def test_round_trips_of_every_size_and_kind_of_number(spec: CodecSpec, instruction_set: str) -> None:
    native.use_instruction_set(instruction_set)
    codec = make_codec(spec)
    for numel in sizes_of(spec):
        for kind, make in GRADIENTS.items():
            grad_N = make(numel)
            memory = codec.new_memory(numel)
            payloads = [encoded(codec, grad_N), *(encoded(codec, grad_N, KEY, memory) for _ in range(2) if memory)]
            for payload in payloads:
                out_N = torch.empty(numel)
                codec.decode(payload, out_N, add=False, key=KEY)
                assert is_finite(grad_N) or not is_finite(out_N), f"{kind}, {numel} elements: NaN or Inf is lost"
