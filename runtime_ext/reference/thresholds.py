"""Thresholds for `collect`, as magnitudes: the bits of a float32 without its sign."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import torch
from torch import Tensor

from .bits import INF_MAGNITUDE, magnitudes

HISTOGRAM_SHIFT = 19  # the bin of a magnitude is its high 12 bits: the exponent and 4 more
NUM_BINS = 1 << 12


def magnitude_histogram(grad_N: Tensor) -> Tensor:
    """Return (NUM_BINS,) int64: how many elements of `grad_N`, float32, have a magnitude with these 12 high bits."""
    return torch.bincount(magnitudes(grad_N) >> HISTOGRAM_SHIFT, minlength=NUM_BINS)


def bisect_thresholds(grad_N: Tensor, num_kept: int, num_rounds: int) -> tuple[int, int]:
    """Return (sure, maybe): at most `num_kept` magnitudes reach `sure`; more reach `maybe`, unless it is 0.

    MSTopk (Shi et al. 2021, Algorithm 1). Departure: the bisected range is that of all bit patterns, 2^31; the paper's
    goes from the mean to the largest magnitude. So there is no rounding, and NaN and Inf are ordered too.
    """
    magnitude_N = magnitudes(grad_N)
    sure, maybe = 1 << 31, 0
    for _ in range(num_rounds):
        middle = (sure + maybe) // 2
        if int((magnitude_N >= middle).sum()) <= num_kept:
            sure = middle
        else:
            maybe = middle
    return sure, maybe


def sidco_threshold(histogram: Tensor, ratios: Sequence[float], num_kept: int) -> int:
    """Return the magnitude that an estimated share prod(exp(-ratio)) of the elements reaches. Zeros never reach it.

    SIDCo (Abdelmoniem et al. 2021, Algorithm 1, exponential fit). Per stage: eta += mean excess over eta * ratio, where
    ratio is ln(1 / share of the stage). Departures:

    - Means come from the histogram, where each element counts as the middle of its bin. They are made in float64 in the
      order of the bins, so every implementation gets the same bits.
    - Inf and NaN are left out of the fit.
    - The paper adapts the number of stages. Here a bad fit is replaced: if the bins above the threshold's bin hold less
      than half of `num_kept` elements or more than twice as many, the threshold is the lower edge of the bin that holds
      the `num_kept`-th largest element.
    """
    eta = _fit_exponentials(histogram, ratios)
    # Above the largest float32 there are only Inf and NaN.
    bits = int(torch.tensor([eta], dtype=torch.float64, device="cpu").to(torch.float32).view(torch.int32))
    num_above = int(histogram[(bits >> HISTOGRAM_SHIFT) + 1 :].sum())
    if 2 * num_above < num_kept or num_above > 2 * num_kept:
        num_reaching = histogram.flip(0).cumsum(0).tolist()
        bits = NUM_BINS - 1 - bisect.bisect_left(num_reaching, num_kept) << HISTOGRAM_SHIFT
    return max(bits, 1)


def _fit_exponentials(histogram: Tensor, ratios: Sequence[float]) -> float:
    num_finite = INF_MAGNITUDE >> HISTOGRAM_SHIFT
    bins = torch.arange(num_finite, dtype=torch.int32, device="cpu")
    middle_bits = (bins << HISTOGRAM_SHIFT) + (1 << HISTOGRAM_SHIFT - 1)
    middles = middle_bits.view(torch.float32).double().tolist()
    counts = histogram[:num_finite].tolist()
    eta = 0.0
    for ratio in ratios:
        total, excess = 0, 0.0
        for count, middle in zip(counts, middles, strict=True):
            if middle > eta:
                total += count
                excess = excess + count * (middle - eta)
        if total == 0:
            break
        eta = eta + excess / total * ratio
    return eta
