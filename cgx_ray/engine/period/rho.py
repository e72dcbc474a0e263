"""rho: the norm of the ranks' mean gradient over that of one rank's gradient, while ranks train alone.

Gradients of one rank have more noise, so an optimizer that divides by their size takes shorter steps than it would with
the mean gradient. Ranks that train alone multiply their gradients by rho and the learning rate by 1 / rho.

The mean gradient is not there to be measured. So each rank keeps, of each step, a fold of its gradient: sums of some
elements with fixed random signs. The fold of a mean gradient is the mean of the folds, and the expected square of a sum
with random signs is the sum of squares. docs/log/2026-11-26.md, entry 91, has other estimators.

K sums, S steps, M of them in a message
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

NUM_SUMS = 384
# Elements of a model that are folded, at most about so many: more would cost time, and err no less.
MAX_FOLDED = 1 << 20
# Elements that lie together in memory, so that reading some of a gradient's does not read all of it.
LINE = 16
# Steps of a round whose folds are exchanged, at most: on a slow link those of 64 steps took longer than 0.4 MB of
# changes with 4 bits.
MAX_STEPS = 8
# Weight of what was known before, in an average that forgets.
KEPT = 0.9


class Fold:
    """Sums over the elements of one rank's gradients, with signs that are the same on all ranks."""

    def __init__(self, numels: Mapping[str, int], device: torch.device) -> None:
        """`numels`: elements of each layer. `device`: where the gradients are."""
        self._stride = -(-sum(numels.values()) // MAX_FOLDED)
        generator = torch.Generator(device="cpu").manual_seed(0)
        self._signs = {}
        for name, numel in numels.items():
            num_picked = numel if self._stride == 1 else -(-(numel // LINE) // self._stride) * LINE
            signs = torch.randint(2, (num_picked,), generator=generator, dtype=torch.int8, device="cpu") * 2 - 1
            self._signs[name] = signs.to(device)
        self._sum_K = torch.zeros(NUM_SUMS, dtype=torch.float32, device=device)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add the gradient of a layer."""
        flat_N = gradient.reshape(-1)
        if self._stride > 1:
            num_lines = len(flat_N) // LINE
            flat_N = flat_N[: num_lines * LINE].view(num_lines, LINE)[:: self._stride].reshape(-1)
        signed_N = flat_N.float() * self._signs[name]
        num_whole = len(signed_N) // NUM_SUMS * NUM_SUMS
        self._sum_K += signed_N[:num_whole].view(-1, NUM_SUMS).sum(0)
        self._sum_K[: len(signed_N) - num_whole] += signed_N[num_whole:]

    def take(self) -> Tensor:
        """Return (K,) sums of the gradients since the last call."""
        taken_K, self._sum_K = self._sum_K, torch.zeros_like(self._sum_K)
        return taken_K


class Rho:
    """The estimate, the same on all ranks.

    num_replicas  ranks, or nodes whose ranks average their gradients in each step
    """

    def __init__(self, num_replicas: int) -> None:
        self.num_replicas = num_replicas
        # |mean gradient|^2 over the mean of |gradient|^2. Before any is known, that of noise: soon it is nearly that.
        self._square = 1 / num_replicas
        self._is_known = False

    def begin(self, num_replicas: int) -> None:
        """Go on, or begin anew if there are other replicas."""
        if num_replicas != self.num_replicas:
            self.num_replicas, self._square, self._is_known = num_replicas, 1 / num_replicas, False

    @property
    def value(self) -> float:
        """Return rho: at least what gradients would have that are noise alone, at most 1."""
        return math.sqrt(min(max(self._square, 1 / self.num_replicas), 1.0))

    @staticmethod
    def message(folds_SK: Tensor) -> Tensor:
        """Return (M * K + M,) numbers in float64, on the host, of which `add` takes the means over ranks."""
        num_steps = len(folds_SK)
        # The last one of each of M equal parts.
        picked = [(part + 1) * num_steps // MAX_STEPS - 1 for part in range(MAX_STEPS)]
        folds_MK = folds_SK[picked] if num_steps > MAX_STEPS else folds_SK
        folds_MK = folds_MK.to("cpu", torch.float64)
        return torch.cat([folds_MK.flatten(), folds_MK.square().sum(1)])

    def add(self, means: Tensor) -> None:
        """Add M steps. An average of ratios: one of squares would follow the steps with the largest gradients."""
        num_steps = len(means) // (NUM_SUMS + 1)
        means_MK, squares_M = means[:-num_steps].view(num_steps, NUM_SUMS), means[-num_steps:]
        for ratio in (means_MK.square().sum(1) / squares_M).tolist():
            # Steps without gradients, or with NaN, say nothing.
            if 0 <= ratio < math.inf:
                self._square = KEPT * self._square + (1 - KEPT) * ratio if self._is_known else ratio
                self._is_known = True

    def state(self) -> float | None:
        """Return what `load` takes."""
        return self._square if self._is_known else None

    def load(self, square: float | None, num_replicas: int) -> None:
        """Go on from a checkpoint of `num_replicas`."""
        self.begin(num_replicas)
        if square is not None:
            self._square, self._is_known = square, True
