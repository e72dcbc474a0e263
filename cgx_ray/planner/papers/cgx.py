"""CGX (Markov et al. 2022), section 5: bits per layer by clusters (algorithm 1), by rank, or by Bayesian optimisation.

For alpha of 1 or more, all of them need at most the bytes of 4 bits everywhere; `bits.dp` is the optimum.

Shapes: L layers, W widths to choose from, K clusters
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cgx_ray.plan import CodecSpec, Scheme
from cgx_ray.planner.bits import (
    ALPHA,
    QSGD,
    STATIC_BITS,
    WIDTHS,
    BitsChoice,
    BitsProblem,
    Floats,
    Ints,
    LayerErrors,
    dp,
    dual,
    least_error,
    total,
)
from cgx_ray.planner.papers.groups import uniform_groups
from cgx_ray.planner.planned_group import PlannedGroup
from cgx_ray.planner.prediction import Measured


def kmeans(problem: BitsProblem) -> BitsChoice:
    """Choose bits by algorithm 1: cluster layers by size, and norm of the largest elements of the accumulated gradient.
    The least norm - size gets the fewest bits.

    The algorithm has no bound on the error. Departure: it runs for each range of neighbouring widths, and the result
    with the fewest bytes within the error is taken. Both axes are divided by their largest value; the paper does not
    say.
    """
    point_L2 = _scaled_points(problem)

    def assign(num_widths: int) -> Ints:
        cluster_L, center_K2 = _clusters(point_L2, num_widths)
        rank_K = np.argsort(np.argsort(center_K2[:, 1] - center_K2[:, 0], kind="stable"), kind="stable")
        # Equal points may give fewer clusters than widths.
        spread_K = np.rint(np.linspace(0, num_widths - 1, len(center_K2))).astype(np.int64)
        choice_L: Ints = spread_K[rank_K[cluster_L]]
        return choice_L

    return _best_run(problem, assign)


def linear(problem: BitsProblem) -> BitsChoice:
    """Choose bits that rise linearly with the rank of norm / size; ranges of widths as in `kmeans`."""
    ratio_L = np.array([layer.norm / layer.numel for layer in problem.layers])
    place_L = np.argsort(np.argsort(ratio_L, kind="stable"), kind="stable") / max(1, len(ratio_L) - 1)
    return _best_run(problem, lambda num_widths: np.rint(place_L * (num_widths - 1)).astype(np.int64))


def bayes(problem: BitsProblem, *, num_trials: int = 100, seed: int = 0) -> BitsChoice:
    """Choose bits by Bayesian optimisation. CGX tried it first and calls it unstable, but does not describe it.

    Ours is a Gaussian process with a squared exponential kernel on bits. The acquisition is its mean minus two
    deviations (GP-UCB, Srinivas et al. 2010), over random changes of the best choices so far. The objective is bytes
    over those of 4 bits, plus the logarithm of the error if it is too large. It starts with each width in all layers.
    """
    bytes_LW, error_LW = problem.tables()
    num_layers, num_widths = bytes_LW.shape
    random = np.random.default_rng(seed)

    def objective(choice_L: Ints) -> float:
        # An infinite objective would leave the process without a mean.
        excess = math.log(min(max(total(error_LW, choice_L), 1.0), 1e300))
        return total(bytes_LW, choice_L) / problem.static_bytes + excess

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


def _gaussian_process(seen_NL: Floats, value_N: Floats, asked_ML: Floats) -> tuple[Floats, Floats]:
    """Return mean and deviation at `asked_ML`. Noise is fixed to 1e-3, the length scale to one bit per layer."""

    def kernel(a_NL: Floats, b_ML: Floats) -> Floats:
        square_NM = (a_NL**2).sum(axis=1)[:, None] + (b_ML**2).sum(axis=1) - 2 * a_NL @ b_ML.T
        return np.asarray(np.exp(-0.5 * square_NM / a_NL.shape[1]))

    spread = float(value_N.std()) or 1.0
    gram_NN = kernel(seen_NL, seen_NL) + 1e-3 * np.eye(len(seen_NL))
    cross_NM = kernel(seen_NL, asked_ML)
    weight_NM = np.linalg.solve(gram_NN, cross_NM)
    mean_M = value_N.mean() + weight_NM.T @ (value_N - value_N.mean())
    return mean_M, spread * np.sqrt(np.clip(1 - (cross_NM * weight_NM).sum(axis=0), 0, None))


def _best_run(problem: BitsProblem, assign: Callable[[int], Ints]) -> BitsChoice:
    """Return the best of `assign(k)`, indices below k, applied to each range of k neighbouring widths."""
    num_widths = len(problem.widths)
    choices = [
        first + choice_L
        for count in range(1, num_widths + 1)
        for choice_L in (assign(count),)
        for first in range(num_widths - count + 1)
    ]
    return _best_of(problem, choices)


def _best_of(problem: BitsProblem, choices: list[Ints]) -> BitsChoice:
    bytes_LW, error_LW = problem.tables()
    # The choice with the least error is always within it.
    within = [least_error(bytes_LW, error_LW), *(c for c in choices if total(error_LW, c) <= 1)]
    best_L = min(within, key=lambda choice_L: total(bytes_LW, choice_L))
    return problem.answer(best_L, dual(bytes_LW, error_LW)[1])


def _scaled_points(problem: BitsProblem) -> Floats:
    point_L2 = np.array([[layer.numel, layer.top_norm] for layer in problem.layers], dtype=np.float64)
    largest_2 = point_L2.max(axis=0)
    return np.asarray(point_L2 / np.where(largest_2 > 0, largest_2, 1.0))


def _clusters(point_L2: Floats, num_clusters: int) -> tuple[Ints, Floats]:
    """Return the cluster of each point, and the centers, by Lloyd's algorithm; at most one cluster per distinct point.

    It starts with the first point and adds the point farthest from all centers each time, so it is deterministic.
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


def _distances(point_L2: Floats, center_K2: Floats) -> Floats:
    return np.asarray(np.linalg.norm(point_L2[:, None] - center_K2[None], axis=2))


# By the name that users give.
METHODS: Mapping[str, Callable[[BitsProblem], BitsChoice]] = {
    "kmeans": kmeans,
    "linear": linear,
    "bayes": bayes,
    "dp": dp,
}


def layer_bits(
    errors: Mapping[str, LayerErrors],
    method: str,
    alpha: float = ALPHA,
    widths: Sequence[int] = WIDTHS,
    codec: CodecSpec = QSGD,
) -> dict[str, int]:
    """Return the bits of each layer, by the method with this name. Other arguments as in `BitsProblem`."""
    problem = BitsProblem(layers=tuple(errors.values()), alpha=alpha, widths=tuple(widths), codec=codec)
    return dict(zip(errors, METHODS[method](problem).bits, strict=True))


def cgx_groups(
    measured: Measured, codec: CodecSpec, method: str, alpha: float = ALPHA, widths: Sequence[int] = WIDTHS
) -> tuple[PlannedGroup, ...] | None:
    """Return CGX's plan: qsgd over sra with bits by layer. None before any error is known.

    codec   qsgd that layers have, with other bits
    alpha   the largest error of all layers, over that of 4 bits
    widths  bits to choose from, ascending, the last one 4 or more

    A layer whose gradient is 0 has no error and gets the least of `widths` that is 4 or more. Departure: if bits in
    force had a larger error than expected of them, the next ones are chosen for an error that is smaller by that
    factor.
    Neighbours with the same bits share a group, up to the usual size.
    """
    codec = codec.replace(bits=min(width for width in widths if width >= STATIC_BITS))
    large = [layer.name for layer in measured.free_layers if not layer.is_small]
    if not large:
        return uniform_groups(measured, codec, Scheme.SRA)
    known = {name: measured.layer_errors[name] for name in large if name in measured.layer_errors}
    if not known:
        return None
    # With alpha 1, 4 bits everywhere are within the error, and so are more.
    bits = layer_bits(known, method, max(1.0, alpha / measured.error_excess), widths, codec)
    return uniform_groups(measured, codec, Scheme.SRA, bits)
