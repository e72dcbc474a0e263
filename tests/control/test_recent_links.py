"""Links that go back and forth, links that drift, and changes that are not the network's."""

from __future__ import annotations

import math

import pytest

from cgx_ray.control.network.changes import ComputeChanges
from cgx_ray.control.network.recent_links import RecentLinks
from cgx_ray.planner.cost import Link


def links_of(stays: list[tuple[float, float]], step_s: float = 0.5) -> RecentLinks:
    """Return the links after stays of (Gbit/s, seconds)."""
    links = RecentLinks()
    for gbps, seconds in stays:
        for _ in range(round(seconds / step_s)):
            links.add_link(Link.from_rates(bandwidth_gbps=gbps, latency_ms=0.5), step_s)
    return links


@pytest.mark.parametrize(
    ("stays", "dwell_s"),
    [
        ([(1.0, 60)], math.inf),
        ([(1.0, 30), (0.1, 30)], math.inf),
        ([(5.0, 8), (2.5, 8), (1.2, 8), (0.6, 8), (0.3, 8), (0.6, 8)], math.inf),
        ([(1.0, 10), (0.1, 10), (1.0, 10), (0.1, 5)], 10.0),
        ([(1.0, 10), (0.1, 10), (1.0, 10), (0.1, 30)], math.inf),
        ([(1.0, 10), (0.5, 1), (0.1, 9), (0.5, 1), (1.0, 9), (0.1, 5)], pytest.approx(10, abs=1.5)),
        ([(1.0, 12), (0.3, 1), (1.0, 12), (0.3, 10), (1.0, 5)], math.inf),
    ],
    ids=[
        "steady",
        "one change",
        "drift",
        "back and forth",
        "steady again",
        "estimates on the way",
        "an outlier before",
    ],
)
def test_only_a_link_that_goes_back_and_forth_is_expected_to_change_soon(
    stays: list[tuple[float, float]], dwell_s: float
) -> None:
    assert links_of(stays).dwell_s == dwell_s


def test_different_links_are_returned_once_each() -> None:
    found = links_of([(1.0, 10), (0.1, 10), (1.05, 10), (0.1, 5)]).different()
    assert [round(link.bandwidth_gbps, 2) for link in found] == [0.1, 1.05]


def test_compute_that_doubles_is_a_cause_after_three_seconds_and_noise_is_none() -> None:
    changes = ComputeChanges()
    for step in range(100):
        changes.add_step(0.3 * (1.2 if step % 2 else 0.85), 0.5)
        assert changes.cause(0.3, 0.3) is None
    for _ in range(6):
        changes.add_step(0.6, 0.5)
    assert changes.cause(0.3, 0.6) == "compute rose from 0.300 to 0.600 s"
    changes.acknowledge()
    assert changes.cause(0.6, 0.6) is None


def test_compute_after_steps_without_any_is_another() -> None:
    changes = ComputeChanges()
    for seconds in (0.1, 0.3):
        for _ in range(20):
            changes.add_step(seconds, 0.5)
    assert changes.cause(0.0, 0.3) == "compute rose from 0.000 to 0.300 s"
