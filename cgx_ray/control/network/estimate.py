"""Estimates with the spread of what they are made from, and the quantiles of both."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Fewest values whose median no single one decides: of steps, of rates, of links.
FEW = 3
# Largest ratio of two values of the same thing: usual noise and slow drift. An estimate with a wider spread says little
# and calls for a probe. Bursts that fill a link of 100 or 200 Mbit/s have 1.04 to 1.09. On links of 1 and 2 Gbit/s that
# two cores do not fill, their estimates are up to 20 % too low, with 1.12 to 1.25.
NOISE = 1.2
# Ratio that noise does not explain: a step that is longer by it is enough to look for another network.
OBVIOUS = 3.0
# Seconds for which a step may stand still by chance: TCP sends a lost packet again after 0.2, or 0.4.
HICCUP_S = 0.5
# Seconds beside which a hiccup is noise: a first step that exchanges for so long tells as much as FEW others.
LONG_S = HICCUP_S / (NOISE - 1)
# Seconds that a busy processor may add to a message. Shorter exchanges say little about the network.
WORK_S = 1e-3
# Standard deviations on either side of the mean that hold 95 % of a normal distribution.
Z_95 = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number, and the spread of the measurements that it was made from.

    The spread says how far the measurements agree. It is no confidence interval, since all of them may be too low or
    too high: on simulated links bursts were off by 0.3 to 1.6 %, and their spread held the truth in 6 of 720 cases.

    source  the data it was made from, such as "bursts" or "probes"
    """

    value: float
    low: float
    high: float
    source: str

    @property
    def is_sure(self) -> bool:
        return 0 < self.high <= NOISE * self.low


def quantile(values: Sequence[float], fraction: float) -> float:
    """Return the value below which this fraction of `values` lies; a fraction outside [0, 1] is clipped."""
    return _at(sorted(values), fraction)


def _at(ordered: Sequence[float], fraction: float) -> float:
    return ordered[min(max(round(fraction * (len(ordered) - 1)), 0), len(ordered) - 1)]


def weighted_quantile(values: Iterable[tuple[float, float]], fraction: float) -> float:
    """Return the value below which this fraction of the weight lies. `values`: (value, weight) each, at least one."""
    ordered = sorted(values)
    reach = list(itertools.accumulate(weight for _, weight in ordered))
    at = min(bisect.bisect_left(reach, fraction * reach[-1]), len(ordered) - 1)
    return ordered[at][0]


def quantile_interval(values: Sequence[float], fraction: float) -> tuple[float, float, float]:
    """Return a quantile between the ends of its 95 % interval.

    The ends are elements of `values` too (order statistics), so the interval holds for any distribution.
    """
    reach, ordered = Z_95 * math.sqrt(fraction * (1 - fraction) / len(values)), sorted(values)
    return _at(ordered, fraction - reach), _at(ordered, fraction), _at(ordered, fraction + reach)
