"""Advice: what compression would gain for this model on these links, and from which rate compute bounds the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from cgx_ray.plan import Layer
from cgx_ray.planner.cost import Link, Network
from cgx_ray.planner.joint import BestPlan
from cgx_ray.planner.models import ModelDescription
from cgx_ray.planner.profile import load_profile
from cgx_ray.planner.scenario import TYPICAL_PROFILE, Scenario, typical_gains
from cgx_ray.units import format_rate, format_seconds
from cgx_ray.why.paths import Path
from cgx_ray.why.records import ObservedLayer, RankRecord
from cgx_ray.why.step_cost import BOUND_SHARE
from cgx_ray.why.step_parts import StepParts

# Gbit/s between which a link may lie: beyond, no plan changes.
_SLOWEST, _FASTEST = 1e-3, 1600.0
# Halvings of their logarithms after which a rate is known to 1 %.
_HALVINGS = 11
# Seconds one way if no connection tells: two hosts of one switch.
_LATENCY_S = 50e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """Answer of the planner for this model and these links.

    sentence         in words
    plan             options of the best plan; "" if none is worth it
    saves_s          seconds of each step; 0 without a plan
    loss             expected loss over dense's, None if it was not measured
    seen_bit_per_s   rate of a link on which the planner's dense step takes as long as the observed one; its groups
                     overlap with backward as well as they can, so that is less than the link's own rate
    enough_bit_per_s first rate at which compute bounds the step; None if no rate does, or it is bound already
    """

    sentence: str
    plan: str
    saves_s: float
    loss: float | None
    seen_bit_per_s: float
    enough_bit_per_s: float | None


def compression(records: Sequence[RankRecord], parts: StepParts, paths: Sequence[Path]) -> Compression | None:
    """Return what the best plan of fidelity "strict" would gain; None if the layers are unknown, or none is a number.

    The planner's dense step on the link that is assumed takes as long as the observed one, so its errors cancel.
    """
    model = _model(records[0].layers, parts)
    if model is None or len(records) < 2:
        return None
    trips = [path.round_trip_s for path in paths if path.round_trip_s is not None and path.sent_bytes]
    alpha_s = median(trips) / 2 if trips else _LATENCY_S
    compute_s = min(parts.compute_s, median(bar.compute_s for bar in parts.bars))

    def dense_at(gbps: float) -> BestPlan:
        return _scenario(model, len(records), compute_s, gbps, alpha_s, is_dense=True).solve()

    goal_s = compute_s + parts.network_s
    seen = _first(lambda gbps: dense_at(gbps).dense.step_s <= goal_s)
    fastest = _FASTEST if seen is None else seen
    if len({record.node.name for record in records}) == 1:
        return _none("none: ranks share one node, whose processors exchange the gradients", fastest, None)
    if parts.network_s < BOUND_SHARE * parts.step_s or dense_at(fastest).is_compute_bound:
        return _none("none: the network does not bound your steps", fastest, None)
    enough = _first(lambda gbps: dense_at(gbps).is_compute_bound)
    answer = _scenario(model, len(records), compute_s, fastest, alpha_s, is_dense=False).solve()
    if answer.best.is_dense:
        return _none("none: no plan with dense's accuracy would be faster here", fastest, enough)
    saves_s = answer.dense.step_s - answer.best.step_s
    after_s = parts.step_s - saves_s
    return Compression(
        sentence=f"{answer.best.describe_options()}: steps of {format_seconds(after_s)} instead of "
        f"{format_seconds(parts.step_s)}, predicted; {_accuracy(answer.best.loss)}",
        plan=answer.best.describe_options(),
        saves_s=saves_s,
        loss=answer.best.loss,
        seen_bit_per_s=1e9 * fastest,
        enough_bit_per_s=None if enough is None else 1e9 * enough,
    )


def describe_enough(found: Compression) -> str:
    """Return in words what a faster link would gain."""
    if found.enough_bit_per_s is None:
        return "nothing, unless round trips get shorter" if found.plan else "nothing"
    return f"compute bounds the step from links of {format_rate(float(f'{found.enough_bit_per_s:.2g}'))} on, predicted"


def _accuracy(loss: float | None) -> str:
    if loss is None:
        return "what it costs in loss was not measured"
    return f"accuracy class strict: its loss was within 1 % of dense's on three small workloads (here {loss - 1:.1%})"


def _none(sentence: str, gbps: float, enough: float | None) -> Compression:
    return Compression(
        sentence=sentence,
        plan="",
        saves_s=0.0,
        loss=None,
        seen_bit_per_s=1e9 * gbps,
        enough_bit_per_s=None if enough is None else 1e9 * enough,
    )


def _first(is_enough: Callable[[float], bool]) -> float | None:
    """Return the least rate, in Gbit/s, that is enough; None if none is."""
    if not is_enough(_FASTEST):
        return None
    low, high = math.log(_SLOWEST), math.log(_FASTEST)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(math.exp(middle)) else (middle, high)
    return math.exp(high)


def _model(layers: Sequence[ObservedLayer], parts: StepParts) -> ModelDescription | None:
    """Return the model for the planner; without times of its layers, backward is spread over them evenly."""
    known = [one for one in layers if math.prod(one.shape) and one.dtype in _DTYPES]
    if not known:
        return None
    bar = parts.bars[0]
    is_timed = any(one.ready_s for one in known)
    evenly = [bar.compute_s - bar.backward_s * place / len(known) for place in range(len(known))]
    return ModelDescription(
        name="observed",
        layers=tuple(
            Layer(name=one.name, numel=math.prod(one.shape), ndim=len(one.shape), dtype=one.dtype) for one in known
        ),
        ready_s=tuple(one.ready_s for one in known) if is_timed else tuple(evenly),
    )


_DTYPES = frozenset({"float32", "float16", "bfloat16", "float64"})


def _scenario(
    model: ModelDescription, num_workers: int, compute_s: float, gbps: float, alpha_s: float, *, is_dense: bool
) -> Scenario:
    profile = load_profile(TYPICAL_PROFILE)
    link = Link.from_rates(bandwidth_gbps=gbps, latency_ms=1e3 * alpha_s)
    scenario = Scenario(
        model=model,
        network=Network.flat(num_workers, link),
        compute_s=compute_s,
        # As `cgx-ray plan`: a run sends dense gradients from where they lie.
        codec_costs={codec: cost for codec, cost in profile.codec_costs.items() if codec != "none"},
        gain=typical_gains(),
        min_gain=0.8,
        engine=profile.engine,
    )
    return replace(scenario, gain={}) if is_dense else scenario
