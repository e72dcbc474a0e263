"""The bandwidth on the mesh without bursts: what long exchanges have shown beside shorter ones."""

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
        link.add(_pushed(num_bytes, seconds), 1e-4)
        assert link.bandwidth is not None
        values.append(link.bandwidth.value)
    return values


def test_what_long_exchanges_have_shown_stands_while_short_ones_do_not_contradict_it() -> None:
    link = PassiveLink()
    (*_, long) = _values(link, 2e6, 0.018, 30)
    assert long == pytest.approx(2e6 / (0.018 - 6e-4), rel=0.01)
    assert _values(link, 2e5, 0.003, 40) == pytest.approx([long] * 40), "processors take a part of short ones"
    assert link.bandwidth is not None
    assert not link.bandwidth.is_sure
    (*_, again) = _values(link, 2e6, 0.02, 30)
    assert again == pytest.approx(2e6 / (0.02 - 6e-4), rel=0.01), "long ones are newer"


def test_short_exchanges_that_no_waiting_explains_replace_what_long_ones_have_shown() -> None:
    link = PassiveLink()
    _values(link, 2e6, 0.018, 5)
    # A plan of other sizes begins when the link falls, so there is no level of its own that it has fallen from.
    (*_, slow) = _values(link, 2e5, 0.1, 30)
    assert link.num_changes == 0
    assert slow == pytest.approx(2e5 / (0.1 - 6e-4), rel=0.01)


def test_a_step_from_before_and_after_a_change_does_not_stand() -> None:
    link = PassiveLink()
    _values(link, 2e6, 0.018, 30)
    _values(link, 2e6, 0.09, 1)
    (*_, slow) = _values(link, 2e6, 0.18, 6)
    assert link.num_changes == 1
    assert slow == pytest.approx(2e6 / (0.18 - 6e-4), rel=0.01)
    assert _values(link, 1e6, 0.095, 40)[-1] == pytest.approx(slow, rel=0.01)


def test_shorter_exchanges_of_another_plan_are_no_change_though_each_hop_waits_for_a_processor() -> None:
    link = PassiveLink()
    _values(link, 8e5, 0.018, 30)
    _values(link, 4.4e5, 0.010, 30)
    assert link.num_changes == 0


def test_a_first_step_without_greetings_is_no_change() -> None:
    link = PassiveLink()
    link.add(replace(_pushed(2e5, 0.003), round_trip_s={}), 1e-4)
    _values(link, 2e5, 0.003, 20)
    link.add(replace(_pushed(2e5, 0.003), round_trip_s={}), 1e-4)
    _values(link, 2e5, 0.003, 20)
    assert link.num_changes == 0


def test_what_long_exchanges_showed_before_the_window_does_not_stand_beside_others_as_long() -> None:
    link = PassiveLink()
    for seconds in (0.018, 0.022):
        for _ in range(20):
            link.add(replace(_pushed(2e6, seconds), seconds=3.0), 1e-4)
    assert link.num_changes == 0
    assert link.bandwidth is not None
    assert link.bandwidth.value == pytest.approx(2e6 / (0.022 - 6e-4), rel=0.01)
