"""Rates of links from made-up bursts and pairs of ranks."""

from __future__ import annotations

import itertools
import random

import pytest

from cgx_ray.control.network.estimate import quantile_interval
from cgx_ray.control.network.rate_estimates import estimate_from_bursts, link_rates
from cgx_ray.monitors.sample import Burst

MIB = 1 << 20


def test_bursts_whose_median_is_far_below_the_fast_ones_are_not_sure() -> None:
    """As 4 ranks on two cores showed links of 994 and 199 Mbit/s (docs/log/2026-11-24.md), and with more slow ones."""
    unfilled = [647, 690, 730, 761, 790, 833, 877, 929]
    for mbit, is_sure in (
        (unfilled, True),
        ([*unfilled[:4], *unfilled], False),
        ([171, 180, 186, 190, 192, 195], True),
    ):
        bursts = {0: [Burst(round(rate * 2500), 0.02) for rate in mbit] * 4}
        found = estimate_from_bursts(bursts, {}, {0: max(mbit) / 8 * 1e6}, {})
        assert found is not None
        assert found.is_sure == is_sure, mbit


def test_a_slow_link_that_fills_most_of_the_bursts_is_sure() -> None:
    """All others wait for it, so their messages make few bursts."""
    bursts = {
        rank: [Burst(num_bytes=round(rate * 0.03), seconds=0.03)] * count
        for rank, (rate, count) in enumerate([(25e6, 4), (6e6, 40), (25e6, 4), (25e6, 4)])
    }
    down = {0: 25e6, 1: 6e6, 2: 25e6, 3: 25e6}
    found = estimate_from_bursts(bursts, {}, down, {1: 6e6})
    assert found is not None
    assert found.is_sure
    assert found.value == 6e6


@pytest.mark.parametrize(
    ("to_rank_1", "from_rank_2", "found"),
    [
        # Rank 1 waits for rank 2, whose uplink is slow: the others reach it as they reach each other.
        (70e6, 15e6, 190e6),
        # Its own downlink is slow, and senders take turns or send all at once.
        (46e6, 70e6, 50e6),
        (17e6, 70e6, 50e6),
        # Both.
        (46e6, 15e6, 50e6),
    ],
)
def test_a_rank_that_waits_for_a_slow_sender_has_no_slow_downlink(
    to_rank_1: float, from_rank_2: float, found: float
) -> None:
    """Rates in bit/s, recorded at 200 Mbit/s with one link of 50."""
    bursts = {rank: [Burst(MIB, 8 * MIB / (50e6 if rank == 1 else 190e6))] * 4 for rank in range(4)}
    pairs = {
        (a, b): [min(from_rank_2 if a == 2 else 70e6, to_rank_1 if b == 1 else 70e6) / 8] * 3
        for a, b in itertools.permutations(range(4), 2)
    }
    down, _ = link_rates(bursts, pairs)
    assert 8 * down[1] == pytest.approx(found, rel=1e-4)
    assert link_rates({}, pairs)[0] == {}


def test_an_interval_holds_its_quantile_about_19_times_in_20() -> None:
    chance = random.Random(0)
    hits = 0
    for _ in range(1000):
        low, value, high = quantile_interval([chance.random() for _ in range(60)], 0.9)
        assert low <= value <= high
        hits += low <= 0.9 <= high
    # 60 samples give a discrete interval; binomial: P(85 <= index ...) lies between 0.90 and 0.99.
    assert 880 <= hits <= 995, hits
