"""Rates that no link can have had."""

from __future__ import annotations

import pytest

from cgx_ray.control.network.rate_ceiling import RateCeiling
from cgx_ray.control.network.traffic import StepTraffic
from cgx_ray.monitors.sample import Burst, HostLoad

RATE = 125e6
SLOW, FAST = Burst(1_000_000, 1e6 / RATE), Burst(1_000_000, 1e6 / (1.4 * RATE))
NODES = {0: "a", 1: "b"}


def traffic(*bursts: Burst) -> StepTraffic:
    return StepTraffic(seconds=0.5, bursts={0: bursts, 1: [SLOW]})


def host(*, card_bits_per_s: float, shown: float = 0.0) -> HostLoad:
    return HostLoad(sent_bytes_per_s=0.0, received_bytes_per_s=shown, nic_speed_bits_per_s=card_bits_per_s)


def test_bursts_that_are_faster_than_the_card_are_dropped_and_counted() -> None:
    ceiling = RateCeiling()
    ceiling.add_host("a", host(card_bits_per_s=1e9))
    ceiling.add_host("b", host(card_bits_per_s=1e9))
    possible = ceiling.possible(traffic(FAST, SLOW, FAST), NODES, probed=None)
    assert {rank: list(found) for rank, found in possible.bursts.items()} == {0: [SLOW], 1: [SLOW]}
    assert ceiling.num_dropped == 2


@pytest.mark.parametrize("card_bits_per_s", [0.0, 1e7])
def test_a_card_of_unknown_speed_or_that_has_shown_more_than_it_reports_limits_nothing(card_bits_per_s: float) -> None:
    ceiling = RateCeiling()
    for shown in (RATE, 0.0):
        ceiling.add_host("a", host(card_bits_per_s=card_bits_per_s, shown=shown))
    assert ceiling.possible(traffic(FAST), NODES, probed=None) == traffic(FAST)
    assert ceiling.num_dropped == 0


def test_few_bursts_above_all_probes_are_dropped_but_not_most() -> None:
    ceiling = RateCeiling()
    assert list(ceiling.possible(traffic(FAST, SLOW), NODES, probed=RATE).bursts[0]) == [SLOW]
    assert ceiling.num_dropped == 1
    # Probes that shared the link with the training, or a link that has become faster.
    assert ceiling.possible(traffic(FAST, FAST, FAST), NODES, probed=RATE) == traffic(FAST, FAST, FAST)
    assert ceiling.num_dropped == 1
