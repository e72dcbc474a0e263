"""Measured cost of each codec in loss, and the levels of fidelity that follow from it.

A level says which codecs policy "adaptive" may choose, besides none:

strict    codecs that ended within 0.5 % of dense's validation loss in all three workloads of `python -m bench accuracy`
balanced  codecs that ended within 2.5 %
fast      codecs that ended within 5 %, and top-k at the densities of the settings, whatever it costs

Rounds in which ranks train alone are not for "strict". For "balanced" they are expected to end within 4.4 %, so that of
trainings nine in ten end within 5 %; for "fast" they may cost anything.

Where data have noise, the loss falls to it, and what a codec adds stays small beside it. Where they have none, only
training keeps the loss up, and the codec's share grows as the loss falls. So what was measured counts as many times as
the loss of this run has fallen further than those of the runs that measured it, if the run reports its loss. It also
counts as many times as the codec's errors are larger here than there. By that, and as a level leaves a half of what it
allows to such growth, "strict" stays within 1 % there too (LOG 123), and "balanced" within 5 % (LOG 125).

Levels are made of the codecs that come with cgx_ray; others are chosen by name, as candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum

from cgx_ray.plan import BUILT_IN, NONE, CodecSpec, LossCost


class Fidelity(StrEnum):
    """How close to dense's loss a run must stay."""

    STRICT = "strict"
    BALANCED = "balanced"
    FAST = "fast"

    @property
    def max_loss(self) -> float | None:
        """Largest expected loss over dense's; None for "fast": any. "balanced" keeps 5 % with the spread of seeds."""
        return {Fidelity.STRICT: 1.01, Fidelity.BALANCED: 1.05 - SEED_SPREAD}.get(self)

    @property
    def max_measured(self) -> float:
        """Largest measured loss over dense's of codecs without a density of the settings.

        "strict" and "balanced" keep a half of what they allow in reserve: with a codec of 1.007, an adaptive run ended
        at 1.0101 (LOG 112); with one of 1.027 in steps 63 to 83 alone, a regression ended at 1.16 (LOG 125).
        """
        return {Fidelity.STRICT: 1.005, Fidelity.BALANCED: 1.025}.get(self, 1.05)


# Of a level's codecs the one for losses that have fallen too far for fewer bits. Else it would only be mixed with them:
# in the demo at 100 Mbit/s such a plan took 0.77 s per step, with 4 bits alone 0.71 s.
RESERVE = CodecSpec(name="qsgd", bits=8)
# Least gain of codecs that a run may choose, unless its user gives another.
USUAL_MIN_GAIN = 0.8
# Loss over dense's of so many replicas that average every so many steps: the worst of some workloads, each a mean of
# three seeds (bench/data/periods*.json). Larger models and longer trainings lose less, see docs/period.md.
PERIOD_LOSSES: Mapping[int, Mapping[int, float]] = {
    4: {2: 1.0057, 4: 1.0141, 8: 1.0304, 16: 1.0390, 32: 1.0486},
    8: {2: 1.0094, 4: 1.0205, 8: 1.0403, 16: 1.0707, 32: 1.0902},
}
PERIODS = tuple(PERIOD_LOSSES[4])
# Trainings of byte-GPT that lose up to 5 %: nine in ten ended no further from the mean of their seeds.
SEED_SPREAD, MAX_SPREAD_LOSS = 0.006, 1.05
# Among more replicas than were measured, the loss grows with this power of their number.
REPLICAS_POWER = 0.2
# The loss fell by this factor in the trainings of byte-GPT that measured `LossCost`.
MEASURED_FALL = 2.1
# Codecs without feedback cost no more than this many times the relative square of their errors, even where all that is
# left of the loss comes from noise of the gradients (LOG 123).
MAX_ERROR_COST = 3.0
# And at least this many times of what is beyond the errors of the table: the least of its codecs that cost anything.
LEAST_ERROR_COST = 0.04


def period_loss(period: int, replicas: int) -> float:
    """Return the loss over dense's of `replicas` that average every `period` steps.

    That is the one of the next longer period, and the next larger number of replicas, that were measured.
    """
    if period == 1 or replicas == 1:
        return 1.0
    longer = min((known for known in PERIODS if known >= period), default=PERIODS[-1])
    larger = min((known for known in PERIOD_LOSSES if known >= replicas), default=max(PERIOD_LOSSES))
    more = math.pow(max(1.0, replicas / larger), REPLICAS_POWER)
    return 1 + (PERIOD_LOSSES[larger][longer] - 1) * more


def codec_loss(cost: LossCost, loss_fall: float = 1.0, error: float = 0.0) -> float:
    """Return the loss over dense's of a codec, where the run's loss has fallen to 1 / `loss_fall`; 1: unknown.

    error  the codec's relative error in this run, as in `LossCost`; 0: unknown

    Both make the measured loss grow in proportion (LOG 123, 126). That of codecs with error feedback is the measured
    one: how it grows was not measured.
    """
    if cost.relative_error is None:
        return cost.worst
    added, largest = cost.worst - 1, max(error, cost.relative_error)
    grown = added * max(1.0, loss_fall / MEASURED_FALL) * (largest / cost.relative_error)
    grown = max(grown, LEAST_ERROR_COST * (largest - cost.relative_error))
    return 1 + min(grown, max(added, MAX_ERROR_COST * largest))


def loss_of(codec: CodecSpec, period: int, replicas: int, loss_fall: float = 1.0, error: float = 0.0) -> float:
    """Return the loss over dense's of `codec` in rounds of `period` steps; inf if that of the codec was not measured.

    That is the larger of what either loses by itself: together they lose no more (bench/data/periods_4_ranks.json).
    """
    cost = codec.record.losses.get(str(codec))
    own = codec_loss(cost, loss_fall, error) if cost is not None else 1.0 if codec == NONE else math.inf
    return max(period_loss(period, replicas), own)


def expected_loss(losses: Iterable[float]) -> float | None:
    """Return the loss over dense's of a plan whose codecs have `losses` by `loss_of`; None if one was not measured."""
    loss = max(losses, default=1.0)
    return None if math.isinf(loss) else max(loss, 1.0)


def describe_loss(loss: float) -> str:
    """Return an expected loss over dense's with the spread of single trainings, where that was measured."""
    spread = f" ± {SEED_SPREAD}" if 1.0 < loss <= MAX_SPREAD_LOSS else ""
    return f"{loss:.3f}{spread} of dense"


def periods_of(fidelity: Fidelity | str) -> tuple[int, ...]:
    """Return 1, and the periods that a level allows if its `max_loss` does: by "strict" none."""
    return (1,) if Fidelity(fidelity) is Fidelity.STRICT else (1, *PERIODS)


# Of the codecs that come with cgx_ray, by `str(CodecSpec)`, over the codec's usual scheme.
LOSS_COSTS: Mapping[str, LossCost] = {
    text: cost for record in BUILT_IN.values() for text, cost in record.losses.items()
}


def codecs_of(fidelity: Fidelity | str, densities: Iterable[float] = ()) -> tuple[CodecSpec, ...]:
    """Return none, the codecs that a level allows, and for "fast" top-k at each of `densities`, each once."""
    level = Fidelity(fidelity)
    measured = (CodecSpec.parse(codec) for codec, cost in LOSS_COSTS.items() if cost.worst <= level.max_measured)
    sparse = (CodecSpec(name="topk", density=density) for density in densities) if level is Fidelity.FAST else ()
    return tuple(dict.fromkeys([NONE, *(codec for codec in measured if codec.record.is_foreseen), *sparse]))


def measured_progress(codec: CodecSpec, gain: float, loss_fall: float = 1.0) -> float | None:
    """Return dense's loss over that of `codec`, both measured, as the progress of a step; None if that tells nothing.

    A codec without feedback makes errors that are 0 on average, and ranks and steps average them out. So its gain, 1
    minus the relative error of one message, does not say what a step is worth: with 3 bits up to 15 % of the energy is
    error, and the loss is less than 1 % higher.

    gain, loss_fall  measured in this training
    """
    cost = codec.record.losses.get(str(codec))
    if cost is None or cost.relative_error is None:
        return None
    return min(1.0, 1 / codec_loss(cost, loss_fall, 1 - gain))


def describe_costs(codecs: Iterable[CodecSpec], period: int = 1, replicas: int = 1) -> str:
    """Return in words what cost in loss those of `codecs`, and the period, that "strict" does not allow; "" without."""
    allowed = codecs_of(Fidelity.STRICT)
    costs = [_describe_cost(codec) for codec in dict.fromkeys(codecs) if codec not in allowed]
    if (lost := period_loss(period, replicas) - 1) > 0:
        costs.append(f"averaging {replicas} replicas every {period} steps is expected to end {lost:.1%} above dense")
    return "; ".join(costs)


def _describe_cost(codec: CodecSpec) -> str:
    cost = codec.record.losses.get(str(codec))
    if cost is not None:
        return f"{codec.describe()} was measured to end up to {cost.worst - 1:.1%} above dense's loss"
    if codec.density is not None:
        # A smaller density costs more.
        measured = {CodecSpec.parse(text).density or 0.0: one for text, one in codec.record.losses.items()}
        smaller = [density for density in measured if density <= codec.density]
        if smaller:
            density = max(smaller)
            return (
                f"{codec.describe()} was not measured, density {density:g} ended up to "
                f"{measured[density].worst - 1:.1%} above dense's loss"
            )
    return f"what {codec.describe()} costs in loss was not measured"
