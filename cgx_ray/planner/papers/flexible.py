"""How much of a gradient top-k should keep: time against gain (Flexible Communication, section 3-E, equation 6).

Three objectives, all to be small: codec time, exchange time, 1 / gain. None is worth so many seconds of another, so the
answer is the knee of the front of what no other density beats in all three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cgx_ray.errors import ConfigError
from cgx_ray.plan import CodecSpec, Option, Scheme
from cgx_ray.planner.cost import Network
from cgx_ray.planner.options import CodecCost, legs

# Section 3-E1: from 0.001 by factors of 3 to 0.1.
CANDIDATE_DENSITIES = (0.1, 0.033, 0.011, 0.004, 0.001)
# Equation 5c chooses between these.
SCHEMES = (Scheme.ALLGATHER, Scheme.ARTOPK_RING, Scheme.ARTOPK_TREE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a codec costs and keeps, measured or predicted, a step.

    codec_s  compressing and decompressing
    """

    codec: CodecSpec
    scheme: Scheme
    codec_s: float
    exchange_s: float
    gain: float

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) and value >= 0 for value in (self.codec_s, self.exchange_s)):
            raise ConfigError(
                f"{self.codec} takes {self.codec_s!r} s to code and {self.exchange_s!r} s to exchange; give finite "
                "seconds, 0 or more"
            )
        if not (math.isfinite(self.gain) and self.gain > 0):
            raise ConfigError(f"gain of {self.codec} is {self.gain!r}; a measured gain is finite and more than 0")

    @property
    def objectives(self) -> tuple[float, float, float]:
        """To be minimised."""
        return self.codec_s, self.exchange_s, 1 / self.gain


def predict(
    network: Network,
    codec_cost: CodecCost,
    numels: Sequence[int],
    gain: Callable[[float], float],
    schemes: Sequence[Scheme] = SCHEMES,
) -> Callable[[float], Trial]:
    """By density, the trial of top-k over the scheme whose exchange is the fastest (equation 5c).

    codec_cost  of top-k, whatever the density
    numels      elements of each group that is compressed, float32
    gain        by density, such as `interpolate_gain` of a gain curve
    """

    def trial(density: float) -> Trial:
        codec = CodecSpec(name="topk", density=density)
        exchanges_s, codecs_s = {}, {}
        for scheme in schemes:
            option = Option(codec=codec, scheme=scheme)
            parts = [leg for numel in numels for leg in legs(option, network, numel)]
            exchanges_s[scheme] = math.fsum(leg.link.seconds(leg.hops, leg.num_bytes) for leg in parts)
            codecs_s[scheme] = math.fsum(leg.encode_s(codec_cost) + leg.decode_s(codec_cost) for leg in parts)
        fastest = min(schemes, key=lambda scheme: exchanges_s[scheme])
        return Trial(
            codec=codec,
            scheme=fastest,
            codec_s=codecs_s[fastest],
            exchange_s=exchanges_s[fastest],
            gain=gain(density),
        )

    return trial


def interpolate_gain(densities: Sequence[float], gains: Sequence[float]) -> Callable[[float], float]:
    """The gain at any density from a curve of it, such as `StepSample.gain_curve`: straight in logarithms.

    Below the first density gain falls in proportion to density, the least that a top-k can keep.
    """
    density_D, gain_D = np.asarray(densities, dtype=np.float64), np.asarray(gains, dtype=np.float64)
    if len(density_D) == 0 or len(density_D) != len(gain_D) or np.any(np.diff(density_D) <= 0) or density_D[0] <= 0:
        raise ConfigError(f"{len(densities)} densities and {len(gains)} gains; give one each, at rising densities")
    if not np.all((gain_D > 0) & (gain_D < math.inf)):
        raise ConfigError(f"gains {list(gains)} are not allowed; give finite gains above 0")

    def gain(density: float) -> float:
        if density < density_D[0]:
            return float(gain_D[0] * density / density_D[0])
        return float(np.exp(np.interp(math.log(density), np.log(density_D), np.log(gain_D))))

    return gain


def front(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The trials that no other is as good as in all objectives and better in one, in the order given."""
    value_T3 = np.array([trial.objectives for trial in trials]).reshape(-1, 3)
    is_as_good_TT = np.all(value_T3[:, None] <= value_T3[None], axis=2)
    is_beaten_T = np.any(is_as_good_TT & ~is_as_good_TT.T, axis=0).tolist()
    return tuple(trial for trial, is_beaten in zip(trials, is_beaten_T, strict=True) if not is_beaten)


def knee(trials: Sequence[Trial]) -> Trial:
    """The trial of the front that is nearest to the best of every objective, each scaled to [0, 1] over the front.

    The paper takes "the knee-point" and does not define it; this is compromise programming with the Euclidean distance
    (Zeleny 1973). Times that differ by rounding only count as equal, or scaling would blow that up.
    """
    if not trials:
        raise ConfigError("no trial to choose from; give at least one")
    best = front(trials)
    value_T3 = np.array([trial.objectives for trial in best])
    low_3, range_3 = value_T3.min(axis=0), np.ptp(value_T3, axis=0)
    range_3[range_3 <= 1e-9 * value_T3.max(axis=0)] = math.inf
    return best[int(np.linalg.norm((value_T3 - low_3) / range_3, axis=1).argmin())]


def density_grid(low: float = 0.001, high: float = 0.1, num_per_decade: int = 12) -> tuple[float, ...]:
    """Densities from `low` to `high`, evenly spaced in logarithms: the continuous choice, as fine as it matters."""
    if not 0 < low < high <= 1:
        raise ConfigError(f"densities from {low!r} to {high!r} are not allowed; give 0 < low < high <= 1")
    num_steps = math.ceil(num_per_decade * math.log10(high / low))
    # Rounded powers may end beyond 1.
    return tuple(min(high, low * (high / low) ** (step / num_steps)) for step in range(num_steps + 1))


def nsga2(
    trial: Callable[[float], Trial],
    low: float = 0.001,
    high: float = 0.1,
    *,
    population: int = 100,
    generations: int = 15,
    seed: int = 0,
) -> tuple[Trial, ...]:
    """The front by NSGA-II (Deb et al. 2002, in pymoo), as the paper finds it; densities anywhere from `low` to `high`.

    Raises ConfigError without pymoo, which `pip install "cgx-ray[nsga2]"` brings.
    """
    try:
        from pymoo.algorithms.moo.nsga2 import NSGA2  # noqa: PLC0415 - an extra
        from pymoo.core.problem import ElementwiseProblem  # noqa: PLC0415
        from pymoo.optimize import minimize  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            'NSGA-II needs pymoo; pip install "cgx-ray[nsga2]", or take the front of density_grid(), which is exact'
        ) from error

    def trial_at(x_1: NDArray[np.float64]) -> Trial:
        return trial(min(high, math.exp(float(x_1[0]))))

    class Densities(ElementwiseProblem):
        def __init__(self) -> None:
            super().__init__(n_var=1, n_obj=3, xl=math.log(low), xu=math.log(high))

        def _evaluate(self, x: NDArray[np.float64], out: dict[str, object]) -> None:
            out["F"] = trial_at(x).objectives

    found = minimize(Densities(), NSGA2(pop_size=population), ("n_gen", generations), seed=seed)
    return front(sorted((trial_at(x_1) for x_1 in np.atleast_2d(found.X)), key=lambda entry: entry.codec.density or 0))
