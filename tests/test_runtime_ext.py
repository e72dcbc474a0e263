"""The kernels: native against the reference bit for bit, and what the formats promise."""

from __future__ import annotations

import math
import struct
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cgx_ray.plan import CodecSpec
from cgx_ray.runtime_ext import ops, reference

BITS = range(1, 9)
BUCKET_SIZES = (8, 64, 128, 1024)
SIZES = (0, 1, 7, 127, 128, 129, (1 << 16) + 3)
KEY = ops.message_key(1, 2, 3, 4, 5)


def _bits(x: Tensor) -> Tensor:
    """Integers that are equal only for the same float, with every NaN alike."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def _assert_same_floats(actual: Tensor, expected: Tensor) -> None:
    different = (_bits(actual) != _bits(expected)).nonzero().view(-1)
    first = different[:5]
    assert not different.numel(), f"at {first.tolist()}: {actual[first].tolist()} != {expected[first].tolist()}"


def _encode(grad_N: Tensor, bits: int, bucket_size: int, key: int = KEY, stochastic: bool = True) -> Tensor:
    spec = CodecSpec(name="qsgd", bits=bits, bucket_size=bucket_size)
    out = torch.full((spec.payload_bytes(grad_N.numel()),), 0xA5, dtype=torch.uint8)
    ops.qsgd_encode(grad_N, out, bits=bits, bucket_size=bucket_size, key=key, stochastic=stochastic)
    return out


def _decode(payload: Tensor, numel: int, bits: int, bucket_size: int) -> Tensor:
    out_N = torch.full((numel,), 7.0)
    ops.qsgd_decode(payload, out_N, bits=bits, bucket_size=bucket_size)
    return out_N


def _check_against_reference(grad_N: Tensor, bits: int, bucket_size: int, stochastic: bool = True) -> None:
    payload = _encode(grad_N, bits, bucket_size, stochastic=stochastic)
    expected = torch.full_like(payload, 0x5A)
    reference.qsgd_encode(grad_N.to(torch.float32).contiguous(), expected, bits, bucket_size, KEY, stochastic)
    different = (payload != expected).nonzero().view(-1)
    assert not different.numel(), f"{different.numel()} of {payload.numel()} bytes differ, first at {different[0]}"

    numel = grad_N.numel()
    expected_N = torch.empty(numel)
    reference.qsgd_decode(payload, expected_N, bits, bucket_size, False)
    _assert_same_floats(_decode(payload, numel, bits, bucket_size), expected_N)
    start_N = torch.randn(numel)
    sum_N, expected_sum_N = start_N.clone(), start_N.clone()
    ops.qsgd_decode(payload, sum_N, bits=bits, bucket_size=bucket_size, add=True)
    reference.qsgd_decode(payload, expected_sum_N, bits, bucket_size, True)
    _assert_same_floats(sum_N, expected_sum_N)
    _assert_same_floats(sum_N, start_N + expected_N)


SPECIAL = {
    "denormal": lambda grad_N: grad_N * 1e-40,
    "denormal scale": lambda grad_N: 1e-3 + grad_N * 1e-38,
    "all equal": lambda grad_N: torch.full_like(grad_N, -0.1),
    "zeros of both signs": lambda grad_N: torch.where(grad_N < 0, -0.0, 0.0),
    "huge": lambda grad_N: grad_N * 1e38,
    "any bits": lambda grad_N: torch.randint(-(1 << 31), 1 << 31, grad_N.shape).int().view(torch.float32),
    "nan": lambda grad_N: _put(grad_N, math.nan),
    "negative nan": lambda grad_N: _put(grad_N, -math.nan),
    "inf": lambda grad_N: _put(grad_N, math.inf),
    "negative inf": lambda grad_N: _put(grad_N, -math.inf),
}


def _put(grad_N: Tensor, value: float) -> Tensor:
    grad_N[[3, 200, 201, 999]] = value
    return grad_N


def _special(kind: str) -> Tensor:
    return SPECIAL[kind](torch.randn(1000))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("bucket_size", BUCKET_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_native_qsgd_equals_the_reference_bit_for_bit(bits: int, bucket_size: int, numel: int) -> None:
    _check_against_reference(torch.randn(numel) * 1e-3, bits, bucket_size)


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("bits", BITS)
def test_native_qsgd_equals_the_reference_on_special_numbers(bits: int, kind: str, stochastic: bool) -> None:
    _check_against_reference(_special(kind), bits, 128, stochastic)
    _check_against_reference(_special(kind), bits, 8, stochastic)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_native_qsgd_equals_the_reference_on_half_precision(dtype: torch.dtype) -> None:
    _check_against_reference(torch.randn(1000).to(dtype), 4, 128)


def test_native_qsgd_equals_the_reference_on_strided_and_unaligned_gradients() -> None:
    _check_against_reference(torch.randn(2000)[::2], 4, 128)
    _check_against_reference(torch.randn(1001)[1:], 4, 128)


@pytest.mark.parametrize("bits", BITS)
def test_qsgd_reads_and_writes_payloads_at_odd_addresses(bits: int) -> None:
    grad_N = torch.randn(1001)
    expected = _encode(grad_N, bits, 128)
    buffer = torch.zeros(expected.numel() + 2, dtype=torch.uint8)
    ops.qsgd_encode(grad_N, buffer[1:-1], bits=bits, bucket_size=128, key=KEY)
    assert torch.equal(buffer[1:-1], expected)
    assert buffer[0] == 0
    assert buffer[-1] == 0, "wrote past the end"
    out_N = torch.zeros(1003)
    ops.qsgd_decode(buffer[1:-1], out_N[1:-1], bits=bits, bucket_size=128)
    _assert_same_floats(out_N[1:-1], _decode(expected, 1001, bits, 128))
    assert out_N[0] == 0
    assert out_N[-1] == 0, "wrote past the end"


def test_strided_outputs_get_what_contiguous_ones_get() -> None:
    grad_N = torch.randn(1001)
    payload = _encode(grad_N, 3, 64)
    strided = torch.zeros(2 * payload.numel(), dtype=torch.uint8)[::2]
    ops.qsgd_encode(grad_N, strided, bits=3, bucket_size=64, key=KEY)
    assert torch.equal(strided, payload)
    out_N = torch.zeros(2002)[::2]
    ops.qsgd_decode(strided, out_N, bits=3, bucket_size=64)
    _assert_same_floats(out_N.contiguous(), _decode(payload, 1001, 3, 64))


@settings(max_examples=200, deadline=None)
@given(
    numel=st.integers(0, 700),
    bits=st.integers(1, 8),
    bucket_size=st.integers(1, 40).map(lambda n: 8 * n),
    exponent=st.integers(-45, 38),
    offset=st.sampled_from([0.0, 1.0, -3.7, 1e30]),
    stochastic=st.booleans(),
    seed=st.integers(0, 1 << 32),
)
def test_native_qsgd_equals_the_reference_at_any_shape_and_magnitude(
    *, numel: int, bits: int, bucket_size: int, exponent: int, offset: float, stochastic: bool, seed: int
) -> None:
    grad_N = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    grad_N = grad_N * 10.0**exponent + offset
    _check_against_reference(grad_N, bits, bucket_size, stochastic)


@pytest.mark.parametrize("bits", BITS)
def test_qsgd_layout_is_grids_then_levels_at_bit_i_times_bits(bits: int) -> None:
    numel = 21
    payload = _encode(torch.randn(numel), bits, 8, stochastic=False)
    number = int.from_bytes(bytes(payload[12:].tolist()), "little")
    levels = [number >> i * bits & (1 << bits) - 1 for i in range(numel)]
    assert number >> numel * bits == 0, "unused bits are not zero"
    grids = torch.tensor([struct.unpack("<HH", bytes(payload[i : i + 4].tolist())) for i in (0, 4, 8)])
    lo_B, scale_B = (grids << 16).to(torch.int32).view(torch.float32).unbind(1)
    bucket_N = torch.arange(numel) // 8
    _assert_same_floats(_decode(payload, numel, bits, 8), lo_B[bucket_N] + torch.tensor(levels) * scale_B[bucket_N])


def _scales(payload: Tensor, numel: int, bucket_size: int) -> Tensor:
    """(N,) scale of each element's bucket."""
    grid_B2 = payload[: 4 * -(-numel // bucket_size)].clone().view(torch.bfloat16).view(-1, 2).float()
    return grid_B2[:, 1].repeat_interleave(bucket_size)[:numel]


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("bits", BITS)
def test_qsgd_error_is_at_most_one_scale_and_half_a_scale_when_nearest(bits: int, stochastic: bool) -> None:
    grad_N = torch.randn(10_000)
    payload = _encode(grad_N, bits, 128, stochastic=stochastic)
    error_N = (_decode(payload, grad_N.numel(), bits, 128) - grad_N).abs()
    # Five float32 roundings (subtract, scale, divide, add, decode) of numbers up to 2^bits scales.
    limit_N = _scales(payload, grad_N.numel(), 128) * ((1.0 if stochastic else 0.5) + 5 * 2.0 ** (bits - 24))
    worst = (error_N / limit_N).max().item()
    assert worst <= 1, f"error is {worst} of the limit"


@pytest.mark.parametrize("bits", BITS)
def test_stochastic_rounding_is_unbiased(bits: int) -> None:
    grad_N = torch.randn(1024)
    num_trials = 2000
    sum_N = torch.zeros(1024, dtype=torch.float64)
    for trial in range(num_trials):
        payload = _encode(grad_N, bits, 128, key=ops.message_key(0, trial, 0, 0, 0))
        sum_N += _decode(payload, 1024, bits, 128)
    scale_N = _scales(payload, 1024, 128).double()
    error_N = (sum_N / num_trials - grad_N) / scale_N
    # One rounding has variance f (1 - f) <= 1/4 scales^2. Six sigma for the worst of 1,024 elements, five for
    # their mean; 16-bit random numbers and float32 add less than 2^-15.
    sigma = 0.5 / math.sqrt(num_trials)
    worst, mean = error_N.abs().max().item(), error_N.mean().item()
    assert worst < 6 * sigma + 2**-15, f"worst bias {worst} scales, sigma {sigma}"
    assert abs(mean) < 5 * sigma / 32 + 2**-15, f"mean bias {mean} scales"


def test_random_numbers_are_uniform_and_neighbours_and_neighbouring_keys_are_uncorrelated() -> None:
    numel = 1 << 18
    u_KN = torch.stack([reference.uniform(numel, key, torch.device("cpu")) for key in (*range(8), KEY)]).double()
    assert u_KN.min() >= 0
    assert u_KN.max() < 1
    limit = 6 / math.sqrt(numel)  # six sigma of a sample correlation, which has sigma 1 / sqrt(N)
    # Uniform has variance 1/12, its square 4/45.
    assert ((u_KN.mean(1) - 0.5).abs() < limit / math.sqrt(12) + 2**-17).all(), u_KN.mean(1)
    assert (((u_KN**2).mean(1) - 1 / 3).abs() < limit * math.sqrt(4 / 45) + 2**-16).all()
    centered_KN = (u_KN - 0.5) * math.sqrt(12)
    for lag in (0, 1, 2, 3, 4, 8, 64, 128, 129, 1024):
        correlation_KK = centered_KN[:, lag:] @ centered_KN[:, : numel - lag].T / (numel - lag)
        if lag == 0:
            correlation_KK.fill_diagonal_(0)
        worst = correlation_KK.abs().max().item()
        assert worst < limit * 1.01, f"lag {lag}: correlation {worst}, limit {limit}"


def test_message_keys_of_neighbouring_messages_all_differ() -> None:
    numbers = range(6)
    keys = [
        ops.message_key(seed, step, group, rank, phase)
        for seed in numbers
        for step in numbers
        for group in numbers
        for rank in numbers
        for phase in (0, 1)
    ]
    # 2,592 keys of 32 bits collide once in 1,300 draws; this draw is fixed.
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 1 << 32 for key in keys)
    ones = [sum(key >> bit & 1 for key in keys) / len(keys) for bit in range(32)]
    assert max(abs(share - 0.5) for share in ones) < 5 * 0.5 / math.sqrt(len(keys)), ones


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", BITS)
def test_buckets_with_a_non_finite_element_arrive_non_finite_and_only_those(bits: int, value: float) -> None:
    grad_N = torch.randn(1000)
    grad_N[[130, 999]] = value
    bad_N = torch.isin(torch.arange(1000) // 128, torch.tensor([1, 7]))
    decoded_N = _decode(_encode(grad_N, bits, 128), 1000, bits, 128)
    assert torch.equal(decoded_N.isnan(), bad_N)
    assert decoded_N[~bad_N].isfinite().all()


def test_all_equal_and_bf16_exact_buckets_arrive_exactly() -> None:
    grad_N = torch.full((300,), -0.5)
    _assert_same_floats(_decode(_encode(grad_N, 4, 128), 300, 4, 128), grad_N)


def _brute_force_topk(grad_N: Tensor, num_kept: int) -> list[int]:
    def order(index: int) -> tuple[bool, float, int]:
        x = grad_N[index].item()
        return (not math.isnan(x), 0.0 if math.isnan(x) else -abs(x), index)

    return sorted(sorted(range(grad_N.numel()), key=order)[:num_kept])


def _topk(grad_N: Tensor, num_kept: int) -> tuple[Tensor, Tensor]:
    index_K = torch.full((num_kept,), -1, dtype=torch.int32)
    value_K = torch.full((num_kept,), 7.0)
    ops.topk_select(grad_N, index_K, value_K)
    return index_K, value_K


def _check_topk(grad_N: Tensor, num_kept: int) -> None:
    index_K, value_K = _topk(grad_N, num_kept)
    assert index_K.tolist() == _brute_force_topk(grad_N, num_kept)
    _assert_same_floats(value_K, grad_N.float()[index_K.long()])
    expected_index_K, expected_value_K = torch.empty_like(index_K), torch.empty_like(value_K)
    reference.topk_select(grad_N.float().contiguous(), expected_index_K, expected_value_K)
    assert torch.equal(index_K, expected_index_K)
    assert torch.equal(value_K.view(torch.int32), expected_value_K.view(torch.int32))


@pytest.mark.parametrize("share", [0, 0.001, 0.01, 0.5, 1])
@pytest.mark.parametrize("numel", [1, 7, 127, 128, 129, 5003])
def test_topk_equals_a_brute_force_sort(numel: int, share: float) -> None:
    _check_topk(torch.randn(numel), math.ceil(numel * share))


@pytest.mark.parametrize("kind", SPECIAL)
def test_topk_equals_a_brute_force_sort_on_special_numbers(kind: str) -> None:
    for num_kept in (1, 3, 4, 5, 100, 999, 1000):
        _check_topk(_special(kind), num_kept)


@settings(max_examples=200, deadline=None)
@given(
    levels=st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.0000001, 1e-45, math.inf, -math.inf, math.nan])),
    share=st.floats(0, 1),
)
def test_topk_gives_ties_to_the_lowest_index(levels: list[float], share: float) -> None:
    _check_topk(torch.tensor(levels), math.floor(share * len(levels)))


def test_topk_takes_strided_unaligned_and_half_precision_gradients() -> None:
    _check_topk(torch.randn(1000)[::2], 50)
    _check_topk(torch.randn(501)[1:], 50)
    _check_topk(torch.randn(500).bfloat16(), 50)
    _check_topk(torch.randn(500).half(), 50)


@pytest.mark.parametrize("num_kept", [1, 100, 1000, 4000])
def test_topk_is_exact_where_a_regular_sample_misleads(num_kept: int) -> None:
    grad_N = torch.randn(1 << 15) * 1e-6
    large_N = grad_N.clone()
    large_N.view(-1, 32)[::32] = 1.0
    small_N = torch.ones(1 << 15)
    small_N.view(-1, 32)[::32] = 0.0
    for each_N in (large_N, small_N):
        _check_topk(each_N, num_kept)


def test_topk_of_an_empty_gradient_is_empty() -> None:
    assert _topk(torch.empty(0), 0)[0].tolist() == []


def _bytes(data: bytes) -> Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        # RFC 3720, B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_crc32c_gives_the_published_check_values(data: bytes, crc: int) -> None:
    assert ops.crc32c(_bytes(data)) == crc
    assert reference.crc32c(_bytes(data), 0) == crc


@pytest.mark.parametrize("size", [1, 7, 8, 9, 12_287, 12_288, 12_289, 24_583])
def test_native_crc32c_equals_the_reference_at_every_block_edge_and_at_odd_addresses(size: int) -> None:
    data = torch.randint(0, 256, (size + 1,), dtype=torch.uint8)
    assert ops.crc32c(data[1:], seed=99) == reference.crc32c(data[1:], 99)


def test_crc32c_of_the_parts_in_turn_is_that_of_the_whole() -> None:
    data = torch.randint(0, 256, (40_000,), dtype=torch.uint8)
    for cut in (0, 1, 12_288, 25_001, 40_000):
        assert ops.crc32c(data[cut:], seed=ops.crc32c(data[:cut])) == ops.crc32c(data)


def test_crc32c_notices_a_single_flipped_bit_and_reads_strided_tensors() -> None:
    data = torch.randint(0, 256, (10_000,), dtype=torch.uint8)
    flipped = data.clone()
    flipped[7777] ^= 4
    assert ops.crc32c(flipped) != ops.crc32c(data)
    assert ops.crc32c(data[::2]) == ops.crc32c(data[::2].contiguous())


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_payload_size_is_what_codec_spec_says_and_any_other_is_refused(bits: int, numel: int) -> None:
    size = CodecSpec(name="qsgd", bits=bits, bucket_size=128).payload_bytes(numel)
    for wrong in (size + 1, size - 1)[: 2 if size else 1]:
        payload = torch.empty(wrong, dtype=torch.uint8)
        with pytest.raises(ValueError, match=rf"has {wrong} bytes.* take {size} bytes"):
            ops.qsgd_encode(torch.randn(numel), payload, bits=bits, bucket_size=128, key=0)
        with pytest.raises(ValueError, match=rf"has {wrong} bytes.* take {size} bytes"):
            ops.qsgd_decode(payload, torch.empty(numel), bits=bits, bucket_size=128)


def test_wrong_arguments_are_refused_by_name() -> None:
    grad_N, out = torch.randn(128), torch.empty(68, dtype=torch.uint8)
    with pytest.raises(ValueError, match="bits 9 is not allowed; give 1 to 8"):
        ops.qsgd_encode(grad_N, out, bits=9, bucket_size=128, key=0)
    with pytest.raises(ValueError, match="bucket_size 12 is not allowed"):
        ops.qsgd_encode(grad_N, out, bits=4, bucket_size=12, key=0)
    with pytest.raises(ValueError, match="key -1 is not a 32-bit number"):
        ops.qsgd_encode(grad_N, out, bits=4, bucket_size=128, key=-1)
    with pytest.raises(TypeError, match=r"grad_N is torch\.float64"):
        ops.qsgd_encode(grad_N.double(), out, bits=4, bucket_size=128, key=0)
    with pytest.raises(TypeError, match=r"out is torch\.int8"):
        ops.qsgd_encode(grad_N, out.view(torch.int8), bits=4, bucket_size=128, key=0)
    with pytest.raises(ValueError, match="1-D"):
        ops.qsgd_encode(grad_N.view(2, 64), out, bits=4, bucket_size=128, key=0)
    with pytest.raises(TypeError, match=r"out_N is torch\.float16"):
        ops.qsgd_decode(out, grad_N.half(), bits=4, bucket_size=128)
    with pytest.raises(ValueError, match="cannot keep 129 of 128"):
        ops.topk_select(grad_N, torch.empty(129, dtype=torch.int32), torch.empty(129))
    with pytest.raises(ValueError, match="index_K has 3 elements, value_K 4"):
        ops.topk_select(grad_N, torch.empty(3, dtype=torch.int32), torch.empty(4))
    with pytest.raises(TypeError, match=r"index_K is torch\.int64"):
        ops.topk_select(grad_N, torch.empty(3, dtype=torch.int64), torch.empty(3))
    with pytest.raises(TypeError, match=r"data is torch\.float32"):
        ops.crc32c(grad_N)


def test_a_missing_native_module_is_one_error_that_says_how_to_build_it() -> None:
    code = "import sys; sys.modules['cgx_ray.runtime_ext._native'] = None; import cgx_ray.runtime_ext.ops"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "_native is missing or does not load; build it: pip install -e ." in done.stderr
