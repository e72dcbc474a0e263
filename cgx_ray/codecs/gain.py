"""The gain of a codec: the share of the gradient's energy |g|^2 that it keeps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from cgx_ray.codecs.codec import HOST, Codec
from cgx_ray.runtime_ext import reference, sparse

# Samples are made of whole blocks, since neighbours share the scale of a quantization bucket.
SAMPLE_BLOCK = 1024
SAMPLE_NUMEL = 1 << 16
# Larger than SAMPLE_NUMEL, since a histogram is cheap and 0.1 % of it must still be many elements.
CURVE_SAMPLE_NUMEL = 1 << 18
# Elements whose norm tells how sensitive a layer is. CGX says "the top values"; the authors' code takes 100.
NUM_TOP = 100


def sample_blocks(grad_N: Tensor, max_numel: int = SAMPLE_NUMEL, key: int = 0) -> Tensor:
    """Return about `max_numel` elements of `grad_N` in evenly spaced whole blocks; all elements if it has fewer.

    key  another one begins at another block
    """
    num_blocks = grad_N.numel() // SAMPLE_BLOCK
    stride = num_blocks * SAMPLE_BLOCK // max_numel
    if stride <= 1:
        return grad_N
    first = Random(key).randrange(stride) if key else 0
    return grad_N[: num_blocks * SAMPLE_BLOCK].view(num_blocks, SAMPLE_BLOCK)[first::stride].reshape(-1)


def norm_of_largest(values_N: Tensor, num: int) -> Tensor:
    """Return the l2 norm of the `num` elements with the largest magnitudes, all if there are fewer, on their device."""
    norm: Tensor = values_N.abs().topk(min(num, values_N.numel())).values.norm()
    return norm


class Ranges(NamedTuple):
    """Ranges of the quantization buckets of a gradient, as numbers on its device; see `squared_ranges`.

    squares   of the range of each whole bucket, their sum, float64
    rest      largest and smallest element of the last bucket, if that is not whole; else empty
    num_rest  elements of that bucket
    """

    squares: Tensor
    rest: tuple[Tensor, ...]
    num_rest: int

    @classmethod
    def of(cls, grad_N: Tensor, bucket_size: int) -> Ranges:
        num_whole = grad_N.numel() // bucket_size * bucket_size
        whole_BS, rest_S = grad_N[:num_whole].view(-1, bucket_size), grad_N[num_whole:]
        range_B = whole_BS.amax(1).double() - whole_BS.amin(1).double()
        rest = (rest_S.max(), rest_S.min()) if rest_S.numel() else ()
        return cls(range_B.square().sum(), rest, rest_S.numel())


def squared_ranges(squares: float, rest: Sequence[float], num_rest: int, bucket_size: int) -> float:
    """Return the sum over elements of (max - min)^2 of their quantization bucket. Arguments as in `Ranges`.

    The error of a grid from min to max is about proportional to it, whatever the number of bits.
    """
    total = bucket_size * squares
    if num_rest:
        largest, smallest = rest
        total += num_rest * (largest - smallest) ** 2
    return total


def squared_error(codec: Codec, grad_N: Tensor, key: int) -> float:
    """Return |g - decode(encode(g))|^2, in float64."""
    return float(lost_energy(codec, grad_N, key))


def lost_energy(codec: Codec, grad_N: Tensor, key: int) -> Tensor:
    """Return `squared_error` as a number on the gradient's device."""
    payload = torch.empty(codec.payload_bytes(grad_N.numel()), dtype=torch.uint8, device=grad_N.device)
    decoded_N = torch.empty_like(grad_N)
    codec.encode(grad_N, payload, key)
    codec.decode(payload, decoded_N, add=False, key=key)
    return (grad_N.double() - decoded_N).square().sum()


def kept_energy(codec: Codec, grad_N: Tensor, key: int) -> float:
    """Return |g|^2 minus `squared_error`, in float64.

    For top-k this is |g_c|^2, the numerator of the compression gain (Flexible Communication, section 2-C3), because
    the dropped part is orthogonal to the kept part. For unbiased codecs |g_c|^2 would exceed |g|^2, so the loss must
    be measured by the error.
    """
    return float(grad_N.double().square().sum()) - squared_error(codec, grad_N, key)


def histogram(grad_N: Tensor) -> Tensor:
    """Return the number of elements by magnitude, as `GainCurve` reads it, on the gradient's device."""
    # The histogram's bins are those of float32.
    return sparse.magnitude_histogram(grad_N.float() if grad_N.dtype == torch.float64 else grad_N)


class GainCurve:
    """Gain of top-k at every density, from one histogram of magnitudes (Flexible Communication, section 2-C3).

    The elements of a bin count as spread evenly over it. A bin is at most 1/16 of its magnitudes wide, so the error
    stays within 0.2 % on gradients with light and heavy tails.
    """

    def __init__(self, grad_N: Tensor) -> None:
        """`grad_N`: the error-fed gradient or a sample of it, of any float type and device."""
        self._use(histogram(grad_N).cpu().double())

    @classmethod
    def of_counts(cls, counts: Tensor) -> GainCurve:
        """Return the curve of a gradient with this `histogram`, float64 on the host."""
        curve = cls.__new__(cls)
        curve._use(counts)
        return curve

    def _use(self, counts: Tensor) -> None:
        # Bins are flipped to have the largest magnitudes first. Empty bins of NaN and Inf would give 0 * inf.
        energy = torch.where(counts > 0, counts * _bin_squares(), 0.0)
        self._numel = torch.cat((torch.zeros(1, dtype=torch.float64, device=HOST), counts.flip(0).cumsum(0)))
        self._energy = torch.cat((torch.zeros(1, dtype=torch.float64, device=HOST), energy.flip(0).cumsum(0)))

    def gain(self, densities: Sequence[float]) -> list[float]:
        """Return, for each density, the share of |g|^2 in the largest elements.

        Their number is rounded up, as top-k does. All shares are 1 if |g| is 0, and NaN if it is not finite.
        """
        total = float(self._energy[-1])
        if total == 0:
            return [1.0] * len(densities)
        kept_D = (torch.tensor(densities, dtype=torch.float64, device=HOST) * self._numel[-1]).ceil()
        # The first bin that reaches `kept_D` elements.
        last_D = torch.searchsorted(self._numel, kept_D).clamp(1, len(self._numel) - 1)
        first_D = last_D - 1
        share_D = (kept_D - self._numel[first_D]) / (self._numel[last_D] - self._numel[first_D])
        gain_D: list[float] = (torch.lerp(self._energy[first_D], self._energy[last_D], share_D) / total).tolist()
        return gain_D


@cache
def _bin_squares() -> Tensor:
    """Return (NUM_BINS,) float64, the mean square of magnitudes that are spread evenly over each bin."""
    edges = torch.arange(reference.NUM_BINS + 1, dtype=torch.int64, device=HOST) << reference.HISTOGRAM_SHIFT
    edges[-1] -= 1
    edge = edges.to(torch.int32).view(torch.float32).double()
    low, high = edge[:-1], edge[1:]
    squares = (low * low + low * high + high * high) / 3
    # The first bin holds zeros and denormals only.
    squares[0] = 0
    return squares
