"""Codecs that send every element: their formats, and bounds on the error of the decoded gradient."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

import pytest
import torch
from support.bucket_codecs import (
    QSGD,
    SIGN,
    BucketKernels,
    QsgdKernels,
    SignKernels,
    decode,
    encode,
    name,
    roundings,
    sent,
)
from support.same_bits import assert_same
from torch import Tensor

from cgx_ray.runtime_ext import ops

AROUND_ZERO = [codec for codec in QSGD if codec.grid != "max_min"]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _levels(codec: QsgdKernels, payload: Tensor, numel: int) -> tuple[Tensor, Tensor, int]:
    """Parse (levels, the numbers of each grid as float32, the unused bits) without the kernels."""
    num_buckets = -(-numel // codec.bucket_size)
    num_words = num_buckets * (2 if codec.grid == "max_min" else 1)
    words = torch.tensor(struct.unpack(f"<{num_words}H", bytes(payload[: 2 * num_words].tolist())))
    number = int.from_bytes(bytes(payload[2 * num_words :].tolist()), "little")
    levels = [number >> i * codec.bits & (1 << codec.bits) - 1 for i in range(numel)]
    floats = (words << 16).to(torch.int32).view(torch.float32).view(num_buckets, -1)
    return torch.tensor(levels), floats, number >> numel * codec.bits


@pytest.mark.parametrize("codec", QSGD, ids=name)
def test_qsgd_layout_is_grids_then_levels_at_bit_i_times_bits(codec: QsgdKernels) -> None:
    numel = 21
    codec = replace(codec, bucket_size=8, stochastic=False)
    payload = encode(codec, torch.randn(numel))
    levels, words, unused = _levels(codec, payload, numel)
    assert unused == 0, "unused bits are not zero"
    half = (1 << codec.bits - 1) - 1
    scale_B = words[:, -1]
    lo_B = words[:, 0] if codec.grid == "max_min" else -half * scale_B
    assert levels.max() <= (2 * half + 1 if codec.grid == "max_min" else 2 * half)
    bucket_N = torch.arange(numel) // 8
    assert_same(decode(codec, payload, numel), lo_B[bucket_N] + levels * scale_B[bucket_N])


def _scales(codec: QsgdKernels, payload: Tensor, numel: int) -> Tensor:
    """Return (N,): the scale of each element's quantization bucket."""
    _, words, _ = _levels(codec, payload, numel)
    return words[:, -1].repeat_interleave(codec.bucket_size)[:numel]


@pytest.mark.parametrize("stochastic", [True, False])
@pytest.mark.parametrize("codec", QSGD, ids=name)
def test_qsgd_error_is_at_most_one_scale_and_half_a_scale_when_nearest(codec: QsgdKernels, stochastic: bool) -> None:
    grad_N = torch.randn(4001)
    codec = replace(codec, stochastic=stochastic)
    payload = encode(codec, grad_N)
    error_N = (decode(codec, payload, 4001) - grad_N).abs()
    # Five float32 roundings (subtract, invert the scale, multiply, add, decode) of numbers up to 2^bits scales.
    limit_N = _scales(codec, payload, 4001) * ((1.0 if stochastic else 0.5) + 5 * 2.0 ** (codec.bits - 24))
    worst = (error_N / limit_N).max().item()
    assert worst <= 1, f"error is {worst} of the limit"


@pytest.mark.parametrize("exponent", [-120, -60, 0, 60, 120])
@pytest.mark.parametrize("codec", AROUND_ZERO, ids=name)
def test_the_scale_around_zero_is_the_norm_over_half_the_levels_rounded_up(codec: QsgdKernels, exponent: int) -> None:
    grad_N = torch.randn(1000) * 2.0**exponent
    scale_B = _scales(codec, encode(codec, grad_N), 1000)[::128].double()
    norm_B = torch.stack([x.double().norm(2 if codec.grid == "l2" else math.inf) for x in grad_N.split(128)])
    ratio_B = scale_B * ((1 << codec.bits - 1) - 1) / norm_B
    # Rounding up to bfloat16 adds up to 2^-7. Summing 4 elements per lane, then 32 lanes in 5 steps, a root and a
    # division make 10 float32 roundings.
    assert ratio_B.min() >= 1 - 10 * 2.0**-24, ratio_B
    assert ratio_B.max() <= 1 + 2.0**-7 + 10 * 2.0**-24, ratio_B


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_l2_sends_a_squared_error_of_at_most_the_paper_s_bound(bits: int) -> None:
    grad_N = torch.randn(128 * 64)
    errors = [sent(QsgdKernels("l2", bits, key=key), grad_N) - grad_N for key in range(50)]
    error_B = torch.stack(errors).double().square().mean(0).view(-1, 128).sum(1)
    levels = (1 << bits - 1) - 1
    # Alistarh et al. 2017, Lemma 3.1: min(n / s^2, sqrt(n) / s) |g|^2, here with a scale up to 2^-7 larger.
    limit = min(128 / levels**2, math.sqrt(128) / levels) * (1 + 2**-7) ** 2
    share = (error_B.sum() / grad_N.double().square().sum()).item()
    assert share <= limit, f"squared error is {share} of the gradient's, limit {limit}"


@pytest.mark.parametrize("codec", AROUND_ZERO, ids=name)
def test_zero_stays_exactly_zero_on_grids_around_zero(codec: QsgdKernels) -> None:
    grad_N = torch.randn(1000)
    zero_N = torch.arange(1000) % 3 == 0
    grad_N[zero_N] = 0.0
    for each in roundings(codec):
        sent_N = sent(each, grad_N)
        assert (sent_N[zero_N].view(torch.int32) == 0).all(), sent_N[zero_N].unique()
        # Rounded to nearest at 2 bits, all elements become zero if none reaches half of the l2 norm.
        assert sent_N.any() or not each.stochastic


@pytest.mark.parametrize("codec", QSGD, ids=name)
def test_stochastic_rounding_is_unbiased(codec: QsgdKernels) -> None:
    grad_N = torch.randn(1024)
    num_trials = 2000
    sum_N = torch.zeros(1024, dtype=torch.float64)
    for trial in range(num_trials):
        sum_N += sent(replace(codec, key=ops.message_key(0, trial, 0, 0, 0)), grad_N)
    scale_N = _scales(codec, encode(codec, grad_N), 1024).double()
    error_N = (sum_N / num_trials - grad_N) / scale_N
    # Rounding has variance f (1 - f) <= 1/4 scales^2. Six sigma for the worst of 1,024 elements, five for their
    # mean. The 16-bit random numbers and float32 add less than 2^-15.
    sigma = 0.5 / math.sqrt(num_trials)
    worst, mean = error_N.abs().max().item(), error_N.mean().item()
    assert worst < 6 * sigma + 2**-15, f"worst bias {worst} scales, sigma {sigma}"
    assert abs(mean) < 5 * sigma / 32 + 2**-15, f"mean bias {mean} scales"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", QSGD, ids=name)
def test_qsgd_buckets_with_a_non_finite_element_arrive_nan_and_only_those(codec: QsgdKernels, value: float) -> None:
    grad_N = torch.randn(1000)
    grad_N[[130, 999]] = value
    bad_N = torch.isin(torch.arange(1000) // 128, torch.tensor([1, 7]))
    sent_N = sent(codec, grad_N)
    assert torch.equal(sent_N.isnan(), bad_N)
    assert sent_N[~bad_N].isfinite().all()


@pytest.mark.parametrize("codec", QSGD, ids=name)
def test_qsgd_decodes_nothing_to_inf_however_large_the_gradient(codec: QsgdKernels) -> None:
    largest = torch.finfo(torch.float32).max
    for share in (0.1, 0.4, 0.5, 0.9, 1.0):
        sent_N = sent(codec, torch.randn(128).sign() * largest * share)
        assert sent_N.isnan().all() or sent_N.isfinite().all(), f"{share}: {sent_N.unique()}"


def test_all_equal_and_bf16_exact_buckets_arrive_exactly() -> None:
    grad_N = torch.full((300,), -0.5)
    assert_same(sent(QsgdKernels("max_min", 4), grad_N), grad_N)


def _means(codec: SignKernels, payload: Tensor, numel: int) -> Tensor:
    """Parse (B, 1 or 2) float32 without the kernels."""
    num_means = -(-numel // codec.bucket_size) * (2 if codec.kind == "onebit" else 1)
    means = struct.unpack(f"<{num_means}f", bytes(payload[: 4 * num_means].tolist()))
    return torch.tensor(means).view(-1, 2 if codec.kind == "onebit" else 1)


@pytest.mark.parametrize("bucket_size", [8, 128, 1000, 65_536])
@pytest.mark.parametrize("codec", SIGN, ids=name)
def test_sign_means_are_those_in_float64(codec: SignKernels, bucket_size: int) -> None:
    codec = replace(codec, bucket_size=bucket_size)
    grad_N = torch.randn(70_000) + 0.3
    mean_BW = _means(codec, encode(codec, grad_N), 70_000)
    for x, mean_W in zip(grad_N.double().split(bucket_size), mean_BW.double(), strict=True):
        sides = [x.abs()] if codec.kind == "ef_signsgd" else [x[x < 0], x[x >= 0]]
        expected_W = torch.stack([side.mean() if side.numel() else torch.tensor(0.0).double() for side in sides])
        # All terms have one sign, so rounding errors are relative: each lane adds every 32nd element, then come 5
        # steps over the lanes and the division.
        limit = (-(-x.numel() // 32) + 6) * 2.0**-24
        error = ((mean_W - expected_W).abs() / expected_W.abs().clamp(min=1e-30)).max().item()
        assert error <= limit, f"mean is off by {error}, limit {limit}"


@pytest.mark.parametrize("codec", SIGN, ids=name)
def test_sign_sends_the_mean_of_each_element_s_sign_and_keeps_the_rest(codec: SignKernels) -> None:
    grad_N, residual_N, next_N = torch.randn(1001), torch.randn(1001), torch.empty(1001)
    payload = torch.empty(codec.num_bytes(1001), dtype=torch.uint8)
    codec.encode(grad_N, payload, residual_N=residual_N, next_N=next_N)
    fed_N = grad_N + residual_N
    mean_BW = _means(codec, payload, 1001)
    low_B, high_B = (mean_BW[:, 0], mean_BW[:, 1]) if codec.kind == "onebit" else (-mean_BW[:, 0], mean_BW[:, 0])
    bucket_N = torch.arange(1001) // 128
    sent_N = torch.where(fed_N.signbit(), low_B[bucket_N], high_B[bucket_N])
    assert_same(decode(codec, payload, 1001), sent_N)
    assert_same(next_N, fed_N - sent_N)


@pytest.mark.parametrize("codec", [*SIGN, *QSGD], ids=name)
def test_what_is_sent_and_what_is_owed_add_up_to_the_error_fed_gradient(codec: BucketKernels) -> None:
    grad_N, residual_N, next_N = torch.randn(1001), torch.randn(1001), torch.empty(1001)
    payload = torch.empty(codec.num_bytes(1001), dtype=torch.uint8)
    codec.encode(grad_N, payload, residual_N=residual_N, next_N=next_N)
    sent_N = decode(codec, payload, 1001)
    error_N = (sent_N.double() + next_N.double() - (grad_N + residual_N).double()).abs()
    # One float32 subtraction.
    assert (error_N <= next_N.double().abs() * 2.0**-24).all(), error_N.max().item()


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", SIGN, ids=name)
def test_sign_sends_non_finite_elements_as_non_finite_ones(codec: SignKernels, value: float) -> None:
    grad_N = torch.randn(1000)
    grad_N[[130, 999]] = value
    sent_N = sent(codec, grad_N)
    assert not sent_N[[130, 999]].isfinite().any(), sent_N[[130, 999]]
    clean_N = ~torch.isin(torch.arange(1000) // 128, torch.tensor([1, 7]))
    assert sent_N[clean_N].isfinite().all()
