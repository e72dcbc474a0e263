"""The bandwidth on the mesh without bursts, from exchanges of different lengths."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from cgx_ray.control.network.link_estimate import PassiveLink
from cgx_ray.control.network.traffic import ObservedExchange, StepTraffic

PAIRS = list(itertools.combinations(range(4), 2))


def _pushed(num_bytes: float, seconds: float) -> StepTraffic:
    """Return a step on the mesh without bursts."""
    exchanges = [ObservedExchange(hops=6, num_bytes=num_bytes, seconds=seconds)] * 2
    return StepTraffic(seconds=0.5, exchanges=exchanges, round_trip_s=dict.fromkeys(PAIRS, 2e-4))


def _values(link: PassiveLink, num_bytes: float, seconds: float, num_steps: int) -> list[float]:
    values = []
    for _ in range(num_steps):
        link.add_traffic(_pushed(num_bytes, seconds), 1e-4)
        assert link.bandwidth is not None
        values.append(link.bandwidth.value)
    return values


def test_exchanges_of_another_length_replace_those_of_the_plan_before() -> None:
    link = PassiveLink()
    _values(link, 2e6, 0.018, 5)
    # A plan of other sizes begins when the link falls, so there is no level of its own that it has fallen from.
    (*_, slow) = _values(link, 2e5, 0.1, 30)
    assert link.num_changes == 0
    assert slow == pytest.approx(2e5 / (0.1 - 6e-4), rel=0.01)


def test_shorter_exchanges_of_another_plan_are_no_change_though_each_hop_waits_for_a_processor() -> None:
    link = PassiveLink()
    _values(link, 8e5, 0.018, 30)
    _values(link, 4.4e5, 0.010, 30)
    assert link.num_changes == 0


def test_a_first_step_without_greetings_is_no_change() -> None:
    link = PassiveLink()
    link.add_traffic(replace(_pushed(2e5, 0.003), round_trip_s={}), 1e-4)
    _values(link, 2e5, 0.003, 20)
    link.add_traffic(replace(_pushed(2e5, 0.003), round_trip_s={}), 1e-4)
    _values(link, 2e5, 0.003, 20)
    assert link.num_changes == 0
