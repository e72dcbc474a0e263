"""Verdicts from noisy steps, and what is known of dense on this network and on others."""

from __future__ import annotations

import math
import random

import pytest

from cgx_ray.control.learned.evidence import MAX_STEPS, Evidence, Verdict, evidence, verdict
from cgx_ray.control.network.changes import LINK_CHANGE
from cgx_ray.control.network.estimate import NOISE
from cgx_ray.control.trial.measuring_steps import is_worth_comparing
from cgx_ray.control.trial.steps_beside_predictions import DenseBaseline
from cgx_ray.planner.cost import Link

LIMIT = 1.03
SURE_OF_DENSE = Evidence(0.0, 0.0)
LINK = Link.from_rates(bandwidth_gbps=1.0, latency_ms=0.1)
SLOWER_LINK = Link.from_rates(bandwidth_gbps=0.1, latency_ms=0.1)


def noisy(ratio: float, scatter: float, num_steps: int, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [math.log(ratio) + rng.gauss(0, scatter) for _ in range(num_steps)]


def test_three_steps_prove_a_plan_slow_that_takes_twice_as_long_but_not_one_that_takes_a_tenth_longer() -> None:
    assert verdict(evidence([math.log(2)] * 3), LIMIT) is Verdict.SLOW
    assert verdict(evidence([math.log(1.1)] * 3), LIMIT) is Verdict.UNSURE
    assert verdict(evidence([math.log(1.1)] * 12), LIMIT) is Verdict.SLOW


def test_noise_of_a_fifth_disables_no_plan_that_is_a_tenth_faster_in_10_000_looks() -> None:
    logs = noisy(1 / 1.1, 0.2, 10_000)
    found = [verdict(evidence(logs[max(0, end - MAX_STEPS) : end]), LIMIT) for end in range(3, len(logs))]
    assert Verdict.SLOW not in found


def test_one_pause_among_steps_moves_the_mean_by_no_more_than_its_clip() -> None:
    steps = [0.0] * 9
    assert evidence([*steps, math.log(100)]).mean == pytest.approx(evidence([*steps, math.log(LINK_CHANGE)]).mean)


def test_dense_is_less_known_on_another_network_and_least_before_any_dense_step() -> None:
    baseline = DenseBaseline()
    assert baseline.on(LINK).error == math.log(NOISE)
    for log_ratio in noisy(1.2, 0.02, 20):
        baseline.add_step(log_ratio, LINK, 0)
    here, there = baseline.on(LINK), baseline.on(SLOWER_LINK)
    assert here.mean == there.mean == pytest.approx(math.log(1.2), abs=0.02)
    assert there.error == pytest.approx(math.hypot(here.error, math.log(NOISE)))
    baseline.add_step(0.0, SLOWER_LINK, 1)
    assert (baseline.num_steps, baseline.on(SLOWER_LINK).mean) == (1, 0.0)


@pytest.mark.parametrize(
    ("ratio", "num_steps", "dense_error", "is_worth"),
    [(1.08, 40, 0.1, True), (1.08, 39, 0.1, False), (1.08, 40, 0.001, False), (0.95, 40, 0.1, True),
     (0.6, 40, 0.1, False)],
    ids=["slower", "too few steps", "dense is known", "unsure", "much faster"],
)  # fmt: skip
def test_dense_is_measured_only_if_that_can_tell_whether_the_plan_is_slow(
    ratio: float, num_steps: int, dense_error: float, is_worth: bool
) -> None:
    dense = Evidence(0.0, dense_error)
    slowdown = evidence([math.log(ratio)] * num_steps).less(dense)
    assert is_worth_comparing(slowdown, dense, num_steps) is is_worth
