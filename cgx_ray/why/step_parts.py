"""Where the time of a step goes, by rank: computed from the records of all ranks, without any clock that they share.

In a synchronous step all ranks wait for the last one. Whoever comes last waits the least: what it waits after backward
is the network's, and what the others wait beyond that is the last rank's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from cgx_ray.why.records import RankRecord, StepTimes

# Steps this many times as long as the median one are left out, unless they are more than this share and more than
# one: before them the script saved or evaluated.
PAUSE, _RARE = 5.0, 0.04
# Share of the steps in which one rank must come last to be the one that others wait for.
_OFTEN = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBar:
    """Mean seconds of a step on one rank: all parts but `hidden_s` and `processor_s` one after the other.

    network_s  of the exchange after backward, what the last rank takes too
    waiting_s  what this rank takes beyond that: it waits for a later one
    """

    rank: int
    node: str
    input_s: float
    forward_s: float
    backward_s: float
    waiting_s: float
    network_s: float
    rest_s: float
    hidden_s: float
    processor_s: float

    @property
    def compute_s(self) -> float:
        return self.forward_s + self.backward_s


class LateRank(NamedTuple):
    """The rank that comes last most often.

    share        of steps in which it is the last
    cost_s       mean seconds by which the others wait for it, per step
    waits_input  True if what it takes longer lies before the forward pass
    """

    rank: int
    share: float
    cost_s: float
    waits_input: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The mean step of all ranks.

    step_s     of the rank whose mean step is the longest; they differ by little, as ranks wait for each other
    bars       of each rank, in order
    network_s  of the exchange after backward, as in `RankBar`
    input_s    what every rank waits before the forward pass
    late       None if there is one rank
    uneven_s   what ranks wait for one that is not `late`: ranks are last in turns
    uneven_input_s
               of this, what the last rank's input takes longer than the others'
    num_steps  that count
    num_pauses left out, as they took several times as long as usual
    """

    step_s: float
    bars: tuple[RankBar, ...]
    network_s: float
    input_s: float
    late: LateRank | None
    uneven_s: float
    uneven_input_s: float
    num_steps: int
    num_pauses: int

    @property
    def compute_s(self) -> float:
        """Seconds of the usual rank for forward, backward and the optimizer, where no rank waits for it."""
        late_s = self.late.cost_s if self.late is not None else 0.0
        usual_s = median(bar.compute_s + bar.rest_s for bar in self.bars)
        # If two ranks are last in turns, the mean compute of each contains half of the extra time.
        return min(usual_s, self.step_s - self.network_s - self.input_s - self.uneven_s - late_s)


def parts_of(records: Sequence[RankRecord]) -> StepParts | None:
    """Return the mean step of those of `records` that have any, one per rank in order; None if none has."""
    records = [record for record in records if record.steps]
    steps = list(zip(*(record.steps for record in records), strict=False))
    if not steps:
        return None
    usual_s = median(_longest(step) for step in steps)
    kept = [step for step in steps if _longest(step) <= PAUSE * usual_s]
    if len(steps) - len(kept) > max(1, _RARE * len(steps)):
        kept = steps  # loaders that come in bursts, say: part of every training
    network = [min(one.exposed_s for one in step) for step in kept]
    bars = [
        _bar(record, [step[place] for step in kept], fmean(network), kept, place)
        for place, record in enumerate(records)
    ]
    late, uneven_s, uneven_input_s = _late(kept, bars)
    return StepParts(
        step_s=max(fmean(one.step_s for one in own) for own in zip(*kept, strict=True)),
        bars=tuple(bars),
        network_s=fmean(network),
        input_s=fmean(min(one.input_s for one in step) for step in kept),
        late=late,
        uneven_s=uneven_s,
        uneven_input_s=uneven_input_s,
        num_steps=len(kept),
        num_pauses=len(steps) - len(kept),
    )


def _longest(step: Sequence[StepTimes]) -> float:
    return max(one.step_s for one in step)


def _bar(
    record: RankRecord, own: Sequence[StepTimes], network_s: float, steps: Sequence[Sequence[StepTimes]], place: int
) -> RankBar:
    waiting = [step[place].exposed_s - min(one.exposed_s for one in step) for step in steps]
    return RankBar(
        rank=record.rank,
        node=record.node.name,
        input_s=fmean(one.input_s for one in own),
        forward_s=fmean(one.forward_s for one in own),
        backward_s=fmean(one.backward_s for one in own),
        waiting_s=fmean(waiting),
        network_s=network_s,
        rest_s=fmean(one.rest_s for one in own),
        hidden_s=fmean(one.hidden_s for one in own),
        processor_s=fmean(one.processor_s for one in own),
    )


def _late(steps: Sequence[Sequence[StepTimes]], bars: Sequence[RankBar]) -> tuple[LateRank | None, float, float]:
    """Return the rank that is last most often, the mean seconds that ranks wait for others, and those for input."""
    if len(bars) < 2:
        return None, 0.0, 0.0
    lasts: list[int] = []
    costs: list[float] = []
    input_costs: list[float] = []
    for step in steps:
        last = min(range(len(bars)), key=lambda place: step[place].exposed_s)
        lasts.append(last)
        # The usual one of the others, since an early rank waits for those as well.
        others = [one for place, one in enumerate(step) if place != last]
        costs.append(median(one.exposed_s for one in others) - step[last].exposed_s)
        more_input_s = step[last].input_s - median(one.input_s for one in others)
        input_costs.append(min(costs[-1], max(0.0, more_input_s)))
    place, count = Counter(lasts).most_common(1)[0]
    if count < _OFTEN * len(steps):
        return None, fmean(costs), fmean(input_costs)
    is_late = [last == place for last in lasts]
    cost_s, input_s = (
        fmean(cost if is_own else 0.0 for cost, is_own in zip(each, is_late, strict=True))
        for each in (costs, input_costs)
    )
    late = LateRank(bars[place].rank, count / len(steps), cost_s, waits_input=input_s > cost_s / 2)
    return late, fmean(costs) - cost_s, fmean(input_costs) - input_s
