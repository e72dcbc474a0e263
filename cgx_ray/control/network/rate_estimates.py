"""Estimates of a link's bandwidth from bursts or from exchanges. All rates are payload bytes per second."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median

from cgx_ray.control.network.changes import LINK_CHANGE
from cgx_ray.control.network.estimate import (
    FEW,
    WORK_S,
    Estimate,
    quantile,
    quantile_interval,
    weighted_quantile,
)
from cgx_ray.control.network.topology import K, slow_links
from cgx_ray.control.network.traffic import ObservedExchange
from cgx_ray.monitors.sample import Burst

# Quantile of rates that stands for the link. Busy processors and late ranks only make messages slower, so the fast side
# tells the link; the very fastest bursts are artefacts of late time stamps. Bursts count by their length: a late stamp
# changes a short one most.
FAST_RATE = 0.85
# Fewer bursts than this may be fast or slow by chance, so the estimate is not sure, whatever their scatter.
MIN_SURE_BURSTS = 12
# Beside a slow sender, a rank is not slow itself if others reach it at this share of the rate at which they reach the
# rest. Through a downlink of a quarter of the rate, single messages came at up to 0.67; ranks that only waited were
# reached at 0.76 or more.
REACHED_SHARE = 0.72
# Least share of a measured time that is kept when latency is subtracted, so that the rest stays positive.
MIN_LEFT = 0.1


def link_rates(
    bursts: Mapping[int, Sequence[Burst]], pair_rates: Mapping[tuple[int, int], Sequence[float]]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return for each rank the rate at which its link receives, and the rate at which it sends, if enough is known.

    A rank sends to all others at the same time, so the rates that receivers observe are parts of its link's rate. Of
    each pair the fast side counts: a sender that gets no processor within a short message looks like a slow link.

    A rank that waits for a slow sender receives little, however fast its own link is. If the others reach it as fast as
    they reach the rest, it counts with the median rate.
    """
    down = {rank: _fast_rate(found) for rank, found in bursts.items() if found}
    num_rates: dict[int, int] = defaultdict(int)
    sent: dict[int, dict[int, float]] = defaultdict(dict)
    for (sender, receiver), rates in pair_rates.items():
        num_rates[sender] += len(rates)
        sent[sender][receiver] = quantile(rates, FAST_RATE)
    known = [sender for sender in sent if num_rates[sender] >= FEW and len(sent) > 1]
    up = {sender: fmean(sent[sender].values()) * (len(sent) - 1) for sender in known}
    if down and (slow_senders := slow_links(up)):
        sent_fast = [sent[sender] for sender in known if sender not in slow_senders]
        waiting = [rank for rank in slow_links(down) if _is_reached(rank, sent_fast)]
        down |= dict.fromkeys(waiting, median(down.values()))
    return down, up


def _is_reached(rank: int, sent: Iterable[Mapping[int, float]]) -> bool:
    """Return whether the usual sender reaches `rank` as fast as others. `sent`: of each sender, rates by receiver."""
    shares = [rates[rank] / median(rates.values()) for rates in sent if rank in rates and len(rates) > 1]
    return bool(shares) and median(shares) >= REACHED_SHARE


def _fast_rate(bursts: Iterable[Burst]) -> float:
    return weighted_quantile(((burst.rate, burst.seconds) for burst in bursts), FAST_RATE)


def slowest_rate(usual: float, slow: Mapping[K, float]) -> float:
    """Return the rate that the planner uses: the slowest of the `slow` links, or the `usual` one if none is slow.

    The usual rate is a median, since the minimum of all links would be that of the rank whose processor is busiest.
    """
    return min([usual, *slow.values()])


def estimate_from_bursts(
    bursts: Mapping[int, Sequence[Burst]],
    pair_rates: Mapping[tuple[int, int], Sequence[float]],
    down: Mapping[int, float],
    slow: Mapping[int, float],
) -> Estimate | None:
    """Return the bandwidth from bursts by rank, or None if there are fewer than FEW.

    down  receiving rate by rank, of `link_rates`
    slow  rates of ranks with a slow link

    The spread reaches down to the median burst: where messages do not fill the link, most bursts are far slower than
    the fastest, and the estimate is not sure. With fewer than MIN_SURE_BURSTS it is twice as wide on either side. If a
    link is slow, only what came through that link says how sure its rate is.
    """
    rates = [burst.rate for found in bursts.values() for burst in found]
    if len(rates) < FEW:
        return None
    if slow:
        slowest = min(slow, key=slow.__getitem__)
        if down.get(slowest) == slow[slowest]:
            own = [burst.rate for burst in bursts.get(slowest, ())]
        else:
            own = [rate for (sender, _), found in pair_rates.items() if sender == slowest for rate in found]
        rates = own or rates
    _, fast, high = quantile_interval(rates, FAST_RATE)
    value, chance = slowest_rate(median(down.values()), slow), 1 if len(rates) >= MIN_SURE_BURSTS else 2
    low = value * min(median(rates) / fast, 1) / chance
    return Estimate(value=value, low=low, high=value * chance * high / fast, source="bursts")


def estimate_at_latency(
    latency_s: float, steps: Iterable[Sequence[ObservedExchange]], *, is_pushed: bool = False
) -> Estimate | None:
    """Return the bandwidth under the assumption that a message takes `latency_s`, or None without exchanges.

    All exchanges of a step count as one, since small ones say little. The spread reaches from the rate with no
    latency to the rate with WORK_S more per hop, so an estimate from short exchanges is not sure.

    is_pushed  senders do not wait for receivers. Then the last rank finds the messages of the others already there, in
               some steps all of them. So the median step counts instead of the fast ones, and nothing is sure
    """
    rates = []
    for exchanges in steps:
        hops, num_bytes, seconds = (
            sum(getattr(one, name) for one in exchanges) for name in ("hops", "num_bytes", "seconds")
        )
        if num_bytes > 0 and seconds > 0:
            left_s = (seconds, seconds - hops * latency_s, seconds - hops * (latency_s + WORK_S))
            rates.append([num_bytes / max(left, MIN_LEFT * seconds) for left in left_s])
    if not rates:
        return None
    slow, usual, fast = (quantile_interval(column, FAST_RATE) for column in zip(*rates, strict=True))
    if not is_pushed:
        return Estimate(value=usual[1], low=slow[0], high=fast[2], source="exchanges")
    low, value, _ = zip(*rates, strict=True)
    low_end = quantile_interval(low, 0.5)[0]
    high_end = max(fast[2], LINK_CHANGE * low_end)
    return Estimate(value=median(value), low=low_end, high=high_end, source="exchanges")
