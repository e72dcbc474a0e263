"""Sparse codecs. They differ in how they select the elements to send."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from cgx_ray.codecs.codec import HOST, MOMENTUM, Memory
from cgx_ray.codecs.sparse import Selection, Sparse
from cgx_ray.plan import CodecSpec, Layer
from cgx_ray.runtime_ext import ops, sparse
from cgx_ray.runtime_ext.layer_ends import LayerEnds

MSTOPK_ROUNDS = 25
SIDCO_STAGE_SHARE = 0.25
# DGC samples 0.1 to 1 % of the elements: every 100th. From fewer than 1,024 samples the threshold is too inaccurate.
DGC_STRIDE = 100
DGC_MIN_SAMPLES = 1024


class TopK(Sparse):
    """The K largest magnitudes of the group, exactly. NaN counts as largest, then Inf, so they are always sent."""

    # With them, the selection is one per layer.
    _ends: LayerEnds | None = None

    def select(self, fed_N: Tensor, selection: Selection, key: int) -> None:
        selection.count_1.fill_(selection.num_kept)
        sparse.topk_select(fed_N, selection.index_K, selection.value_K, ends=self._ends)

    def take(self, grad_N: Tensor, selection: Selection, key: int, memory: Memory) -> None:
        """See `Sparse.take`. The kernel does all of it in the passes that select."""
        selection.count_1.fill_(selection.num_kept)
        kept = selection.index_K, selection.value_K
        sparse.topk_select(grad_N, *kept, ends=self._ends, residual_N=memory.residual_N, next_N=memory.next_N)

    def encode(self, grad_N: Tensor, payload: Tensor, key: int, memory: Memory | None = None) -> None:
        if self.spec.value_bits != 32:
            super().encode(grad_N, payload, key, memory)
            return
        selection = self.room(grad_N.numel(), grad_N.device)
        kept = selection.index_K, selection.value_K
        residual_N, next_N = (None, None) if memory is None else (memory.residual_N, memory.next_N)
        sparse.topk_encode(grad_N, payload, *kept, ends=self._ends, residual_N=residual_N, next_N=next_N)


class LwTopK(TopK):
    """The largest magnitudes of each layer, the same share of every layer (LWTopk, as in Flexible Communication).

    Layer l, which ends at element c_l of the group, keeps ceil(d c_l) - ceil(d c_(l-1)) elements at density d, at least
    one, so that it is trained and its NaN is seen. Without layers it is top-k over the group.
    """

    def __init__(self, spec: CodecSpec, layers: Sequence[Layer] = (), world_size: int = 1) -> None:
        super().__init__(spec, layers, world_size)
        if layers:
            numels = [layer.numel for layer in layers]
            kept_ends = [spec.num_kept(end) for end in itertools.accumulate(numels, initial=0)]
            shares = (stop - start for start, stop in itertools.pairwise(kept_ends))
            self._ends = LayerEnds(
                numels, [min(max(share, 1), numel) for share, numel in zip(shares, numels, strict=True)]
            )

    def num_kept(self, numel: int) -> int:
        if self._ends is None or numel != self._ends.numel:
            return super().num_kept(numel)
        return self._ends.num_kept


class MsTopK(Sparse):
    """Threshold by bisection, then a run of the elements close to it (MSTopk, Shi et al. 2021).

    After 25 halvings the last interval cannot contain both finite magnitudes and Inf or NaN. So if there are any Inf or
    NaN, one is always sent.
    """

    def select(self, fed_N: Tensor, selection: Selection, key: int) -> None:
        thresholds_2 = sparse.bisect_thresholds(fed_N, selection.num_kept, MSTOPK_ROUNDS)
        sparse.collect(fed_N, thresholds_2, selection.index_K, selection.value_K, selection.count_1, key=key)


class Sidco(Sparse):
    """Threshold fitted to the histogram of the magnitudes, in up to three stages (SIDCo, Abdelmoniem et al. 2021)."""

    def __init__(self, spec: CodecSpec, layers: Sequence[Layer] = (), world_size: int = 1) -> None:
        super().__init__(spec, layers, world_size)
        assert spec.density is not None
        self._ratios = stage_ratios(spec.density)

    def select(self, fed_N: Tensor, selection: Selection, key: int) -> None:
        thresholds_2 = sparse.sidco_thresholds(fed_N, self._ratios, selection.num_kept)
        sparse.collect(fed_N, thresholds_2, selection.index_K, selection.value_K, selection.count_1, key=key)
        ops.add_poison(fed_N, selection.value_K)


class Dgc(Sparse):
    """Threshold from a sample, momentum correction and clipping (DGC, Lin et al. 2018, sections 3.1 and 3.2).

    First, `clip` limits the norm of the group's gradient g, without its loss scale, to clip / sqrt(world size). Then
    u = momentum u + g and v = v + u. The large elements of v are sent, and u and v are set to zero there. The
    optimizer's own momentum must be off. Warm-up: `CodecSpec.at_step`.

    Departures: clips each group, where the paper clips the whole model; has no Nesterov momentum; if more than K
    elements exceed the threshold, sends K consecutive ones of them from a random start, where the paper selects again.
    """

    def memory_of(self, numel: int, layer: Layer | None = None) -> dict[str, Tensor]:
        return {**super().memory_of(numel, layer), MOMENTUM: torch.zeros(numel, dtype=torch.float32, device=HOST)}

    def feed(self, grad_N: Tensor, memory: Memory) -> Tensor:
        assert self.spec.momentum is not None
        scale = self._clipping(grad_N, memory.scale) if self.spec.clip else 1.0
        before, after = (memory.now[MOMENTUM], memory.residual_N), (memory.next[MOMENTUM], memory.next_N)
        ops.add_momentum(grad_N, *before, *after, factor=self.spec.momentum, scale=scale)
        return memory.next_N

    def select(self, fed_N: Tensor, selection: Selection, key: int) -> None:
        stride = max(1, min(DGC_STRIDE, fed_N.numel() // DGC_MIN_SAMPLES))
        thresholds_2 = sparse.sample_thresholds(fed_N, selection.num_kept, stride, key)
        sparse.collect(fed_N, thresholds_2, selection.index_K, selection.value_K, selection.count_1, key=key)
        ops.add_poison(fed_N, selection.value_K)

    def _clipping(self, grad_N: Tensor, loss_scale: float) -> Tensor | float:
        assert self.spec.clip is not None
        # In float64, since the squares of large finite gradients overflow float32.
        norm: Tensor = torch.linalg.vector_norm(grad_N, dtype=torch.float64)
        limit = loss_scale * self.spec.clip / math.sqrt(self.world_size)
        if grad_N.is_cpu:
            return limit / max(float(norm), limit)  # `max` returns its first argument if that is NaN
        # Reading the norm would wait for the device.
        return (limit / norm.clamp(min=limit)).to(torch.float32)


def stage_ratios(density: float) -> list[float]:
    """Return ln(1 / share) of SIDCo's stages.

    Up to two stages keep a quarter each, while `density` is below that; the last stage keeps the share that remains.
    """
    ratios = []
    for _ in range(2):
        if density < SIDCO_STAGE_SHARE:
            ratios.append(-math.log(SIDCO_STAGE_SHARE))
            density /= SIDCO_STAGE_SHARE
    return [*ratios, -math.log(density)]
