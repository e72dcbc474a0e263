"""The CUDA kernels of qsgd and the one-bit codecs against the reference bit for bit, in the emulator and on a GPU.

test_cuda_launch.py tests how kernels are compiled and launched, test_cuda_sparse_kernels.py those that select elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.bucket_codecs import BucketKernels, QsgdKernels, SignKernels, name
from support.cuda.waits import no_waits
from support.cuda_emulator import Emulator
from support.same_bits import assert_same
from torch import Tensor

from cgx_ray.runtime_ext import ops, reference

BITS = range(1, 9)
# Compiled for `make test`, 4 s of a processor each: one bit, those that divide a byte, and one that does not.
EMULATED_BITS = (1, 2, 3, 4, 8)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (0, 1, 7, 127, 128, 129, 1000, 4099)
BUCKET_SIZES = (8, 40, 64, 128, 1024)
CPU = torch.device("cpu")
GUARD = 0x5A


@pytest.fixture(scope="module", autouse=True)
def _compiled_for_all_bits(request: pytest.FixtureRequest) -> None:
    """Build qsgd.cu for several numbers of bits at a time. The gpu tests alone need no build."""
    if all(item.get_closest_marker("gpu") for item in request.session.items):
        return
    emulator: Emulator = request.getfixturevalue("compiled_emulator")
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda bits: emulator.library("qsgd_encode", f"CGX_BITS={bits}"), EMULATED_BITS))


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Yield the device of the kernels: a GPU, or the CPU with the emulator."""
    if request.param == "emulated":
        request.getfixturevalue("emulated_cuda")
        yield CPU
    else:
        yield torch.device("cuda", torch.cuda.current_device())


def _random(numel: int, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator).to(device)


def _qsgd(bits: int, bucket_size: int = 128, grid: str = "max_min", stochastic: bool = True) -> QsgdKernels:
    return QsgdKernels(grid, bits, bucket_size, stochastic)


def _at_odd_address(data: Tensor) -> Tensor:
    moved = torch.full((data.numel() + 1,), GUARD, dtype=data.dtype, device=data.device)[1:]
    moved.copy_(data)
    return moved


def check(
    codec: BucketKernels,
    grad_N: Tensor,
    residual_N: Tensor | None = None,
    place: Callable[[Tensor], Tensor] = Tensor.clone,
) -> None:
    """Compare kernels and reference on `grad_N`. `place` copies a payload to memory of another alignment or layout."""
    numel, device = grad_N.numel(), grad_N.device
    what = f"{codec}, {numel} of {grad_N.dtype}"
    fed_N = reference.add_feedback(grad_N, residual_N).contiguous()
    expected = torch.zeros(codec.num_bytes(numel), dtype=torch.uint8, device=device)
    codec.reference_encode(fed_N, expected)
    expected_N = torch.empty(numel, device=device)
    codec.reference_decode(expected, expected_N, add=False)

    payload = place(torch.full_like(expected, GUARD))
    codec.encode(grad_N, payload, residual_N=residual_N)
    assert_same(payload, expected, f"payload of {what}")

    again, next_N = place(torch.full_like(expected, GUARD)), torch.full((numel,), math.pi, device=device)
    codec.encode(grad_N, again, residual_N=residual_N, next_N=next_N)
    assert_same(again, expected, f"payload beside next_N of {what}")
    assert_same(next_N, fed_N - expected_N, f"next_N of {what}")
    if residual_N is not None:
        in_place_N = residual_N.clone()
        codec.encode(grad_N, again, residual_N=in_place_N, next_N=in_place_N)
        assert_same(in_place_N, next_N, f"residual_N as next_N of {what}")

    out_N = torch.full((numel,), math.pi, device=device)
    codec.decode(payload, out_N, add=False)
    assert_same(out_N, expected_N, f"decoded {what}")
    sum_N = _random(numel, device, seed=3)
    expected_sum_N = sum_N + expected_N
    codec.decode(payload, sum_N, add=True)
    assert_same(sum_N, expected_sum_N, f"decoded and added {what}")


GRIDS = [(bits, grid) for bits in BITS for grid in ops.GRIDS if bits > 1 or grid == "max_min"]


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize(
    ("bits", "grid", "device"),
    [
        *((bits, grid, "emulated") for bits, grid in GRIDS if bits in EMULATED_BITS),
        *(pytest.param(*one, "emulated", marks=pytest.mark.slow) for one in GRIDS if one[0] not in EMULATED_BITS),
        *(pytest.param(*one, "cuda", marks=pytest.mark.gpu) for one in GRIDS),
    ],
    indirect=["device"],
)
def test_qsgd_equals_the_reference(bits: int, grid: str, stochastic: bool, device: torch.device) -> None:
    for dtype, (numel, bucket_size) in itertools.product(DTYPES, [(129, 40), (1000, 128), (4099, 256)]):
        check(_qsgd(bits, bucket_size, grid, stochastic), _random(numel, device).to(dtype), _random(numel, device, 1))


@pytest.mark.parametrize("kind", ops.SIGN_KINDS)
def test_sign_equals_the_reference(kind: str, device: torch.device) -> None:
    for dtype, (numel, bucket_size) in itertools.product(DTYPES, [(129, 40), (1000, 128), (4099, 256)]):
        check(SignKernels(kind, bucket_size), _random(numel, device).to(dtype), _random(numel, device, 1))


@pytest.mark.parametrize("numel", SIZES)
def test_every_size_and_bucket_size_equals_the_reference(numel: int, device: torch.device) -> None:
    for bucket_size in BUCKET_SIZES:
        for codec in (_qsgd(4, bucket_size), _qsgd(3, bucket_size, "l2"), SignKernels("onebit", bucket_size)):
            check(codec, _random(numel, device))


def _special(device: torch.device) -> dict[str, Tensor]:
    """Return gradients of extreme and non-finite numbers, on which formulas and comparisons fail first."""
    x_N = _random(300, device)

    def with_one(value: float) -> Tensor:
        changed_N = x_N.clone()
        changed_N[150] = value
        return changed_N

    any_bits_N = torch.randint(-(1 << 31), 1 << 31, (300,), generator=torch.Generator().manual_seed(4))
    return {
        "denormal": x_N * 1e-40,
        "denormal scale": 1e-3 + x_N * 1e-38,
        "all equal": torch.full_like(x_N, -0.1),
        "zeros of both signs": torch.where(x_N < 0, -0.0, 0.0),
        "minus zero": torch.full_like(x_N, -0.0),
        "minus zero, then whole rows of padding": torch.full_like(x_N[:160], -0.0),
        "huge": x_N * 1e38,
        "any bits": any_bits_N.int().view(torch.float32).to(device),
        "nan": with_one(math.nan),
        "negative nan": with_one(-math.nan),
        "inf": with_one(math.inf),
        "negative inf": with_one(-math.inf),
    }


@pytest.mark.parametrize("case", _special(CPU))
def test_special_numbers_equal_the_reference(case: str, device: torch.device) -> None:
    grad_N = _special(device)[case]
    codecs = [_qsgd(bits, 128, grid, s) for bits in (2, 3) for grid in ops.GRIDS for s in (True, False)]
    for codec in [*codecs, *(SignKernels(kind) for kind in ops.SIGN_KINDS)]:
        check(codec, grad_N)


def test_every_half_and_bfloat16_is_read_exactly(device: torch.device) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        grad_N = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
        # Inf and NaN fill whole quantization buckets of 8, so next_N shows every finite number.
        check(_qsgd(8, 8), grad_N)


@pytest.mark.parametrize("codec", [_qsgd(3), _qsgd(4), _qsgd(8, 64, "linf"), SignKernels("onebit")], ids=name)
def test_unaligned_payloads_and_gradients_equal_the_reference(codec: BucketKernels, device: torch.device) -> None:
    for dtype in DTYPES:
        grad_N = _at_odd_address(_random(1000, device).to(dtype))
        assert grad_N.data_ptr() % 16 != 0
        check(codec, grad_N, _at_odd_address(_random(1000, device, 1)), place=_at_odd_address)


@pytest.mark.parametrize("codec", [_qsgd(4), SignKernels("ef_signsgd")], ids=name)
def test_tensors_with_gaps_equal_the_reference(codec: BucketKernels, device: torch.device) -> None:
    def with_gaps(data: Tensor) -> Tensor:
        spread = torch.full((2 * data.numel(),), GUARD, dtype=data.dtype, device=data.device)[::2]
        spread.copy_(data)
        return spread

    check(codec, with_gaps(_random(1000, device)), with_gaps(_random(1000, device, 1)), place=with_gaps)
    next_N = with_gaps(torch.zeros(1000, device=device))
    out = torch.empty(codec.num_bytes(1000), dtype=torch.uint8, device=device)
    codec.encode(_random(1000, device), out, residual_N=next_N, next_N=next_N)
    dense_N = torch.zeros(1000, device=device)
    codec.encode(_random(1000, device), out, residual_N=dense_N, next_N=dense_N)
    assert_same(next_N, dense_N, "next_N with gaps")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_equals_the_reference(data: st.DataObject, device: torch.device) -> None:
    bucket_size = 8 * data.draw(st.integers(1, 80), label="bucket_size / 8")
    several = st.sampled_from([bits for bits in (EMULATED_BITS if device == CPU else BITS) if bits > 1])
    codec = data.draw(
        st.one_of(
            st.builds(_qsgd, several, st.just(bucket_size), st.sampled_from(list(ops.GRIDS)), st.booleans()),
            st.builds(SignKernels, st.sampled_from(list(ops.SIGN_KINDS)), st.just(bucket_size)),
        ),
        label="codec",
    )
    numel = data.draw(st.integers(0, 3000), label="numel")
    scale = 10.0 ** data.draw(st.integers(-44, 38), label="log10 of the scale")
    residual_N = _random(numel, device, 1) * scale if data.draw(st.booleans(), label="residual") else None
    check(codec, _random(numel, device) * scale, residual_N)


def test_more_buckets_than_blocks_hold_equal_the_reference(emulated_cuda: Emulator) -> None:
    # 10 blocks of 32 quantization buckets hold 320 of the 700: blocks make a second round.
    assert emulated_cuda.max_blocks == 10
    check(_qsgd(4, 8), _random(8 * 700, CPU))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "codec",
    [_qsgd(1), _qsgd(4), _qsgd(3, 512, "l2"), SignKernels("onebit"), SignKernels("ef_signsgd", 1 << 16)],
    ids=name,
)
def test_long_gradients_equal_the_reference_on_a_gpu(codec: BucketKernels) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    numel = (1 << 20) + 3
    for dtype in DTYPES:
        check(codec, _random(numel, device).to(dtype), _random(numel, device, 1))


@pytest.mark.gpu
def test_64_million_elements_encode_as_on_the_cpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    grad_N = torch.randn(64 << 20, device=device)
    codec = _qsgd(4)
    payload = torch.empty(codec.num_bytes(grad_N.numel()), dtype=torch.uint8, device=device)
    codec.encode(grad_N, payload)
    expected = torch.empty(payload.numel(), dtype=torch.uint8)
    codec.encode(grad_N.cpu(), expected)
    assert_same(payload.cpu(), expected, "payload of 64 million elements")
    sum_N, expected_N = torch.ones_like(grad_N), torch.ones(grad_N.numel())
    codec.decode(payload, sum_N, add=True)
    codec.decode(expected, expected_N, add=True)
    assert_same(sum_N.cpu(), expected_N, "64 million decoded elements")


@pytest.mark.gpu
def test_kernels_run_on_the_current_stream_and_nothing_waits_for_the_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    codec = _qsgd(4)
    numel = 1 << 24
    expected_N = torch.randn(numel, device=device)
    payload, grad_N = (
        torch.empty(codec.num_bytes(numel), dtype=torch.uint8, device=device),
        torch.zeros_like(expected_N),
    )
    out_N, expected_out_N = torch.empty_like(grad_N), torch.empty_like(grad_N)
    codec.encode(expected_N, payload)  # also compiles
    codec.decode(payload, expected_out_N, add=False)
    torch.cuda.synchronize()

    side, begun, done = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    with no_waits(), torch.cuda.stream(side):
        # For half a second the gradient is still zeros. A kernel on another stream would encode the zeros.
        torch.cuda._sleep(1_000_000_000)
        begun.record()
        grad_N.copy_(expected_N)
        codec.encode(grad_N, payload)
        codec.decode(payload, out_N, add=False)
        done.record()
        assert not begun.query(), "encoding waited for the stream"
    done.synchronize()
    assert_same(out_N, expected_out_N, "decoded on a side stream")
