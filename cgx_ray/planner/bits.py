"""Bits of every layer: the fewest wire bytes at a bounded error of the gradient (CGX, section 5).

Minimise the wire bytes of all layers subject to |error| <= alpha E_4: both are l2 norms over all layers, and E_4 is
that of 4 bits for every layer. CGX's Algorithm 1 (`kmeans`) and what it compares with, `linear` and `bayes`, next to
the optimum, `dp`. None is ever behind 4 bits everywhere, for alpha from 1 on.

Shapes: L layers, W widths to choose from, K clusters
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cgx_ray.errors import ConfigError
from cgx_ray.plan import CodecSpec

QSGD = CodecSpec(name="qsgd")
STATIC_BITS = 4
# Sums in another order differ by this much at most; more within the bound is no break of it.
ROUNDING = 1e-12
MAX_LABELS = 1 << 14

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerErrors:
    """What was measured of a layer.

    norm            l2 norm of its gradient; over several steps, the root of the summed squares
    squared_errors  by bits |g - decode(encode(g))|^2, over the same steps
    """

    numel: int
    norm: float
    squared_errors: Mapping[int, float]

    def __post_init__(self) -> None:
        if self.numel < 1:
            raise ConfigError(f"a layer has {self.numel} elements; leave out layers without any")
        for name, value in (("norm", self.norm), *((f"error at {b} bits", e) for b, e in self.squared_errors.items())):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} is {value!r}; measure it on finite gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class BitsProblem:
    """What is to be decided.

    alpha   the error may be so many times that of 4 bits everywhere; CGX takes 1.5 to 3
    widths  bits to choose from, ascending
    codec   qsgd with the bucket size and grid to count bytes for
    """

    layers: tuple[LayerErrors, ...]
    alpha: float = 1.0
    widths: tuple[int, ...] = tuple(range(1, 9))
    codec: CodecSpec = QSGD

    def __post_init__(self) -> None:
        if not self.layers:
            raise ConfigError("no layers to choose bits for; give at least one")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"alpha {self.alpha!r} is not allowed; give a finite number above 0, such as 2")
        if not self.widths or list(self.widths) != sorted(set(self.widths)):
            raise ConfigError(f"widths {self.widths!r} are not allowed; give bits of qsgd in ascending order")
        if self.codec.bits is None:
            raise ConfigError(f"codec {self.codec} has no bits to choose; give qsgd")
        for index, layer in enumerate(self.layers):
            missing = {*self.widths, STATIC_BITS} - layer.squared_errors.keys()
            if missing:
                raise ConfigError(f"layer {index} has no error measured at {sorted(missing)} bits; measure these too")
        if float(self._squared_errors().min(axis=1).sum()) > self._budget:
            raise ConfigError(
                f"no choice of {self.widths} bits has an error of at most {self.alpha} times that of 4 bits; give a "
                "larger alpha or more bits"
            )

    @property
    def static_bytes(self) -> int:
        """Wire bytes of 4 bits everywhere."""
        return int(self._bytes_of(STATIC_BITS).sum())

    def answer(self, choice_L: _Ints, bound_bytes: int) -> BitsChoice:
        """`choice_L`: indices of widths."""
        layers = np.arange(len(self.layers))
        static = self._static_squared_error
        squared_error = float(self._squared_errors()[layers, choice_L].sum())
        return BitsChoice(
            bits=tuple(self.widths[choice] for choice in choice_L.tolist()),
            wire_bytes=int(self._bytes()[layers, choice_L].sum()),
            relative_error=math.sqrt(squared_error / static) if static > 0 else 0.0,
            bound_bytes=bound_bytes,
        )

    def tables(self) -> tuple[_Ints, _Floats]:
        """(L, W) wire bytes, and squared errors as shares of what is allowed: a choice may have 1 in all."""
        return self._bytes(), self._squared_errors() / (self._budget or 1.0)

    def _bytes_of(self, bits: int) -> _Ints:
        codec = replace(self.codec, bits=bits)
        return np.array([codec.payload_bytes(layer.numel) for layer in self.layers], dtype=np.int64)

    def _bytes(self) -> _Ints:
        return np.stack([self._bytes_of(bits) for bits in self.widths], axis=1)

    def _squared_errors(self) -> _Floats:
        return np.array([[layer.squared_errors[bits] for bits in self.widths] for layer in self.layers])

    @property
    def _static_squared_error(self) -> float:
        return math.fsum(layer.squared_errors[STATIC_BITS] for layer in self.layers)

    @property
    def _budget(self) -> float:
        return self.alpha**2 * self._static_squared_error * (1 + ROUNDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class BitsChoice:
    """Bits of every layer.

    relative_error  over that of 4 bits everywhere, at most alpha
    bound_bytes     no choice within the error takes fewer wire bytes
    """

    bits: tuple[int, ...]
    wire_bytes: int
    relative_error: float
    bound_bytes: int

    @property
    def gap(self) -> float:
        """What a better choice could save at most, as a share of `wire_bytes`; 0 if this is the best."""
        return 1 - self.bound_bytes / self.wire_bytes


def dp(problem: BitsProblem, *, max_labels: int = MAX_LABELS) -> BitsChoice:
    """The optimum, or the best found with its proven gap if more than `max_labels` partial choices are needed.

    The multiple-choice knapsack of L-GreCo (Alimohammadi et al. 2023), whose dynamic program rounds errors to a grid.
    Departure: labels (bytes, error) of the first layers, of which those stay that no other is as good as in both, so
    nothing is rounded. And only those stay that may become better than the best choice known: with m the multiplier of
    the Lagrangian dual, bytes + m error - m + sum over the layers left of min (bytes + m error) bounds what becomes of
    them.
    """
    bytes_LW, error_LW = problem.tables()
    multiplier, dual, best_L = _dual(bytes_LW, error_LW)
    best = int(_total(bytes_LW, best_L))
    rounding = ROUNDING * (best + multiplier)
    cost_LW = bytes_LW + multiplier * error_LW
    # Most to lose first, so that labels are few for long.
    order = np.argsort(-np.ptp(np.where(np.isfinite(cost_LW), cost_LW, 0.0), axis=1), kind="stable")
    left_cost, left_error, left_bytes = (_left(table_LW, order) for table_LW in (cost_LW, error_LW, bytes_LW))
    num_bytes, error = np.zeros(1, dtype=np.int64), np.zeros(1)
    trail: list[tuple[_Ints, _Ints]] = []
    lost = math.inf
    for step, layer in enumerate(order):
        num_bytes = (num_bytes[:, None] + bytes_LW[layer]).ravel()
        error = (error[:, None] + error_LW[layer]).ravel()
        bound = np.maximum(num_bytes + multiplier * (error - 1) + left_cost[step], num_bytes + left_bytes[step])
        # A better choice takes at least a byte less.
        kept = np.flatnonzero((error + left_error[step] <= 1) & (bound <= best - 1 + rounding))
        kept = kept[np.lexsort((error[kept], num_bytes[kept]))]
        least = np.minimum.accumulate(np.append(math.inf, error[kept]))
        kept = kept[error[kept] < least[:-1]]
        if len(kept) > max_labels:
            kept = kept[np.argsort(bound[kept], kind="stable")]
            lost = min(lost, float(bound[kept[max_labels]]))
            kept = kept[:max_labels]
        trail.append((kept // bytes_LW.shape[1], kept % bytes_LW.shape[1]))
        num_bytes, error = num_bytes[kept], error[kept]
    if len(num_bytes):
        best, label = int(num_bytes.min()), int(num_bytes.argmin())
        best_L = np.empty(len(order), dtype=np.int64)
        for layer, (parent, choice) in zip(order[::-1], reversed(trail), strict=True):
            best_L[layer], label = choice[label], parent[label]
    bound_bytes = best if lost == math.inf else min(best, max(dual, math.ceil(lost - rounding)))
    return problem.answer(best_L, bound_bytes)


def _left(table_LW: _Ints | _Floats, order: _Ints) -> _Floats:
    """What the layers behind each in `order` add at least."""
    least_L = table_LW.min(axis=1)[order].astype(np.float64)
    return np.asarray(np.append(least_L[::-1].cumsum()[::-1][1:], 0.0))


def _dual(bytes_LW: _Ints, error_LW: _Floats) -> tuple[float, int, _Ints]:
    """The multiplier of the error, the bound in bytes that it proves, and a choice near it within the error."""
    best_L = _least_error(bytes_LW, error_LW)
    # Any multiplier proves a bound, but much larger ones would drown bytes in rounding.
    low, high = -40.0, math.log2(_total(bytes_LW, best_L)) + 10
    bound = 0
    # Halved 50 times, the logarithm is as fine as it can be.
    for _ in range(50):
        exponent = (low + high) / 2
        multiplier = 2.0**exponent
        cost_LW = bytes_LW + multiplier * error_LW
        choice_L = cost_LW.argmin(axis=1)
        least = float(cost_LW.min(axis=1).sum())
        bound = max(bound, math.ceil(least - multiplier - ROUNDING * (least + multiplier)))
        if _total(error_LW, choice_L) <= 1:
            best_L, high = choice_L, exponent
        else:
            low = exponent
    return 2.0**high, bound, _fill(bytes_LW, error_LW, best_L)


def _fill(bytes_LW: _Ints, error_LW: _Floats, choice_L: _Ints) -> _Ints:
    """Spend the error that `choice_L` leaves: again and again the change of one layer that saves most."""
    choice_L, layers = choice_L.copy(), np.arange(len(choice_L))
    while True:
        saved_LW = bytes_LW[layers, choice_L][:, None] - bytes_LW
        more_LW = error_LW - error_LW[layers, choice_L][:, None]
        saved_LW[more_LW > 1 - _total(error_LW, choice_L)] = 0
        layer, choice = np.unravel_index(saved_LW.argmax(), saved_LW.shape)
        if saved_LW[layer, choice] <= 0:
            return choice_L
        choice_L[layer] = choice


def kmeans(problem: BitsProblem) -> BitsChoice:
    """CGX, Algorithm 1: layers clustered by (size, norm of the gradient), fewest bits to the cluster with the least
    norm less size.

    The algorithm knows no error; here it is run for each run of neighbouring widths, and the one with the fewest bytes
    within the error is taken. Both axes are divided by their largest value, of which the paper says nothing.
    """
    point_L2 = _scaled_points(problem)

    def assign(num_widths: int) -> _Ints:
        cluster_L, center_K2 = _clusters(point_L2, num_widths)
        rank_K = np.argsort(np.argsort(center_K2[:, 1] - center_K2[:, 0], kind="stable"), kind="stable")
        # Equal points make fewer clusters than widths.
        spread_K = np.rint(np.linspace(0, num_widths - 1, len(center_K2))).astype(np.int64)
        choice_L: _Ints = spread_K[rank_K[cluster_L]]
        return choice_L

    return _best_run(problem, assign)


def linear(problem: BitsProblem) -> BitsChoice:
    """CGX, section 5: layers sorted by norm over size, bits rise linearly in this order; `kmeans` says which bits."""
    ratio_L = np.array([layer.norm / layer.numel for layer in problem.layers])
    place_L = np.argsort(np.argsort(ratio_L, kind="stable"), kind="stable") / max(1, len(ratio_L) - 1)
    return _best_run(problem, lambda num_widths: np.rint(place_L * (num_widths - 1)).astype(np.int64))


def bayes(problem: BitsProblem, *, num_trials: int = 100, seed: int = 0) -> BitsChoice:
    """Bayesian optimisation, which CGX tried first and calls unstable; it does not say which.

    Ours: a Gaussian process with a squared exponential kernel on bits, its mean less two deviations as the acquisition
    (GP-UCB, Srinivas et al. 2010), over random changes of the best choices so far. The objective is bytes over those of
    4 bits, plus what the logarithm of the error has too much. Starts with every width everywhere.
    """
    bytes_LW, error_LW = problem.tables()
    num_layers, num_widths = bytes_LW.shape
    random = np.random.default_rng(seed)

    def objective(choice_L: _Ints) -> float:
        excess = max(0.0, math.log(max(_total(error_LW, choice_L), 1e-300)))
        return _total(bytes_LW, choice_L) / problem.static_bytes + excess

    tried = [np.full(num_layers, width) for width in range(num_widths)]
    values = [objective(choice_L) for choice_L in tried]
    while len(tried) < num_trials:
        best = np.argsort(values, kind="stable")[:5]
        parents = np.array(tried)[random.choice(best, size=200)]
        changed = random.random(parents.shape) < random.choice([1, 2, 4], size=(200, 1)) / num_layers
        step = random.integers(-2, 3, size=parents.shape) * changed
        candidates = np.clip(parents + step, 0, num_widths - 1)
        mean, deviation = _gaussian_process(np.array(tried, dtype=float), np.array(values), candidates.astype(float))
        tried.append(candidates[int(np.argmin(mean - 2 * deviation))])
        values.append(objective(tried[-1]))
    return _best_of(problem, tried)


def _gaussian_process(seen_NL: _Floats, value_N: _Floats, asked_ML: _Floats) -> tuple[_Floats, _Floats]:
    """Mean and deviation at `asked_ML`, whose noise and length are fixed: 1e-3 and a bit a layer."""

    def kernel(a_NL: _Floats, b_ML: _Floats) -> _Floats:
        square_NM = (a_NL**2).sum(axis=1)[:, None] + (b_ML**2).sum(axis=1) - 2 * a_NL @ b_ML.T
        return np.asarray(np.exp(-0.5 * square_NM / a_NL.shape[1]))

    spread = float(value_N.std()) or 1.0
    gram_NN = kernel(seen_NL, seen_NL) + 1e-3 * np.eye(len(seen_NL))
    cross_NM = kernel(seen_NL, asked_ML)
    weight_NM = np.linalg.solve(gram_NN, cross_NM)
    mean_M = value_N.mean() + weight_NM.T @ (value_N - value_N.mean())
    return mean_M, spread * np.sqrt(np.clip(1 - (cross_NM * weight_NM).sum(axis=0), 0, None))


def _best_run(problem: BitsProblem, assign: Callable[[int], _Ints]) -> BitsChoice:
    """The best of `assign(k)`, indices below k, taken as those of each run of k neighbouring widths."""
    num_widths = len(problem.widths)
    choices = [
        first + choice_L
        for count in range(1, num_widths + 1)
        for choice_L in (assign(count),)
        for first in range(num_widths - count + 1)
    ]
    return _best_of(problem, choices)


def _best_of(problem: BitsProblem, choices: list[_Ints]) -> BitsChoice:
    bytes_LW, error_LW = problem.tables()
    # Some are within the error, whatever the others are.
    within = [_least_error(bytes_LW, error_LW), *(c for c in choices if _total(error_LW, c) <= 1)]
    best_L = min(within, key=lambda choice_L: _total(bytes_LW, choice_L))
    return problem.answer(best_L, _dual(bytes_LW, error_LW)[1])


def _least_error(bytes_LW: _Ints, error_LW: _Floats) -> _Ints:
    tie_LW = error_LW == error_LW.min(axis=1, keepdims=True)
    return np.asarray(np.where(tie_LW, bytes_LW, np.iinfo(np.int64).max).argmin(axis=1))


def _scaled_points(problem: BitsProblem) -> _Floats:
    point_L2 = np.array([[layer.numel, layer.norm] for layer in problem.layers], dtype=np.float64)
    largest_2 = point_L2.max(axis=0)
    return np.asarray(point_L2 / np.where(largest_2 > 0, largest_2, 1.0))


def _clusters(point_L2: _Floats, num_clusters: int) -> tuple[_Ints, _Floats]:
    """Lloyd's algorithm: the cluster of each point, and the centers. At most as many clusters as distinct points.

    It starts with the first point and then, each time, the one farthest from all centers, so it is deterministic.
    """
    center_K2 = point_L2[:1]
    while len(center_K2) < num_clusters:
        away_L = _distances(point_L2, center_K2).min(axis=1)
        if away_L.max() == 0:
            break
        center_K2 = np.append(center_K2, point_L2[away_L.argmax()][None], axis=0)
    cluster_L = _distances(point_L2, center_K2).argmin(axis=1)
    while True:
        members_KL = np.arange(len(center_K2))[:, None] == cluster_L
        sizes_K = members_KL.sum(axis=1)
        means_K2 = members_KL @ point_L2 / np.maximum(sizes_K, 1)[:, None]
        center_K2 = np.where(sizes_K[:, None] > 0, means_K2, center_K2)
        again_L = _distances(point_L2, center_K2).argmin(axis=1)
        if np.array_equal(again_L, cluster_L):
            return cluster_L, center_K2
        cluster_L = again_L


def _distances(point_L2: _Floats, center_K2: _Floats) -> _Floats:
    return np.asarray(np.linalg.norm(point_L2[:, None] - center_K2[None], axis=2))


def _total(table_LW: _Ints | _Floats, choice_L: _Ints) -> float:
    return float(table_LW[np.arange(len(choice_L)), choice_L].sum())
