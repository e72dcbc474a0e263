"""Flexible Communication (Tyagi and Swany 2023): how much top-k should keep, and which collective should carry it.

Density (section 3-E, equation 6): minimise codec time, exchange time and 1 / gain. No objective has a price in another,
so the answer is a point of the front, the trials that no other beats in all three:

1. Trials of the densities 0.1, 0.033, 0.011, 0.004 and 0.001, measured (`Attachment.explore`) or predicted (`predict`),
   or of a grid of 12 per decade (`density_grid`), fine enough that the front is exact. `nsga2` searches any density.
   The paper measures: 10 steps per candidate from one checkpoint, as `Attachment.explore` does.
2. `front` keeps the trials that no other beats.
3. `knee` takes the trial nearest to the best of all objectives, each scaled to [0, 1] over the front. The paper takes
   "the knee-point" and does not define it.

Collective (section 3-D): the one with the least cost, by PRICES. Those of the paper are the costs of its collectives,
and the limits of alpha / beta at which one overtakes another (equations 5a to 5c). Ours, in `scheme_costs`, differ: our
allgather takes one hop, and our trees halve what they send at each level.

Run time (`FlexibleLoop`): density and collective are chosen again when the gain in use has changed by 10 %, or alpha or
beta by 25 %. Departure: gains are those that ranks measure (`known_gain`), and times are predicted, so nothing is
trained and undone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cgx_ray.errors import ConfigError
from cgx_ray.plan import NONE, CodecSpec, Option, Scheme
from cgx_ray.planner.candidates import CodecCost
from cgx_ray.planner.cost import Link, Network, check_exchange, terms
from cgx_ray.planner.legs import legs
from cgx_ray.planner.papers.groups import uniform_groups
from cgx_ray.planner.planned_group import PlannedGroup
from cgx_ray.planner.prediction import Measured

# Section 3-E1: from 0.001 by factors of 3 to 0.1.
CANDIDATE_DENSITIES = (0.1, 0.033, 0.011, 0.004, 0.001)
# Relative change of the gain, and of alpha or beta, that calls for a new decision. The paper has 10 % for the gain and
# does not say how much another network must differ; alpha and beta are estimates that scatter by some percent.
GAIN_TRIGGER, LINK_TRIGGER = 0.1, 0.25
# By the name that users give.
METHODS = ("knee", "nsga2")
# By the name that users give, and in words: costs of the schemes as they run here, or of the paper's collectives, which
# do not.
PRICES = {"run": "priced as it runs", "paper": "priced by equations 5a to 5c"}
# Equations 5a to 5c choose between these.
SCHEMES = (Scheme.ALLGATHER, Scheme.ARTOPK_RING, Scheme.ARTOPK_TREE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Cost and gain of a codec per step, measured or predicted.

    codec_s  seconds to compress and decompress
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
        """Codec time, exchange time and 1 / gain; smaller is better."""
        return self.codec_s, self.exchange_s, 1 / self.gain

    def has_changed(self, now: Trial) -> bool:
        """Return whether a trigger fires: the same codec has another gain `now`, or another exchange time."""
        return _is_other_gain(self.gain, now.gain) or _is_other_link(self.exchange_s, now.exchange_s)


def predict(
    network: Network,
    cost_of: Callable[[Option], CodecCost],
    numels: Sequence[int],
    gain: Callable[[Option], float],
    prices: str = "run",
) -> Callable[[float], Trial]:
    """Return a function from density to the trial of top-k over the scheme with the fastest exchange.

    cost_of  codec times, such as `Measured.cost_of`
    numels   elements of each compressed group, float32
    gain     by option, such as `known_gain`
    prices   of exchanges, one of PRICES. By those of the paper all groups are one message between single ranks
    """
    num_workers = network.num_workers

    def trial(density: float) -> Trial:
        codec = CodecSpec(name="topk", density=density)
        exchanges_s, codecs_s = {}, {}
        for scheme in SCHEMES:
            option = Option(codec=codec, scheme=scheme)
            codec_cost = cost_of(option)
            parts = [leg for numel in numels for leg in legs(option, network, numel)]
            exchanges_s[scheme] = math.fsum(leg.link.seconds(leg.hops, leg.num_bytes) for leg in parts)
            codecs_s[scheme] = math.fsum(leg.encode_s(codec_cost) + leg.decode_s(codec_cost) for leg in parts)
        fastest = min(SCHEMES, key=lambda scheme: exchanges_s[scheme])
        if prices == "paper":
            value_bytes = 4 * density * sum(numels)
            fastest = collective(num_workers, value_bytes, network.between)
            exchanges_s[fastest] = paper_exchange_s(fastest, num_workers, value_bytes, network.between)
        option = Option(codec=codec, scheme=fastest)
        return Trial(
            codec=codec,
            scheme=fastest,
            codec_s=codecs_s[fastest],
            exchange_s=exchanges_s[fastest],
            gain=gain(option),
        )

    return trial


def interpolate_gain(densities: Sequence[float], gains: Sequence[float]) -> Callable[[float], float]:
    """Return the gain at any density, from points at rising densities, linear in logarithms.

    Below the first density the gain falls in proportion to the density, the least that top-k can keep.
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


def known_gain(measured: Measured, densities: Sequence[float]) -> Callable[[Option], float] | None:
    """Return the gain of top-k over any of SCHEMES, known from those at `densities`; None if one of these is unknown.

    That over AR-Topk is the gain at the indices of another rank, which is far less than at a rank's own: as every
    policy's, it is predicted for the time when error feedback has settled (`codecs.shadow`), and measured in use.
    """
    by_scheme = {}
    for scheme in SCHEMES:
        known = {}
        for density in sorted({*densities}):
            found = measured.gain_of(Option(codec=CodecSpec(name="topk", density=density), scheme=scheme))
            if found is None:
                return None
            known[density] = found
        by_scheme[scheme] = interpolate_gain(tuple(known), tuple(known.values()))

    def gain(option: Option) -> float:
        assert option.codec.density is not None
        return measured.gain_of(option) or by_scheme[option.scheme](option.codec.density)

    return gain


def front(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return the trials that no other beats: as good in all objectives and better in one. The order stays."""
    value_T3 = np.array([trial.objectives for trial in trials]).reshape(-1, 3)
    is_as_good_TT = np.all(value_T3[:, None] <= value_T3[None], axis=2)
    is_beaten_T = np.any(is_as_good_TT & ~is_as_good_TT.T, axis=0).tolist()
    return tuple(trial for trial, is_beaten in zip(trials, is_beaten_T, strict=True) if not is_beaten)


def knee(trials: Sequence[Trial]) -> Trial:
    """Return the trial of the front nearest to the best of all objectives, each scaled to [0, 1] over the front.

    Departure: the paper does not define its knee. This is compromise programming with the Euclidean distance (Zeleny
    1973). Times that differ only by rounding count as equal, since scaling would enlarge the difference.
    """
    if not trials:
        raise ConfigError("no trial to choose from; give at least one")
    best = front(trials)
    value_T3 = np.array([trial.objectives for trial in best])
    low_3, range_3 = value_T3.min(axis=0), np.ptp(value_T3, axis=0)
    range_3[range_3 <= 1e-9 * value_T3.max(axis=0)] = math.inf
    return best[int(np.linalg.norm((value_T3 - low_3) / range_3, axis=1).argmin())]


def density_grid(low: float = 0.001, high: float = 0.1, num_per_decade: int = 12) -> tuple[float, ...]:
    """Return densities from `low` to `high`, evenly spaced in logarithms: a fine grid for the continuous choice."""
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
    """Return the front over all densities from `low` to `high`, found by NSGA-II (Deb et al. 2002) as in the paper.

    Raises ConfigError without pymoo, which `pip install "cgx-ray[nsga2]"` installs.
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


def allgather_tree_s(num_workers: int, wire_bytes: float, link: Link) -> float:
    """Return the seconds of an allgather by recursive doubling. None of our schemes works like that."""
    check_exchange(num_workers, 0, wire_bytes)
    return link.seconds(math.log2(num_workers), (num_workers - 1) * wire_bytes)


def artopk_tree_s(num_workers: int, wire_bytes: float, link: Link, index_bytes: float = 0) -> float:
    """Return the seconds of AR-Topk with all values up and down a tree; arguments as in `cost.terms`.

    Our artopk_tree halves what it sends at each level.
    """
    check_exchange(num_workers, 0, wire_bytes, index_bytes)
    log_N = math.log2(num_workers)
    return link.seconds(3 * log_N, log_N * (2 * (wire_bytes - index_bytes) + index_bytes))


def paper_exchange_s(scheme: Scheme, num_workers: int, value_bytes: float, link: Link) -> float:
    """Return the seconds of an exchange over one of SCHEMES by the paper. `value_bytes` as below."""
    wire_bytes = 2 * value_bytes
    if scheme is Scheme.ALLGATHER:
        return allgather_tree_s(num_workers, wire_bytes, link)
    if scheme is Scheme.ARTOPK_TREE:
        return artopk_tree_s(num_workers, wire_bytes, link, value_bytes)
    return link.seconds(*terms(scheme, num_workers, 0, wire_bytes, value_bytes))


# Equations 5a to 5c follow from the costs of section 3-D, with log to base 2: allgather is `allgather_tree_s`, equation
# 4a is artopk_ring in `scheme_costs`, equation 4b is `artopk_tree_s`. value_bytes is the paper's Mc, the bytes of the
# values that one rank sends. Their indices take as many bytes, so wire_bytes is 2 Mc. With one worker all costs and all
# limits are 0.


def ring_over_tree_below(num_workers: int, value_bytes: float) -> float:
    """Return the alpha / beta in bytes below which artopk_ring costs less than artopk_tree (equation 5a).

    It is infinite for two workers: both take the same number of hops, and the ring sends less.
    """
    check_exchange(num_workers, 0, value_bytes)
    N, log_N = num_workers, math.log2(num_workers)
    saved_bytes = (log_N - (N - 1) / N) * value_bytes
    if N > 2:
        return saved_bytes / (N - 1 - log_N)
    return math.inf if saved_bytes > 0 else 0.0


def ring_over_allgather_below(num_workers: int, value_bytes: float) -> float:
    """Return the alpha / beta in bytes below which artopk_ring costs less than allgather (equation 5b).

    It is 0, never, for two workers.
    """
    check_exchange(num_workers, 0, value_bytes)
    if num_workers == 1:
        return 0.0
    N, log_N = num_workers, math.log2(num_workers)
    return (1 - 1 / N - log_N / (2 * (N - 1))) * value_bytes


def tree_over_allgather_below(num_workers: int, value_bytes: float) -> float:
    """Return the alpha / beta in bytes below which artopk_tree costs less than allgather (equation 5c).

    It is 0 for four workers and negative for two or three: never.
    """
    check_exchange(num_workers, 0, value_bytes)
    if num_workers == 1:
        return 0.0
    return ((num_workers - 1) / math.log2(num_workers) - 1.5) * value_bytes


def collective(num_workers: int, value_bytes: float, link: Link) -> Scheme:
    """Return the collective with the least cost by equations 5a to 5c: AG, or AR-Topk over a ring or a tree."""
    ratio = link.alpha_s / link.beta_s_per_byte
    if ratio < min(ring_over_tree_below(num_workers, value_bytes), ring_over_allgather_below(num_workers, value_bytes)):
        return Scheme.ARTOPK_RING
    if ratio < tree_over_allgather_below(num_workers, value_bytes):
        return Scheme.ARTOPK_TREE
    return Scheme.ALLGATHER


def choose(
    measured: Measured,
    gain: Callable[[Option], float],
    method: str = "knee",
    densities: Sequence[float] = CANDIDATE_DENSITIES,
    prices: str = "run",
) -> Trial:
    """Return the knee over `densities`, or with "nsga2" over all between.

    gain    as from `known_gain`
    prices  as in `predict`

    Raises ConfigError for "nsga2" without pymoo.
    """
    groups = uniform_groups(measured, CodecSpec(name="topk"), Scheme.ALLGATHER)
    numels = [group.numel for group in groups if not group.is_fixed and group.option.codec != NONE]
    trial = predict(measured.network, measured.cost_of, numels, gain, prices)
    if method == "nsga2":
        return knee(nsga2(trial, min(densities), max(densities)))
    return knee([trial(density) for density in densities])


def _is_other_gain(chosen: float, now: float) -> bool:
    return abs(now / chosen - 1) > GAIN_TRIGGER


def _is_other_link(chosen: float, now: float) -> bool:
    return not chosen / (1 + LINK_TRIGGER) <= now <= chosen * (1 + LINK_TRIGGER)


class FlexibleLoop:
    """The paper's loop: `groups` returns the plan of the moment, the same as before until a trigger fires."""

    def __init__(
        self, method: str = "knee", densities: Sequence[float] = CANDIDATE_DENSITIES, prices: str = "run"
    ) -> None:
        self._method, self._densities, self._prices = method, tuple(densities), prices
        self._chosen: Trial | None = None
        # That it was chosen for.
        self._link: Link | None = None

    def groups(self, measured: Measured) -> tuple[PlannedGroup, ...] | None:
        """Return the plan, None before the gains of all densities are known."""
        gain = known_gain(measured, self._densities)
        if gain is None:
            return None
        if self._chosen is None or self._is_other(self._chosen, measured.network.between, gain):
            self._chosen = choose(measured, gain, self._method, self._densities, self._prices)
            self._link = measured.network.between
        return uniform_groups(measured, self._chosen.codec, self._chosen.scheme)

    def _is_other(self, chosen: Trial, link: Link, gain: Callable[[Option], float]) -> bool:
        """Return whether a trigger fires: another gain of the option in use, or another link."""
        assert self._link is not None
        is_now = gain(Option(codec=chosen.codec, scheme=chosen.scheme))
        return (
            _is_other_gain(chosen.gain, is_now)
            or _is_other_link(self._link.alpha_s, link.alpha_s)
            or _is_other_link(self._link.beta_s_per_byte, link.beta_s_per_byte)
        )
