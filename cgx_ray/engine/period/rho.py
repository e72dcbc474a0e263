"""rho of a layer: the norm of the ranks' mean gradient over that of one rank's gradient, while ranks train alone.

Gradients of one rank have more noise, so an optimizer that divides by their size takes shorter steps than it would with
the mean gradient. Ranks that train alone multiply their gradients by rho and the learning rate by 1 / rho. Layers
differ: with one rho for all of them, those with less noise than the others take too long steps, and others too short
ones, which cost a regression up to 30 % of its loss (LOG 124).

The mean gradient is not there to be measured. So each rank keeps, of each step, a fold of its gradient: sums of some
elements with fixed random signs. The fold of a mean gradient is the mean of the folds, and the expected square of a sum
with random signs is the sum of squares. docs/log/2026-11-26.md, entry 91, has other estimators.

L layers, K sums of each, S steps, M of them in a message
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

# Sums of all layers, as far as each has no fewer than the least and no more than the most.
NUM_SUMS, LEAST_SUMS, MOST_SUMS = 1536, 8, 384
# Elements of a model that are folded, at most about so many: more would cost time, and err no less.
MAX_FOLDED = 1 << 20
# Elements that lie together in memory, so that reading some of a gradient's does not read all of it.
LINE = 16
# Numbers and steps of a round that are exchanged, at most, but at least a step: on a slow link 25 KB for each of eight
# rounds took longer than 0.4 MB of changes with 4 bits.
MAX_NUMBERS, MAX_STEPS = 3080, 8
# Weight of what was known before, in an average that forgets.
KEPT = 0.9
# Ratio of neighbouring values of rho, about: many layers have the same one, and optimizers step those together.
# Estimates err as much.
LEVEL = 1.1


class Fold:
    """Sums over the elements of each layer of one rank's gradients, with signs that are the same on all ranks."""

    def __init__(self, numels: Mapping[str, int], device: torch.device) -> None:
        """`numels`: elements of each layer. `device`: where the gradients are."""
        usual = -(-sum(numels.values()) // MAX_FOLDED)
        generator = torch.Generator(device="cpu").manual_seed(0)
        # Of small layers all elements.
        self._strides = {name: usual if numel >= usual * LINE else 1 for name, numel in numels.items()}
        self._signs = {}
        for name, numel in numels.items():
            stride = self._strides[name]
            num_picked = numel if stride == 1 else -(-(numel // LINE) // stride) * LINE
            signs = torch.randint(2, (num_picked,), generator=generator, dtype=torch.int8, device="cpu") * 2 - 1
            self._signs[name] = signs.to(device)
        self._places = {name: place for place, name in enumerate(numels)}
        shape = len(numels), num_sums(len(numels))
        self._sum_LK = torch.zeros(shape, dtype=torch.float32, device=device)

    def add(self, name: str, gradient: Tensor) -> None:
        """Add the gradient of a layer."""
        flat_N, stride = gradient.reshape(-1), self._strides[name]
        if stride > 1:
            num_lines = len(flat_N) // LINE
            flat_N = flat_N[: num_lines * LINE].view(num_lines, LINE)[::stride].reshape(-1)
        signed_N = flat_N.float() * self._signs[name]
        sum_K = self._sum_LK[self._places[name]]
        num_whole = len(signed_N) // len(sum_K) * len(sum_K)
        sum_K += signed_N[:num_whole].view(-1, len(sum_K)).sum(0)
        sum_K[: len(signed_N) - num_whole] += signed_N[num_whole:]

    def take(self) -> Tensor:
        """Return (L, K) sums of the gradients since the last call."""
        taken_LK, self._sum_LK = self._sum_LK, torch.zeros_like(self._sum_LK)
        return taken_LK


def num_sums(num_layers: int) -> int:
    """Return K."""
    return min(max(NUM_SUMS // num_layers, LEAST_SUMS), MOST_SUMS)


class Rho:
    """The estimates, the same on all ranks.

    num_replicas  ranks, or nodes whose ranks average their gradients in each step
    by_layer      rho of each layer: at least what gradients would have that are noise alone, at most 1
    whole         by layer too, that of all layers together
    """

    def __init__(self, num_replicas: int, layers: Sequence[str]) -> None:
        """`layers`: their names, as in `Fold`."""
        self.num_replicas, self._layers = num_replicas, layers
        self._forget()

    def _forget(self) -> None:
        # |mean gradient|^2 over the mean of |gradient|^2, of each layer and of all. Before any is known, that of noise:
        # soon it is nearly that. It counts as one step.
        self._squares = [1 / self.num_replicas] * (len(self._layers) + 1)
        self._num_known = [1] * len(self._squares)
        self._update()

    def begin(self, num_replicas: int) -> None:
        """Go on, or begin anew if there are other replicas."""
        if num_replicas != self.num_replicas:
            self.num_replicas = num_replicas
            self._forget()

    def _update(self) -> None:
        least = 1 / self.num_replicas
        num_levels = max(1, round(-math.log(least) / 2 / math.log(LEVEL)))
        *square_L, whole = (min(max(square, least), 1.0) for square in self._squares)
        level_L = [round(num_levels * math.log(square) / math.log(least)) if square < 1 else 0 for square in square_L]
        rho_L = [least ** (level / num_levels / 2) for level in level_L]
        self.by_layer = dict(zip(self._layers, rho_L, strict=True))
        self.whole = dict.fromkeys(self._layers, math.sqrt(whole))

    @staticmethod
    def message(folds_SLK: Tensor) -> Tensor:
        """Return (M * L * (K + 1),) numbers in float64, on the host, of which `add` takes the means over ranks."""
        num_steps, num_layers, num_each = folds_SLK.shape
        most = min(num_steps, MAX_STEPS, max(1, MAX_NUMBERS // (num_layers * (num_each + 1))))
        # The last one of each of M equal parts.
        picked = [(part + 1) * num_steps // most - 1 for part in range(most)]
        folds_MLK = folds_SLK[picked].to("cpu", torch.float64)
        return torch.cat([folds_MLK, folds_MLK.square().sum(2, keepdim=True)], dim=2).flatten()

    def add(self, means: Tensor) -> None:
        """Add M steps. An average of ratios: one of squares would follow the steps with the largest gradients."""
        means_MLK = means.view(-1, len(self._layers), num_sums(len(self._layers)) + 1)
        of_mean_ML, of_one_ML = means_MLK[..., :-1].square().sum(2), means_MLK[..., -1]
        ratios_ML = torch.cat([of_mean_ML / of_one_ML, of_mean_ML.sum(1, True) / of_one_ML.sum(1, True)], dim=1)
        for ratios in ratios_ML.tolist():
            for place, ratio in enumerate(ratios):
                # Steps without gradients, or with NaN, say nothing.
                if 0 <= ratio < math.inf:
                    self._num_known[place] += 1
                    weight = max(1 - KEPT, 1 / self._num_known[place])
                    self._squares[place] += weight * (ratio - self._squares[place])
        self._update()

    def state(self) -> list[float] | None:
        """Return what `load` takes: the squares of all layers and of all together, then of how many steps."""
        return [*self._squares, *map(float, self._num_known)] if max(self._num_known) > 1 else None

    def load(self, state: Sequence[float] | float | None, num_replicas: int) -> None:
        """Go on from a checkpoint of `num_replicas`.

        state  a square for all layers in those of earlier versions; that of another number of layers says nothing
        """
        self.begin(num_replicas)
        num = len(self._squares)
        found = [state] * num + [1 / (1 - KEPT)] * num if isinstance(state, float) else list(state or ())
        if len(found) == 2 * num:
            self._squares, self._num_known = found[:num], list(map(round, found[num:]))
            self._update()
