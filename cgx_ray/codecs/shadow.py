"""The gain at which error feedback settles, predicted before a codec is used, from a few measured gradients.

A codec keeps more of a gradient without a residual than of one with a residual. So error feedback is simulated on
samples of the last measured gradients until its residual has stopped to grow:

1. The gradients are split into a steady part, which is the same in all steps, and noise (`GradientModel`). Coming steps
   get the steady part and the noise of the measured steps in turn, with random signs, since the noise of two steps is
   independent. Without signs a residual would add up the same noise over and over.
2. Sparse codecs need about 1 / density steps to settle. Many steps are made as one (`_Pace`): the steady part times
   their number, the noise times its root, and as many times more elements sent. The last NUM_MEASURED steps are single
   ones, and the mean of their gains is the prediction.
3. For AR-Topk two ranks are simulated, with equal steady parts and different noise. Both send the elements that one has
   selected. The second rank stands for all others.

J gradients of N elements each
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cgx_ray.codecs import make_codec
from cgx_ray.codecs.codec import HOST, RESIDUALS, Codec
from cgx_ray.codecs.sparse import Selection, Sparse
from cgx_ray.plan import CodecSpec
from cgx_ray.runtime_ext import sparse

# Elements that share one estimate of how much of their mean is noise.
BLOCK = 256
# Density to which steps are joined. On recorded gradients of a small GPT 0.05 changes the result by 0.03 or less,
# 0.1 by up to 0.09.
JOINED_DENSITY = 0.05
# Times that each element is sent, on average, before gains are measured.
NUM_TURNS = 2
# Joined steps of codecs without a density.
NUM_DENSE_STEPS = 40
# Single steps whose gains are averaged.
NUM_MEASURED = 16
# Keys of random numbers have 32 bits.
MAX_KEY = 2**32 - 1
# Ranks that are simulated for AR-Topk.
NUM_RANKS = 2


class GradientModel:
    """Makes gradients of coming steps from measured ones."""

    def __init__(self, gradients_JN: Tensor) -> None:
        """`gradients_JN`: float32, of steps so far apart that their noise is independent."""
        num = len(gradients_JN)
        self._noise_JN, self._steady_N = gradients_JN, torch.zeros_like(gradients_JN[0])
        if num == 1:
            return
        mean_N = gradients_JN.mean(0)
        # The mean took a part of the noise with it.
        self._noise_JN = (gradients_JN - mean_N) * math.sqrt(num / (num - 1))
        # The mean of J gradients still holds 1/J of the noise's energy.
        in_mean_N = self._noise_JN.square().mean(0) / num
        self._steady_N = (
            mean_N * (1 - _by_block(in_mean_N) / _by_block(mean_N.square())).nan_to_num(0.0).clamp(0, 1).sqrt()
        )

    def add_steps(self, residual_RN: Tensor, step: int, chance: random.Random, num_joined: int = 1) -> None:
        """Add to each rank's residual the gradients of `num_joined` steps. `step` chooses the noise, `chance` its sign.

        In each step ranks get the noise of different measured gradients, if there are enough.
        """
        for rank, residual_N in enumerate(residual_RN):
            noise_N = self._noise_JN[(step + rank * (1 + step // len(self._noise_JN))) % len(self._noise_JN)]
            residual_N.add_(self._steady_N, alpha=num_joined)
            residual_N.add_(noise_N, alpha=chance.choice((-1, 1)) * math.sqrt(num_joined))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    """Steps that are made as one until the residual has settled, and the number of these."""

    num_joined: int
    num_steps: int

    @classmethod
    def of(cls, spec: CodecSpec) -> _Pace:
        if spec.density is None:
            return cls(num_joined=1, num_steps=NUM_DENSE_STEPS)
        num_joined = max(1, int(JOINED_DENSITY / spec.density))
        return cls(num_joined=num_joined, num_steps=math.ceil(NUM_TURNS / (num_joined * spec.density)))

    def joined(self, spec: CodecSpec) -> CodecSpec:
        """Return the codec that sends in one step what `spec` sends in `num_joined`."""
        return spec if self.num_joined == 1 else spec.replace(density=self.num_joined * (spec.density or 1.0))


def settles(codec: Codec) -> bool:
    """Return True if the codec has a residual and no other memory, so that `settled_gain` can predict its gain."""
    return set(codec.memory_of(1)) == {RESIDUALS}


def settled_gain(spec: CodecSpec, gradients_JN: Tensor, key: int) -> float:
    """Return the gain of `spec` with error feedback if each rank encodes its own elements.

    gradients_JN  (J, N) float32 on the host, finite, not 0
    key           seed of signs and of the codec's random numbers

    Call only if `settles`.
    """
    model, chance, pace = GradientModel(gradients_JN), random.Random(key), _Pace.of(spec)
    residual_1N = torch.zeros_like(gradients_JN[:1])
    joined, single = make_codec(pace.joined(spec)), make_codec(spec)
    for step in range(pace.num_steps):
        model.add_steps(residual_1N, step, chance, pace.num_joined)
        _send(joined, residual_1N[0], key + step)
    gains = []
    for step in range(pace.num_steps, pace.num_steps + NUM_MEASURED):
        model.add_steps(residual_1N, step, chance)
        before = _energy(residual_1N[0])
        _send(single, residual_1N[0], key + step)
        gains.append(1 - _energy(residual_1N[0]) / before)
    return math.fsum(gains) / len(gains)


class ArtopkGains(NamedTuple):
    """Gains of AR-Topk if ranks take turns to select ("star"), and if that with the largest top-k does ("var")."""

    star: float
    var: float


def settled_artopk_gains(spec: CodecSpec, gradients_JN: Tensor, key: int) -> ArtopkGains:
    """Return the gains of `spec` over AR-Topk, means over ranks. Arguments are those of `settled_gain`."""
    model, chance, pace = GradientModel(gradients_JN), random.Random(key), _Pace.of(spec)
    residual_RN = torch.zeros(NUM_RANKS, gradients_JN.shape[1], dtype=torch.float32, device=HOST)
    joined = pace.joined(spec)
    assert joined.density is not None
    # In a joined step all ranks select in turn, each its share of the elements.
    share = joined.replace(density=joined.density / NUM_RANKS)
    for step in range(pace.num_steps):
        model.add_steps(residual_RN, step, chance, pace.num_joined)
        for root in range(NUM_RANKS):
            _clear(_selected(share, residual_RN[root], key + step), residual_RN)

    def measure(residual_RN: Tensor, *, by_norm: bool) -> float:
        gains = []
        for step in range(pace.num_steps, pace.num_steps + NUM_MEASURED):
            model.add_steps(residual_RN, step, chance)
            before = [_energy(own_N) for own_N in residual_RN]
            roots = residual_RN if by_norm else residual_RN[step % NUM_RANKS][None]
            found = [_selected(spec, own_N, key + step) for own_N in roots]
            _clear(max(found, key=lambda one: float(one.value_K.norm())), residual_RN)
            gains += [1 - _energy(own_N) / fed for own_N, fed in zip(residual_RN, before, strict=True)]
        return math.fsum(gains) / len(gains)

    return ArtopkGains(star=measure(residual_RN.clone(), by_norm=False), var=measure(residual_RN, by_norm=True))


def _send(codec: Codec, residual_N: Tensor, key: int) -> None:
    """Replace the error-fed gradient in `residual_N` by what encoding leaves of it."""
    memory = codec.new_memory(len(residual_N))
    assert memory is not None
    payload = torch.empty(codec.payload_bytes(len(residual_N)), dtype=torch.uint8, device=HOST)
    codec.encode(residual_N, payload, key & MAX_KEY, memory)
    residual_N.copy_(memory.next_N)


def _selected(spec: CodecSpec, residual_N: Tensor, key: int) -> Selection:
    """Return what a rank selects."""
    codec = make_codec(spec)
    assert isinstance(codec, Sparse)
    selection = codec.room(len(residual_N), residual_N.device)
    codec.select(residual_N, selection, key & MAX_KEY)
    return selection


def _clear(selection: Selection, residual_RN: Tensor) -> None:
    """Set the selected elements to zero on all ranks."""
    for residual_N in residual_RN:
        sparse.scatter_zero(selection.index_K, selection.count_1, residual_N)


def _energy(residual_N: Tensor) -> float:
    return float(residual_N.norm()) ** 2


def _by_block(value_N: Tensor) -> Tensor:
    """Return (N,), for each element the mean of its block."""
    num_blocks = math.ceil(len(value_N) / BLOCK)
    padded_BE = F.pad(value_N, (0, num_blocks * BLOCK - len(value_N))).view(num_blocks, BLOCK)
    return padded_BE.mean(1, keepdim=True).expand(-1, BLOCK).flatten()[: len(value_N)]
