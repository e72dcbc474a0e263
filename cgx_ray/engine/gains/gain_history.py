"""Samples of the last measured gradients of this rank: the gains that error feedback would settle at, and sums."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from cgx_ray.codecs.codec import Codec
from cgx_ray.codecs.gain import NUM_TOP, norm_of_largest, sample_blocks
from cgx_ray.codecs.shadow import settled_artopk_gains, settled_gain, settles
from cgx_ray.plan import DEFAULT_GROUP_BYTES, CodecSpec, Layer, options_of

# Measured gradients that are kept. From eight on, predictions change by no more than their noise.
NUM_GRADIENTS = 8
# Elements of the model's sample: 0.5 MiB for eight gradients, and some 10 ms per density on one core.
HISTORY_NUMEL = 1 << 14
# Small blocks, so that each layer has many of them.
HISTORY_BLOCK = 64
# Top-k works by group, and groups change with the plan. Gains are predicted for pools: consecutive layers, as large as
# default groups, but few, since each pool costs time.
MAX_POOLS = 4

# Elements of a layer that are summed: 40 MB for 300 large layers.
SUM_NUMEL = 1 << 15
# Share of a sum that stays when the next gradient is added. CGX sums the steps between two choices of bits; ranks here
# do not know when these are made, and measure few steps.
KEPT_OF_SUM = 0.8


class GradientHistory:
    """The same sample of elements of the last NUM_GRADIENTS measured gradients, in pools of layers.

    Gradients are scaled to norm 1, since gains do not depend on the norm, and loss scales change it.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        large = [layer for layer in layers if not layer.is_small]
        self._pools = _pools(large)
        self._stride = max(1, sum(layer.numel for layer in large) // HISTORY_NUMEL)
        self._sums: dict[str, Tensor] = {}
        # By gradient and pool.
        self._gradients: deque[list[Tensor]] = deque(maxlen=NUM_GRADIENTS)

    def sample(self, layers: Mapping[str, Tensor]) -> tuple[Tensor, list[int]]:
        """Return the samples of layers' gradients, one after the other, where these are, and the elements of each."""
        parts = [self._blocks(grad_N) for grad_N in layers.values()]
        return torch.cat(parts), [len(part_N) for part_N in parts]

    def _blocks(self, grad_N: Tensor) -> Tensor:
        num_blocks = grad_N.numel() // HISTORY_BLOCK
        blocks_BE = grad_N[: num_blocks * HISTORY_BLOCK].view(num_blocks, HISTORY_BLOCK)
        return blocks_BE[:: self._stride].flatten()

    def add_to_sum(self, name: str, grad_N: Tensor) -> Tensor:
        """Add a layer's gradient to its sum; return the norm of the sum's NUM_TOP largest elements, on their device.

        Elements that are not finite count as 0.
        """
        sample_N = sample_blocks(grad_N, SUM_NUMEL).float().nan_to_num(0.0, 0.0, 0.0)
        before_N = self._sums.get(name)
        sum_N = sample_N if before_N is None else before_N.mul_(KEPT_OF_SUM).add_(sample_N)
        self._sums[name] = sum_N
        num_top = min(NUM_TOP, grad_N.numel())
        num_sampled = max(1, round(num_top * len(sum_N) / grad_N.numel()))
        return norm_of_largest(sum_N, num_sampled) * math.sqrt(num_top / num_sampled)

    def add_samples(self, samples: Mapping[str, Tensor]) -> None:
        """Add the gradient of a step, by layer, float32 on the host.

        Ignored if a layer is missing, or if it is 0 or not finite.
        """
        if not all(name in samples for pool in self._pools for name in pool):
            return
        pools = [torch.cat([samples[name] for name in pool]) for pool in self._pools]
        norm = math.hypot(*(float(part_N.norm()) for part_N in pools))
        if 0 < norm < math.inf:
            self._gradients.append([part_N / norm for part_N in pools])

    def gains(self, codecs: Iterable[Codec], key: int) -> dict[str, float]:
        """Return the gains that `codecs` would settle at, by `str(CodecSpec)`; by `str(Option)` over AR-Topk.

        Left out: codecs whose memory is more than a residual, and those without one. Empty without gradients.
        """
        specs = [codec.spec for codec in codecs if settles(codec)]
        if not self._gradients or not specs:
            return {}
        found: dict[str, float] = {}
        pools = [torch.stack([gradient[place] for gradient in self._gradients]) for place in range(len(self._pools))]
        weights = [float(gradients_JN.square().sum()) for gradients_JN in pools]
        for spec in specs:
            gains = [_gains(spec, pool_JN, key) for pool_JN, weight in zip(pools, weights, strict=True) if weight > 0]
            used = [weight for weight in weights if weight > 0]
            for name in gains[0]:
                found[name] = sum(w * one[name] for w, one in zip(used, gains, strict=True)) / sum(used)
        return found


def _gains(spec: CodecSpec, gradients_JN: Tensor, key: int) -> dict[str, float]:
    gains = {str(spec): settled_gain(spec, gradients_JN, key)}
    artopk = [option for option in options_of(spec) if option.scheme.is_artopk and option == option.flat()]
    if artopk:
        star, var = settled_artopk_gains(spec, gradients_JN, key)
        by_choice = {"star": star, "var": var, "auto": max(star, var)}
        gains |= {str(option): by_choice[option.scheme.choice] for option in artopk}
    return gains


def _pools(layers: Sequence[Layer]) -> list[list[str]]:
    """Cut `layers` into at most MAX_POOLS runs of consecutive ones, of DEFAULT_GROUP_BYTES or more."""
    limit = max(DEFAULT_GROUP_BYTES, sum(layer.dense_bytes for layer in layers) // MAX_POOLS)
    pools: list[list[str]] = []
    filled = limit
    for layer in layers:
        if filled >= limit and len(pools) < MAX_POOLS:
            pools.append([])
            filled = 0
        pools[-1].append(layer.name)
        filled += layer.dense_bytes
    return pools
